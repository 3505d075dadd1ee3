"""What ``run`` and ``wait`` say while they wait: a line a minute, or one live line on a terminal."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from threading import Event, Thread

    from ..claim.messages import WaitStatus
    from .idle_claims import IdleClaims


_PROGRAM = "safe-gpu: "
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
        self._news: WaitStatus | None = None
        self._thread: Thread | None = None
        self._ended: Event | None = None
        self._idle_claims: IdleClaims | None = None

    def __enter__(self) -> WaitLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._write(_ERASE)

    def show(self, news: WaitStatus) -> None:
        """Tell the user where the wait stands."""
        from ..claim.messages import waiting_message

        self._news = news
        if not self._live:
            self._write(f"{_PROGRAM}{waiting_message(news)}\n")
        elif self._thread is None:
            import threading

            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._tick, name="safe_gpu-waitline", daemon=True)
            self._thread.start()
        if self._live:
            self._tell_of_idle_claims(news)

    def _tell_of_idle_claims(self, news: WaitStatus) -> None:
        """Whom to ask for GPUs that are held without use, where the policy of this host wants that told."""
        from .. import settings

        path = settings.policy_file(os.environ)
        if not os.path.lexists(path):
            return
        from ..text import cut
        from .idle_claims import IdleClaims

        self._idle_claims = self._idle_claims or IdleClaims(path)
        for text in self._idle_claims.new(news):
            self.note(cut(text, self._columns() - 1 - len(_PROGRAM)))

    def note(self, text: str) -> None:
        """A line of its own, above the live one."""
        self._write(f"{_ERASE if self._live else ''}{_PROGRAM}{text}\n")

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
        """The news and for how long we wait, in what a terminal of this width shows without breaking the line."""
        from ..claim.messages import waiting_message
        from ..text import format_age

        assert self._news is not None
        clock = f" ({format_age(time.monotonic() - self._began)})"
        text = _PROGRAM + waiting_message(self._news, width=max(0, width - len(_PROGRAM) - len(clock)))
        if len(text) + len(clock) <= width:
            return text + clock
        return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."[: max(0, width)]

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
