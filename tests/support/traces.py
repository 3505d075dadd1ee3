"""What a claim may leave behind by mistake."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.process_state import process_state

import safe_gpu
from safe_gpu.claim import owner


@contextmanager
def untouched() -> Iterator[None]:
    process, before = process_state(), _traces()
    yield
    assert not process_state().changes(process)
    now = _traces()
    for what, then in before.items():
        assert now[what] == then, what


def _held(state: Path) -> list[str]:
    """Names of the locks that are held, and not only tried by a waiter, who holds host.lock then."""

    def leases() -> list[str]:
        return [path.name for path in sorted(state.glob("leases/*.lock")) if is_locked(path)]

    if not (state / "host.lock").exists():
        return leases()
    with (state / "host.lock").open() as lock:
        for _ in range(100):  # a test may hold it all the time
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return leases()
            time.sleep(0.005)
    return ["host.lock", *leases()]


def _traces() -> dict[str, object]:
    state = Path(os.environ["SAFE_GPU_DIR"])
    return {
        "locks": _held(state),
        "tickets": sorted(path.name for path in state.glob("queue/*")),
        "contexts": sorted(path.name for path in state.glob("simulated/*/*")),
        "owners": (owner.current_owner(), safe_gpu.gpu_owner),
    }


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
