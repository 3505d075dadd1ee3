"""The demo on simulated and on real hosts: it ends well, with a true verdict, and leaves no process and no file."""

import errno
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.real import long

import safe_gpu
from safe_gpu import demo


def checked(text: str) -> str:
    """What no demo may print, whatever the host."""
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search("Traceback|\x1b", text)
    assert text.index("Without safe_gpu, ") < text.index("With safe_gpu, "), "the contrast comes first"
    return text


@pytest.fixture
def watch_a_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run a demo in this process; it must leave no file, process or variable behind."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def watch(preset: str = "dgx-a100", processes: int | None = None) -> tuple[int, str]:
        monkeypatch.setenv("SAFE_GPU_DRIVER", f"simulated:{preset}")
        before, output = dict(os.environ), io.StringIO()
        code = demo.run(processes, 1, output)
        assert dict(os.environ) == before
        assert os.listdir(tmp_path / "tmp") == multiprocessing.active_children() == []
        assert not Path(os.environ["SAFE_GPU_DIR"]).exists(), "the users' state directory is none of its business"
        return code, checked(output.getvalue())

    return watch


@pytest.mark.parametrize(
    ("preset", "racers"), [("mig-h100", 10), pytest.param("mi250x", 16, marks=long), ("two-vendors", 8)]
)
def test_claims_exclude_each_other(watch_a_demo: Any, preset: str, racers: int) -> None:
    code, text = watch_a_demo(preset)
    assert (code, text.startswith(f"A race on a simulated host, {preset}: ")) == (0, True)
    assert f" of {racers} got GPUs" in text
    assert ": 1 process each\n" in text.partition("With safe_gpu, ")[2]
    whole = " ".join(text.split())
    verdict = re.search(
        r"Verdict: no GPU was given out twice \(\d+ claims\)\. Without safe_gpu: (\d+) collisions in (\d+) picks", whole
    )
    assert 0 < int(verdict[1]) < int(verdict[2])


def test_where_claims_share_the_only_gpu_the_race_moves(watch_a_demo: Any) -> None:
    code, text = watch_a_demo("laptop", 4)
    assert (code, "A race on a simulated host, dgx-a100: " in text) == (0, True)


def test_a_broken_claim_is_found_out(watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.entries, "is_locked", lambda fd: False)
    monkeypatch.setattr(api.Doors, "take_whole", Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    # With a placeholder the claims would notice each other by themselves.
    monkeypatch.setattr(demo, "claim_gpus", partial(safe_gpu.claim_gpus, placeholder_fn=safe_gpu.NoPlaceholder()))
    code, text = watch_a_demo("dgx-a100", 8)
    assert (code, "Collision: process " in text, "no GPU was given out twice" in text) == (1, True, False)


@pytest.mark.parametrize(
    ("name", "broken", "told"),
    [
        ("claim_gpus", lambda *arguments, **options: os._exit(3), "exited without a report"),
        ("release_gpus", lambda: os._exit(3), "could not release its GPUs"),
    ],
)
def test_whatever_else_happens_to_a_racer_is_a_failure(
    watch_a_demo: Any, monkeypatch: pytest.MonkeyPatch, name: str, broken: Callable[..., Any], told: str
) -> None:
    parent, whole = os.getpid(), getattr(demo, name)
    monkeypatch.setattr(demo, name, lambda *a, **b: (whole if os.getpid() == parent else broken)(*a, **b))
    code, text = watch_a_demo("dgx-a100", 4)
    assert (code, told in " ".join(text.split())) == (1, True)


def test_only_free_gpus_are_raced_for(fake_gpus: Any, tmp_path: Path) -> None:
    """Nothing is left on them, and no file."""
    fake_gpus.write({"name": "NVIDIA A100"}, *[{"name": "NVIDIA L4", "speed": 9}] * 4)
    for uuid in fake_gpus.uuids[:2]:
        fake_gpus.process(uuid, 999_999, static=True)
    fake_gpus.change(4, lost=1)
    (tmp_path / "tmp").mkdir()
    words = [sys.executable, "-c", "import sys; from safe_gpu import demo; sys.exit(demo.run(4, rounds=1))"]
    environment = {**fake_gpus.env, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert os.listdir(tmp_path / "tmp") == []
    assert not list((fake_gpus.directory / "procs").glob("*/[0-9]*[0-9]")), "a context was left on a GPU"
    text = checked(done.stdout)
    assert "A race for the free GPUs of this host: 2 x NVIDIA L4." in text
    got = re.search(r"With safe_gpu.*?\n  GPU ([0-9,-]+): 1 process", text, re.DOTALL)
    assert {*re.findall("[0-9]", got[1])} <= {"2", "3"}


@pytest.mark.parametrize("has_driver", [True, False])
def test_a_host_without_gpus_says_so(fake_gpus: Any, tmp_path: Path, has_driver: bool) -> None:
    fake_gpus.write()
    if not has_driver:
        fake_gpus.options(init_error=9)
    environment = {**fake_gpus.env, "TMPDIR": str(tmp_path), "SAFE_GPU_DRIVER": "auto", "PATH": "/nowhere"}
    words = [sys.executable, "-c", "import sys; from safe_gpu import demo; sys.exit(demo.run(4, rounds=1))"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=110)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("There is no GPU on this host; `safe-gpu doctor` says why.")
    assert "A race on a simulated host" in done.stdout


def test_a_driver_that_is_chosen_and_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    with pytest.raises(api.NoDriverError):
        demo.run(4, 1, io.StringIO())


# However it ends


@pytest.fixture
def started(command: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The command in a session of its own, as a terminal has it, once it has helpers; and where its files go."""
    temporary = tmp_path_factory.mktemp("tmp")
    demo = command.start("demo", env={"TMPDIR": str(temporary)}, start_new_session=True)
    assert demo.stdout.readline().startswith("A race on a simulated host")
    while not (helpers := api.procfs.descendants(demo.pid)):
        assert demo.poll() is None, demo.stderr.read()
        time.sleep(0.002)
    return demo, helpers, temporary


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_all_of_it(started: Any, number: int, code: int) -> None:
    demo, helpers, temporary = started
    if number == signal.SIGINT:
        os.killpg(demo.pid, number)  # as a terminal sends it: to the helpers, too
    else:
        demo.send_signal(number)
    assert (demo.communicate(timeout=60)[1], demo.returncode) == ("", code)
    assert os.listdir(temporary) == []
    assert all(api.procfs.has_ended(pid) for pid in helpers)


def test_its_helpers_do_not_outlive_a_kill(started: Any, eventually: Any) -> None:
    demo, helpers, _ = started
    demo.kill()
    eventually(lambda: all(api.procfs.has_ended(pid) for pid in helpers))


def test_a_reader_that_has_seen_enough(started: Any) -> None:
    demo, *_ = started
    demo.stdout.close()
    assert (demo.wait(60), demo.stderr.read()) == (141, "")
