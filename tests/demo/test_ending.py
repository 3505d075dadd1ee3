"""However the demo ends, it leaves no process and no file."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.host import procfs


@pytest.fixture
def started(command: Any, tmp_path: Path) -> Any:
    """The command in a session of its own, as a terminal has it, once it has helpers; and where its files go."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    demo = command.start("demo", env={"TMPDIR": str(temporary)}, start_new_session=True)
    assert demo.stdout.readline().startswith("A race on a simulated host")
    while not (helpers := procfs.descendants(demo.pid)):
        assert demo.poll() is None, demo.stderr.read()
        time.sleep(0.002)
    return demo, helpers, temporary


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)]
)
def test_a_signal_ends_all_of_it(started: Any, number: int, code: int) -> None:
    demo, helpers, temporary = started
    if number == signal.SIGINT:
        os.killpg(demo.pid, number)  # as a terminal sends it: to the helpers, too
    else:
        demo.send_signal(number)
    _, error = demo.communicate(timeout=60)
    assert demo.returncode == code
    assert error == ""
    assert os.listdir(temporary) == []
    assert all(procfs.has_ended(pid) for pid in helpers)


def test_a_second_ctrl_c_does_not_disturb_the_cleaning(started: Any) -> None:
    demo, helpers, temporary = started
    while demo.poll() is None:
        os.killpg(demo.pid, signal.SIGINT)
        time.sleep(0.002)
    assert demo.wait() in (130, -signal.SIGINT)  # the last one may come when the program is over
    assert os.listdir(temporary) == []
    assert all(procfs.has_ended(pid) for pid in helpers)


def test_its_helpers_do_not_outlive_a_kill(started: Any, eventually: Any) -> None:
    demo, helpers, _ = started
    demo.kill()
    eventually(lambda: all(procfs.has_ended(pid) for pid in helpers))


def test_a_reader_that_has_seen_enough(started: Any) -> None:
    demo, _, temporary = started
    demo.stdout.close()
    assert demo.wait(60) == 141
    assert demo.stderr.read() == ""
    assert os.listdir(temporary) == []
