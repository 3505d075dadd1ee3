"""What tests need that is real, and not everywhere: tools, and batch schedulers as an ordinary user sees them."""

import importlib.util
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

import pytest

# Set where a missing part is a failure rather than a skip. Read here: fixtures hide SAFE_GPU_* from the tests.
REQUIRED = os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1"

long = pytest.mark.skipif(not REQUIRED, reason="needs SAFE_GPU_REQUIRE_REAL=1, as it takes long")


def unavailable(reason: str) -> NoReturn:
    """Skip, or fail where nothing may be missing."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


def tool(name: str) -> Any:
    """A program of ``tools`` as a module; skips what asks for it where this is not a checkout."""
    path = Path(__file__).parents[2] / "tools" / f"{name}.py"
    if not path.exists():
        pytest.skip("this is not a checkout: there is no tools/ here", allow_module_level=True)
    specification: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def wait_for(condition: Callable[[], Any], what: str, pause: float = 0.05, seconds: float = 120.0) -> Any:
    """The first true answer of ``condition``, asked again and again; fails saying what did not come."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {seconds:g} s: no {what}")
        time.sleep(pause)
    return answer


class BatchSystem:
    """A scheduler whose jobs have a working directory in common (tests/schedulers/conftest.py)."""

    name = ""
    cancel = ""  # the command that ends jobs

    def __init__(self, cluster: Any, workdir: Any) -> None:
        self.cluster = cluster
        self.workdir = workdir

    def submit(self, *words: str) -> str:
        """Submit a job with these options and the script; its number."""
        raise NotImplementedError

    def jobs(self) -> Collection[str]:
        """Numbers of the jobs that are not over."""
        raise NotImplementedError

    def finish(self, *jobs: str) -> None:
        """Wait until these jobs are gone."""
        wait_for(lambda: not set(jobs) & set(self.jobs()), f"end of jobs {jobs}", 0.4)  # each look starts processes

    def claims(self, number: int) -> list[dict[str, Any]]:
        """Wait for so many claims; their records."""
        wait_for(lambda: len(self.workdir.records("claim")) == number, f"{number} claims")
        return list(self.workdir.records("claim"))

    def end_all(self) -> None:
        left = list(self.jobs())
        if left:
            self.cluster.run(self.cancel, *left, check=False)
            self.finish(*left)

    def check_cancelling(self, host: str, *where: str) -> None:
        """The first job is killed between its entry and its placeholder, the second while it waits; the third gets the
        GPUs. All run on the host to which the options ``where`` lead."""
        workdir = self.workdir
        holder = self.submit(*where, workdir.script("exec $CLAIM claim 8 --debug-sleep 600"))
        wait_for(lambda: len(workdir.entries(host)) == 8, "entry of the first")
        waiter = self.submit(*where, workdir.script("exec $CLAIM claim 8"))
        wait_for(lambda: workdir.waiting(host) == 1, "ticket of the second")
        third = self.submit(*where, workdir.script("$CLAIM claim 8"))
        wait_for(lambda: workdir.waiting(host) == 2, "ticket of the third")
        self.cluster.run(self.cancel, waiter)
        self.finish(waiter)
        self.cluster.run(self.cancel, holder)
        self.finish(holder, third)
        assert [claim["job"] for claim in workdir.verdict()] == [f"{self.name}:{third}"]

    def check_waiting(self, *where: str) -> None:
        """Jobs that declare no GPUs run at once as far as the scheduler knows: 4 of 4 GPUs each on 8 take turns."""
        script = self.workdir.script("$CLAIM claim 4")
        self.finish(*[self.submit(*where, script) for _ in range(4)])
        assert [len(claim["gpus"]) for claim in self.workdir.verdict()] == [4] * 4
