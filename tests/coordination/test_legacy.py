"""The older package's lock: shared by ours, waited for, warned of where it cannot be reached."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from safe_gpu.coordination import legacy
from safe_gpu.coordination.legacy import take_legacy_lock
from safe_gpu.errors import LockTimeout, UnsatisfiableRequestError

logger = logging.getLogger("test")

THEIRS = """
import fcntl, os, sys
f = open(os.open(sys.argv[1] if len(sys.argv) > 1 else PATH, os.O_CREAT | os.O_WRONLY, 0o666), "w")
fcntl.lockf(f, fcntl.LOCK_EX)
say("theirs"); listen()
f.close(); say("released"); listen()
"""


@pytest.fixture(autouse=True)
def lock_file(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = open_tmp / "safe_gpu" / "gpu-lock"
    monkeypatch.setattr(legacy, "LOCK_FILE", str(path))
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK", raising=False)
    return path


@pytest.fixture
def present(lock_file: Path) -> Path:
    lock_file.parent.mkdir()
    lock_file.touch(0o666)
    return lock_file


def theirs(child, path: Path):
    process = child(THEIRS.replace("PATH", repr(str(path))))
    assert process.hear() == "theirs"
    return process


def test_the_path_is_the_older_packages() -> None:
    import importlib

    fresh = importlib.util.find_spec("safe_gpu.coordination.legacy")
    source = Path(fresh.origin).read_text()
    assert '"/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"' in source


def test_absent_means_nothing_to_do(lock_file: Path) -> None:
    assert take_legacy_lock(0.0, logger) is None
    assert not lock_file.parent.exists()


def test_never_means_never(present: Path, monkeypatch: pytest.MonkeyPatch, child) -> None:
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "never")
    theirs(child, present)
    assert take_legacy_lock(0.0, logger) is None


def test_always_makes_it_open_to_all(lock_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "always")
    before = os.umask(0o077)
    try:
        lock = take_legacy_lock(0.0, logger)
    finally:
        os.umask(before)
    assert lock is not None
    lock.release()
    assert lock_file.stat().st_mode & 0o777 == 0o666
    assert lock_file.parent.stat().st_mode & 0o7777 == 0o1777


def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "sometimes")
    with pytest.raises(UnsatisfiableRequestError, match=r"SAFE_GPU_LEGACY_LOCK=sometimes.*auto, always or never"):
        take_legacy_lock(0.0, logger)


def test_ours_pass_side_by_side_and_keep_theirs_out(present: Path, child) -> None:
    mine = take_legacy_lock(0.0, logger)
    other = child(
        f"from safe_gpu.coordination import legacy\nimport logging\nlegacy.LOCK_FILE = {str(present)!r}\n"
        "lock = legacy.take_legacy_lock(0.0, logging)\nsay('shared' if lock else 'none'); listen(); lock.release()"
    )
    assert other.hear() == "shared"
    probe = (
        f"import fcntl, os\nfd = os.open({str(present)!r}, os.O_WRONLY)\n"
        "try: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB); say('theirs')\nexcept OSError: say('kept out')"
    )
    assert child(probe).hear() == "kept out"
    other.tell()
    other.process.wait(30)
    assert child(probe).hear() == "kept out"
    mine.release()
    mine.release()
    assert child(probe).hear() == "theirs"


def test_theirs_keeps_us_out_until_the_deadline(present: Path, child) -> None:
    holder = theirs(child, present)
    with pytest.raises(LockTimeout, match=r"older safe-gpu package") as caught:
        take_legacy_lock(time.monotonic(), logger)
    assert caught.value.pid == holder.pid
    assert str(holder.pid) in str(caught.value)


def test_theirs_is_waited_for(present: Path, child) -> None:
    holder = theirs(child, present)
    other = child(
        f"PATH = {str(present)!r}"
        """
import logging, time
from safe_gpu.coordination import legacy
legacy.LOCK_FILE = PATH
real = time.sleep
def nap(seconds):
    time.sleep = real
    say("waiting")
    real(seconds)
time.sleep = nap
legacy.take_legacy_lock(None, logging)
say("got it"); listen()
"""
    )
    assert other.hear() == "waiting"
    holder.tell()
    assert holder.hear() == "released"
    assert other.hear() == "got it"


def test_a_directory_that_cannot_be_entered_is_warned_of(present: Path, as_user) -> None:
    present.parent.chmod(0o700)
    path = present

    def work(say, listen) -> None:
        class Log:
            def warning(self, text: str, *args: object) -> None:
                say(text % args)

        say(take_legacy_lock(0.0, Log()))

    other = as_user(work, uid=65534)
    warning = other.hear()
    assert str(path) in warning
    assert "Permission denied" in warning
    assert other.hear() == "None"


def test_a_link_in_its_place_is_not_followed(lock_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock_file.parent.mkdir()
    (tmp_path / "target").touch()
    lock_file.symlink_to(tmp_path / "target")
    assert take_legacy_lock(0.0, logger) is None
    assert "cannot be taken" in caplog.text
