"""What ``run`` and ``wait`` say while they wait: a line a minute, or one live line on a terminal."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from threading import Event, Thread

    from .report import WaitNews

__all__ = ["WaitLine"]

_ERASE = "\r\x1b[K"


class WaitLine:
    """Shows the news of a wait on a stream; on a terminal as one line with a running clock, wiped at the end.

    A stream that fails (a terminal that was closed, a pipe that nobody reads) costs the news, not the place in the
    queue.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._began = time.monotonic()
        self._text = ""
        self._thread: Thread | None = None
        self._ended: Event | None = None

    def __enter__(self) -> WaitLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._write(_ERASE)

    def show(self, news: WaitNews) -> None:
        """Tell the user where the wait stands."""
        from .report import waiting_message

        self._text = f"safe-gpu: {waiting_message(news)}"
        if not self._live:
            self._write(f"{self._text}\n")
        elif self._thread is None:
            import threading

            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._tick, name="safe_gpu-waitline", daemon=True)
            self._thread.start()

    def _tick(self) -> None:
        assert self._ended is not None
        while True:
            self._write(_ERASE + self._line(self._columns() - 1))
            if self._ended.wait(1.0):
                return

    def _columns(self) -> int:
        with suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80

    def _line(self, width: int) -> str:
        """The news and for how long we wait, cut where a terminal of this width would break it."""
        from .report import format_age

        clock = f" ({format_age(time.monotonic() - self._began)})"
        room = width - len(clock)
        if len(self._text) <= room:
            return self._text + clock
        return f"{self._text[: room - 3]}...{clock}" if room > 3 else self._text[: max(width, 0)]

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
