"""Who uses which GPU: marks in a directory that all hosts share, made by O_EXCL: no double booking is missed."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MARKS = os.environ["TEST_MARKS"]


@contextmanager
def using(*uuids: str, host: str | None = None) -> Iterator[None]:
    """Mark GPUs of a host as used; someone who uses one at the same time is a double booking, recorded for good."""
    paths = [f"{MARKS}/{host or socket.gethostname()}:{uuid}" for uuid in uuids]
    for path in paths:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os.close(os.open(f"{path}.DOUBLE", os.O_CREAT))
            raise AssertionError(f"double booking: {path}") from None
    try:
        yield
    finally:
        for path in paths:
            os.unlink(path)


def meet(name: str, me: int, everyone: int = 2, seconds: float = 100.0) -> None:
    """Wait until ``everyone`` has come to this point."""
    os.close(os.open(f"{MARKS}/meet-{name}-{me}", os.O_CREAT))
    wait(lambda: all(os.path.exists(f"{MARKS}/meet-{name}-{other}") for other in range(everyone)), name, seconds)


def wait(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(0.01)


def raises(kind: type[BaseException], *words: str, call: Any) -> Any:
    """The error that ``call`` raises; it must be of this kind and have these words in its message."""
    try:
        call()
    except kind as err:
        if missing := [word for word in words if word not in str(err)]:
            raise AssertionError(f"{missing} not in: {err}") from err
        return err
    raise AssertionError(f"no {kind.__name__}")
