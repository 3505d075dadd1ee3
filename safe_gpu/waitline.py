"""What ``run`` and ``wait`` say while they wait: a line a minute, or one live line on a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from .report import format_age, waiting_message

if TYPE_CHECKING:
    from threading import Event, Thread

    from .acquisition import WaitNews

__all__ = ["WaitLine"]


class WaitLine:
    """Shows the news of a wait on a stream; on a terminal as one line with a running clock, wiped at the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
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
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def show(self, news: WaitNews) -> None:
        """Tell the user where the wait stands."""
        self._text = f"safe-gpu: {waiting_message(news)}"
        if not self._live:
            print(self._text, file=self._stream, flush=True)
        elif self._thread is None:
            import threading

            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._tick, name="safe_gpu-waitline", daemon=True)
            self._thread.start()

    def _tick(self) -> None:
        import shutil

        assert self._ended is not None
        while True:
            width = shutil.get_terminal_size().columns - 1
            clock = f" ({format_age(time.monotonic() - self._began)})"
            line = self._text if len(self._text) + len(clock) <= width else self._text[: width - len(clock) - 3] + "..."
            self._stream.write(f"\r\x1b[K{line}{clock}")
            self._stream.flush()
            if self._ended.wait(1.0):
                return
