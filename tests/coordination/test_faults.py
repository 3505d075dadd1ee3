"""Notes of GPUs on which a claim failed: files that every user may read, replace and clear."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ground import write_for_all

from safe_gpu.coordination.files.state_dir import StateDir
from safe_gpu.coordination.leases.faults import clear_fault, read_faults, write_fault
from safe_gpu.coordination.leases.file_names import fault_name
from safe_gpu.errors import StateDirError
from safe_gpu.gpus.devices import GpuFault

UUID = "GPU-1"


@pytest.fixture
def leases(open_tmp: Path) -> Iterator[StateDir]:
    with StateDir(str(open_tmp / "leases")) as directory:
        yield directory


def path(leases: StateDir) -> Path:
    return Path(leases.path) / fault_name(UUID)


def test_a_note_is_read_back_and_is_one_line_of_json_for_everybody(leases: StateDir) -> None:
    mask = os.umask(0o077)
    try:
        write_fault(leases, UUID, GpuFault(1795184513.2041, "cuInit failed"))
    finally:
        os.umask(mask)
    assert read_faults(leases, [UUID, "GPU-2"]) == {UUID: GpuFault(1795184513.204, "cuInit failed")}
    assert path(leases).stat().st_mode & 0o777 == 0o666
    assert json.loads(path(leases).read_text()) == {"when": 1795184513.204, "error": "cuInit failed"}
    assert path(leases).read_text().count("\n") == 1


def test_text_is_cut_and_made_safe_for_terminals(leases: StateDir) -> None:
    write_fault(leases, UUID, GpuFault(1.0, "\x1b[31m\udce9" + "\U0001f600" * 9999))
    assert path(leases).stat().st_size < 4096
    error = read_faults(leases, [UUID])[UUID].error
    assert error.startswith(" [31m\ufffd\U0001f600")
    assert len(error) == 400


def test_the_name_of_an_old_mig_instance(leases: StateDir) -> None:
    write_fault(leases, "MIG-GPU-1/7/0", GpuFault(1.0, "bad"))
    assert leases.names() == ["MIG-GPU-1_7_0.fault"]
    assert read_faults(leases, ["MIG-GPU-1/7/0"]) == {"MIG-GPU-1/7/0": GpuFault(1.0, "bad")}


LONG = b'{"when": 1, "error": "' + b"x" * 9999


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"null", b'{"when": null, "error": "x"}', LONG + b'"}'])
def test_nonsense_is_no_note(leases: StateDir, content: bytes) -> None:
    write_for_all(path(leases), content)
    assert read_faults(leases, [UUID]) == {}


def test_what_is_no_plain_file_is_no_note_and_is_not_waited_for(leases: StateDir, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"when": 1, "error": "x"}')
    path(leases).symlink_to(tmp_path / "secret")
    assert read_faults(leases, [UUID]) == {}
    with pytest.raises(StateDirError, match="symbolic link"):
        write_fault(leases, UUID, GpuFault(1.0, "bad"))
    path(leases).unlink()
    os.mkfifo(path(leases), 0o666)
    assert read_faults(leases, [UUID]) == {}
    with pytest.raises(StateDirError):
        write_fault(leases, UUID, GpuFault(1.0, "bad"))


def test_a_note_is_cleared(leases: StateDir) -> None:
    clear_fault(leases, UUID)
    write_fault(leases, UUID, GpuFault(1.0, "bad"))
    clear_fault(leases, UUID)
    assert read_faults(leases, [UUID]) == {}
    assert leases.names() == []


def test_another_users_note_is_emptied_and_replaced(leases: StateDir, as_user: Any) -> None:
    write_fault(leases, UUID, GpuFault(1.0, "bad"))
    assert Path(leases.path).stat().st_mode & 0o7777 == 0o1777

    def work(say: Any, listen: Any) -> None:
        with StateDir(leases.path) as mine:
            clear_fault(mine, UUID)
            say(read_faults(mine, [UUID]))
            listen()
            write_fault(mine, UUID, GpuFault(2.0, "again"))
            say("done")

    other = as_user(work, uid=54321)
    assert other.hear() == "{}"
    assert path(leases).stat().st_uid == os.geteuid()
    assert path(leases).read_bytes() == b""
    other.tell()
    assert other.hear() == "done"
    assert read_faults(leases, [UUID]) == {UUID: GpuFault(2.0, "again")}
