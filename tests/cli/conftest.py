"""A terminal to look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.terminals import Terminal


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Of 80 columns, or as many as the parameter says."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal = Terminal(getattr(request, "param", 80))
    yield terminal
    terminal.close()
