"""Each line, or text of several lines, is one write(2), so that the lines of jobs that share an output stay whole."""

import fcntl
import os
import shlex
import time
from collections.abc import Callable
from typing import Any

import pytest

from safe_gpu.cli.commands import COMMANDS

PAGE = 4096  # what a pipe in packet mode keeps together of one write

PRINTING = """
--help
run --help
status
status --json
status --prometheus
history
history --json
history --csv
doctor
affinity
affinity --of 1
policy
completion bash
demo
wait
run -- /nowhere
run --tiemout 3
drain 1 --dry-run
setup --dry-run
nonsense
""".strip().splitlines()


@pytest.fixture
def packets() -> Any:
    """The writing end of a pipe, and what returns the writes of those who have it, once all have closed it."""
    reading, writing = os.pipe2(os.O_DIRECT)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 256 * PAGE)  # a page for each write

    def read() -> list[bytes]:
        os.close(writing)
        found = []
        while data := os.read(reading, 1 << 16):
            found.append(data)
        os.close(reading)
        return found

    return writing, read


def assert_whole(packets: list[bytes]) -> None:
    assert packets
    assert [one for one in packets if not one.endswith(b"\n") and len(one) < PAGE] == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", PRINTING)
def test_a_line_is_one_write(words: str, unbuffered: str, command: Any, ground: Any, packets: Any) -> None:
    ground.hold(0, 1, until=time.time() + 60)
    writing, read = packets
    environment = {"PYTHONUNBUFFERED": unbuffered}
    command.start(*shlex.split(words), stdout=writing, stderr=writing, env=environment).wait(60)
    assert_whole(read())


def test_every_command_is_among_them() -> None:
    assert {line.split()[0] for line in PRINTING} >= COMMANDS.keys() - {"bind", "resume"}


def test_the_lines_of_waiters_too(command: Any, ground: Any, packets: Any, eventually: Callable[..., None]) -> None:
    ground.hold(*range(8))
    writing, read = packets
    waiting = [
        command.start("run", "--", "true", stdout=writing, stderr=writing, env={"PYTHONUNBUFFERED": "1"})
        for _ in range(3)
    ]
    eventually(lambda: len(ground.tickets()) == 3)
    ground.let_go()
    for one in waiting:
        assert one.wait(60) == 0
    assert_whole(read())
