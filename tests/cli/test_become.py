"""The last steps before the command: nothing still to be written ends this process, and a failure is undone."""

import os
import signal
import subprocess
import sys

import pytest

from safe_gpu.cli.become import CommandError, become

BECOME = """
import sys
from safe_gpu.cli.become import become
sys.{0} = open({1}, 'w', closefd=False)
sys.{0}.write('news')
become("/bin/true", ["command"])
"""


@pytest.mark.parametrize(("stream", "fd"), [("stderr", 2), ("stdout", 1)])
@pytest.mark.parametrize("end", ["broken pipe", "/dev/full"])
def test_what_is_left_in_a_buffer_does_not_keep_from_the_command(stream: str, fd: int, end: str) -> None:
    """As after news of a wait that nobody read: in some versions of Python they stay in the buffer."""
    if end == "broken pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(end, os.O_WRONLY)
    command = [sys.executable, "-c", BECOME.format(stream, fd)]
    assert subprocess.run(command, timeout=60, **{stream: writer}).returncode == 0  # type: ignore[call-overload]
    os.close(writer)


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
