"""Notes of GPUs on which a claim failed: each user has its own, and reads those of all."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support import api

UUID = "GPU-1"
OTHER = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")


@pytest.fixture
def place(open_tmp: Path) -> str:
    return str(open_tmp / "state")


def path(place: str, uuid: str = UUID, uid: int | None = None) -> Path:
    return Path(place, "faults", f"{uuid}.{os.geteuid() if uid is None else uid}")


def test_a_note_is_read_back_and_is_one_line_of_json_for_everybody(place: str) -> None:
    mask = os.umask(0o077)
    try:
        api.write_fault(place, UUID, api.GpuFault(1795184513.2041, "cuInit failed"))
    finally:
        os.umask(mask)
    assert api.read_faults(place, [UUID, "GPU-2"]) == {UUID: api.GpuFault(1795184513.204, "cuInit failed")}
    assert path(place).stat().st_mode & 0o777 == 0o644
    assert path(place).parent.stat().st_mode & 0o7777 == 0o1777
    assert path(place).read_text() == '{"when": 1795184513.204, "error": "cuInit failed"}\n'
    api.write_fault(place, UUID, api.GpuFault(1.0, "\U0001f600" * 9999))
    assert path(place).stat().st_size < 4096
    assert len(api.read_faults(place, [UUID])[UUID].error) == 400
    assert os.listdir(path(place).parent) == [path(place).name]
    api.write_fault(place, "MIG-GPU-1/7/0", api.GpuFault(1.0, "bad"))  # as older drivers name an instance
    assert api.read_faults(place, ["MIG-GPU-1/7/0"]) == {"MIG-GPU-1/7/0": api.GpuFault(1.0, "bad")}


def test_a_note_may_say_for_how_long_it_counts(place: str) -> None:
    hour = api.GpuFault(1795184513.0, "it hangs", 3600)
    api.write_fault(place, UUID, hour)
    assert path(place).read_text() == '{"when": 1795184513.0, "error": "it hangs", "for": 3600}\n'
    assert api.read_faults(place, [UUID]) == {UUID: hour}
    day = api.LAST_CHOICE
    for lasts, counts in ((60, 60), (1e9, day), (0, day), (-5, day), (math.nan, day), ("3600", day), (True, day)):
        path(place).write_text(json.dumps({"when": 1, "error": "it hangs", "for": lasts}))
        assert api.read_faults(place, [UUID])[UUID].lasts == counts


def test_what_is_no_plain_file_is_no_note_and_is_not_waited_for(place: str, tmp_path: Path) -> None:
    api.write_fault(place, "GPU-2", api.GpuFault(1.0, "bad"))
    (tmp_path / "secret").write_text('{"when": 1, "error": "x"}')
    for text in (b"\xff", b"[]", b'{"when": null}', b" " * 9999):
        path(place).write_bytes(text)
        assert list(api.read_faults(place, [UUID, "GPU-2"])) == ["GPU-2"]
    path(place).unlink()
    for number, make in enumerate((os.mkfifo, lambda name: name.symlink_to(tmp_path / "secret"), os.mkdir)):
        make(path(place))
        assert list(api.read_faults(place, [UUID, "GPU-2"])) == ["GPU-2"]
        path(place).rename(tmp_path / f"{number}")
    path(place).mkdir()
    with pytest.raises(OSError):
        api.write_fault(place, UUID, api.GpuFault(1.0, "bad"))
    Path(place, "faults").rename(tmp_path / "faults")
    Path(place, "faults").symlink_to(tmp_path / "faults")
    assert api.read_faults(place, ["GPU-2"]) == {}
    with pytest.raises(api.StateDirError, match="symbolic link"):
        api.write_fault(place, UUID, api.GpuFault(1.0, "bad"))


@needs_root
def test_each_user_has_a_note_of_its_own(place: str, as_user: Any) -> None:
    now = round(time.time())
    api.write_fault(place, UUID, api.GpuFault(now - 60, "bad"))

    def work(say: Any, listen: Any) -> None:
        api.clear_fault(place, UUID)
        for fault in (api.GpuFault(now, "again"), api.GpuFault(now - api.LAST_CHOICE - 60, "old")):
            say(api.read_faults(place, [UUID])[UUID].error)
            listen()
            api.write_fault(place, UUID, fault)
        say("done")

    other = as_user(work, uid=OTHER)
    assert other.hear() == "bad"
    other.tell()
    assert other.hear() == "again"
    api.clear_fault(place, UUID)
    assert api.read_faults(place, [UUID]) == {UUID: api.GpuFault(now, "again")}
    other.tell()
    assert other.hear() == "done"
    assert api.read_faults(place, [UUID]) == {}


@needs_root
def test_names_that_a_neighbour_makes_say_nothing_and_are_not_all_read(place: str) -> None:
    now = round(time.time())
    api.write_fault(place, UUID, api.GpuFault(now, "bad"))
    forged = json.dumps({"when": now + 60, "error": "forged"})
    for uid in range(100, 400):
        path(place, uid=uid).write_text(forged)
        os.chown(path(place, uid=uid), OTHER, OTHER)
    for ending in ("", "-1", "\u0663", "9" * 99):
        Path(place, "faults", f"{UUID}.{ending}").touch()
    assert api.read_faults(place, [UUID]) == {UUID: api.GpuFault(now, "bad")}
