"""Notes of GPUs on which a claim failed: each user has its own, and reads those of all."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.coordination.faults import clear_fault, read_faults, write_fault
from safe_gpu.errors import StateDirError
from safe_gpu.gpus.devices import LAST_CHOICE, GpuFault

UUID = "GPU-1"
OTHER = 54321


@pytest.fixture
def place(open_tmp: Path) -> str:
    return str(open_tmp / "state")


def path(place: str, uuid: str = UUID, uid: int | None = None) -> Path:
    return Path(place, "faults", f"{uuid}.{os.geteuid() if uid is None else uid}")


def test_a_note_is_read_back_and_is_one_line_of_json_for_everybody(place: str) -> None:
    mask = os.umask(0o077)
    try:
        write_fault(place, UUID, GpuFault(1795184513.2041, "cuInit failed"))
    finally:
        os.umask(mask)
    assert read_faults(place, [UUID, "GPU-2"]) == {UUID: GpuFault(1795184513.204, "cuInit failed")}
    assert path(place).stat().st_mode & 0o777 == 0o644
    assert path(place).parent.stat().st_mode & 0o7777 == 0o1777
    assert json.loads(path(place).read_text()) == {"when": 1795184513.204, "error": "cuInit failed"}
    assert path(place).read_text().count("\n") == 1
    write_fault(place, UUID, GpuFault(2.0, "again"))
    assert read_faults(place, [UUID]) == {UUID: GpuFault(2.0, "again")}
    assert os.listdir(path(place).parent) == [path(place).name]
    write_fault(place, "MIG-GPU-1/7/0", GpuFault(1.0, "bad"))  # as older drivers name an instance
    assert path(place, "MIG-GPU-1_7_0").exists()
    assert read_faults(place, ["MIG-GPU-1/7/0"]) == {"MIG-GPU-1/7/0": GpuFault(1.0, "bad")}


def test_text_is_cut_and_made_safe_for_terminals(place: str) -> None:
    write_fault(place, UUID, GpuFault(1.0, "\x1b[31m\udce9" + "\U0001f600" * 9999))
    assert path(place).stat().st_size < 4096
    error = read_faults(place, [UUID])[UUID].error
    assert error.startswith(" [31m\ufffd\U0001f600")
    assert len(error) == 400


LONG = b'{"when": 1, "error": "' + b"x" * 9999


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"null", b'{"when": null, "error": "x"}', LONG + b'"}'])
def test_nonsense_is_no_note(place: str, content: bytes) -> None:
    write_fault(place, "GPU-2", GpuFault(1.0, "bad"))
    path(place).write_bytes(content)
    assert read_faults(place, [UUID, "GPU-2"]) == {"GPU-2": GpuFault(1.0, "bad")}


def test_what_is_no_plain_file_is_no_note_and_is_not_waited_for(place: str, tmp_path: Path) -> None:
    write_fault(place, "GPU-2", GpuFault(1.0, "bad"))
    (tmp_path / "secret").write_text('{"when": 1, "error": "x"}')
    path(place).symlink_to(tmp_path / "secret")
    assert read_faults(place, [UUID]) == {}
    path(place).unlink()
    os.mkfifo(path(place))
    assert read_faults(place, [UUID]) == {}
    path(place).unlink()
    path(place).mkdir()
    assert read_faults(place, [UUID]) == {}
    with pytest.raises(OSError):
        write_fault(place, UUID, GpuFault(1.0, "bad"))
    Path(place, "faults").rename(tmp_path / "faults")
    Path(place, "faults").symlink_to(tmp_path / "faults")
    assert read_faults(place, ["GPU-2"]) == {}
    with pytest.raises(StateDirError, match="symbolic link"):
        write_fault(place, UUID, GpuFault(1.0, "bad"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_each_user_has_a_note_of_its_own(place: str, as_user: Any) -> None:
    now = round(time.time())
    write_fault(place, UUID, GpuFault(now - 60, "bad"))

    def work(say: Any, listen: Any) -> None:
        clear_fault(place, UUID)
        say(read_faults(place, [UUID])[UUID].error)
        listen()
        write_fault(place, UUID, GpuFault(now, "again"))
        say("done")
        listen()
        write_fault(place, UUID, GpuFault(now - LAST_CHOICE - 60, "old"))
        say("done")

    other = as_user(work, uid=OTHER)
    assert other.hear() == "bad"
    other.tell()
    assert other.hear() == "done"
    assert read_faults(place, [UUID]) == {UUID: GpuFault(now, "again")}
    clear_fault(place, UUID)
    assert read_faults(place, [UUID]) == {UUID: GpuFault(now, "again")}
    other.tell()
    assert other.hear() == "done"
    assert read_faults(place, [UUID]) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_names_that_a_neighbour_makes_say_nothing_and_are_not_all_read(place: str) -> None:
    now = round(time.time())
    write_fault(place, UUID, GpuFault(now, "bad"))
    forged = json.dumps({"when": now + 60, "error": "forged"})
    for uid in range(100, 400):
        path(place, uid=uid).write_text(forged)
        os.chown(path(place, uid=uid), OTHER, OTHER)
    for name in (".", f"{UUID}.", f"{UUID}.-1", f"{UUID}.\u0663", f"{UUID}.{'9' * 99}"):
        Path(place, "faults", name).touch() if name != "." else None
    assert read_faults(place, [UUID]) == {UUID: GpuFault(now, "bad")}
