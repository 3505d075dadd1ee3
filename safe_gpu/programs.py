"""Runs a program of the system and reads what it prints, in bounded time and memory, whatever the program does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

__all__ = ["TooLate", "TooMuch", "output_of"]

_UNKILLABLE = 1.0  # seconds that a killed program is waited for: a driver that hangs may keep it


class TooLate(Exception):
    """It did not end in time. It was killed, with its children."""


class TooMuch(Exception):
    """It printed more than is read. It was killed, with its children."""


def output_of(
    arguments: Sequence[str], *, env: Mapping[str, str], timeout: float, most: int, apart: bool = False
) -> tuple[int, str, str]:
    """Exit status, output and error output; the last is in the output unless ``apart``.

    Bytes that are not UTF-8 become U+FFFD. A child that keeps the output open is waited for like the program.

    Args:
        timeout: seconds. most: bytes that are read.

    Raises:
        OSError: it cannot be started. TooLate, TooMuch: see there.
    """
    import subprocess

    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if apart else subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
    )
    deadline = time.monotonic() + timeout
    try:
        out, err = _read(process, deadline, most)
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except BaseException as trouble:
        _abandon(process)
        if isinstance(trouble, subprocess.TimeoutExpired):
            raise TooLate from trouble
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace")


def _read(process: subprocess.Popen[bytes], deadline: float, most: int) -> list[bytes]:
    """What it prints on its output and its error output, until both are closed."""
    import selectors

    parts: list[list[bytes]] = [[], []]
    with selectors.DefaultSelector() as selector:
        for number, stream in enumerate((process.stdout, process.stderr)):
            if stream is not None:
                selector.register(stream, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready or time.monotonic() >= deadline:
                raise TooLate
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    selector.unregister(key.fileobj)
                most -= len(part)
                if most < 0:
                    raise TooMuch
                parts[key.data].append(part)
    return [b"".join(one) for one in parts]


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill it with its children, and do not wait for it for long."""
    import subprocess

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(timeout=_UNKILLABLE)
    except subprocess.TimeoutExpired:
        pass
