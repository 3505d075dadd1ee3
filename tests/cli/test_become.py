"""The last steps before the command: nothing still to be written ends this process, and a failure is undone."""

import os
import signal

import pytest

from safe_gpu.cli.become import CommandError, become


def assert_ignored() -> None:
    """SIGPIPE at its default would end the process when it says why, and nobody reads it."""
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN


def test_a_refused_command_leaves_signals_as_they_were() -> None:
    with pytest.raises(CommandError) as caught:
        become("/etc/passwd", ["command"])
    assert caught.value.code == 126
    assert_ignored()


def test_an_exception_from_a_handler_leaves_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: str, arguments: list[str]) -> None:
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "execv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        become("/bin/true", ["true"])
    assert_ignored()
