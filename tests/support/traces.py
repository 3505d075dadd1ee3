"""What a claim may leave behind by mistake."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.process_state import process_state

import safe_gpu
from safe_gpu.claim import owner
from safe_gpu.coordination.entry import Entry
from safe_gpu.coordination.holders import living_claims
from safe_gpu.coordination.queue import waiting_tickets
from safe_gpu.errors import StateDirError


@contextmanager
def untouched() -> Iterator[None]:
    process, before, entries = process_state(), _traces(), _entries()
    yield
    assert not process_state().changes(process)
    now = _traces()
    for what, then in before.items():
        assert now[what] == then, what
    assert not _entries() - entries


def _traces() -> dict[str, object]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    return {
        "claims": _names(living_claims),
        "tickets": _names(waiting_tickets),
        "contexts": sorted(path.name for path in state.glob("simulated/*/*")),
        "owners": (owner.current_owner(), safe_gpu.gpu_owner),
    }


def _names(living: Callable[[], list[Entry]]) -> list[str]:
    try:
        return [entry.name for entry in living()]
    except StateDirError:  # the test has made it so
        return []


def _entries() -> set[str]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    return {path.name for part in ("claims", "queue") for path in state.glob(f"{part}/*")}


def is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
