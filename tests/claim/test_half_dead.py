"""An outer claim of which only some descriptors are left, as while it dies: nobody gets its GPU twice.

The kernel closes the descriptors of the dying in an order of its own, and programs close what they have inherited. So
every state is tried in which some are left, before and at each step of a claim inside it.
"""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import combinations
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.claim.search import search
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.locks.host_lock import HostLock

WHOLE = os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1"
GIB = 1 << 30


class Actor:
    """A forked process that does what it is told: ``ask("claim", share=GIB)`` returns what came of it."""

    def __init__(self, directory: Path, scope: str = "") -> None:
        self._line, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.environ["SAFE_GPU_DIR"], os.environ["SAFE_GPU_SCOPE"] = str(directory), scope
                self._line = theirs
                while True:
                    verb, options = theirs.recv()
                    theirs.send(getattr(self, f"_{verb}")(**options))
            finally:
                os._exit(0)
        theirs.close()

    def tell(self, verb: str, **options: Any) -> None:
        self._line.send((verb, options))

    def hear(self) -> Any:
        return self._line.recv()

    def ask(self, verb: str, **options: Any) -> Any:
        self.tell(verb, **options)
        return self.hear()

    def end(self) -> None:
        if not self.pid:
            return
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._line.close()
        self.pid = 0

    # In the process

    def _claim(self, **options: Any) -> str:
        """Claim GPU 0; returns the token of it, "" if it has none, and why it was refused if it was."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        before = os.environ.pop("SAFE_GPU_SCOPE", "") if options.get("delegate") else ""
        try:
            safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, only=0, **options)
        except safe_gpu.SafeGpuError as err:
            return f"{type(err).__name__}: {before}{err}"
        return os.environ.get("SAFE_GPU_SCOPE", "") if options.get("delegate") else ""

    def _descriptors(self) -> list[str]:
        return sorted(self._found())

    def _lose(self, which: list[str]) -> None:
        for label, number in self._found().items():
            if label in which:
                os.close(number)

    def _found(self) -> dict[str, int]:
        """What this process holds by the kernel's word: "lease" and "name" with what follows the UUID."""
        found = {}
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            if target.startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as one:
                    name = one.getsockname()
                if isinstance(name, bytes) and name.startswith(b"\0safe-gpu/1/"):
                    found[f"name{name.decode().rstrip('.')[-80:].partition('-')[2].partition('.')[2]}"] = number
            elif target.endswith(".lock") and "/leases/" in target:
                found[f"lease{target.rpartition('/')[2].partition('.')[2].removesuffix('lock')}"] = number
        return found

    def _stop_at(self, step: str) -> None:
        """Say "stopped" once at this step of the next claim, and go on when something is told."""
        stopped = []

        def stop() -> None:
            if not stopped:
                stopped.append(step)
                self._line.send("stopped")
                self._line.recv()

        bind, confirm, leave = names.take_name, search.confirm, HostLock.__exit__

        def stopping(name: str) -> Any:
            inner = name.rstrip(".").endswith(".inner")
            if inner and step == "before .inner":
                stop()
            held = bind(name)
            if inner and step == "after .inner":
                stop()
            return held

        def confirming(*arguments: Any) -> bool:
            if step == "before the last look":
                stop()
            return confirm(*arguments)

        def leaving(lock: Any, *exc: object) -> None:
            if step == "before host.lock is free":
                stop()
            leave(lock, *exc)

        names.take_name, search.confirm, HostLock.__exit__ = stopping, confirming, leaving  # type: ignore[method-assign]


STEPS = ("after .inner", "before the last look", *(("before .inner", "before host.lock is free") if WHOLE else ()))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_imported: None) -> Iterator[Callable[..., Actor]]:
    """``start("other", scope)``: a process with that state directory, on the host that all share."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    actors: list[Actor] = []

    def start(directory: str = "state", scope: str = "") -> Actor:
        actors.append(Actor(tmp_path / directory, scope))
        return actors[-1]

    yield start
    for actor in actors:
        actor.end()


def subsets(labels: list[str]) -> list[list[str]]:
    """All of them in ``.ci/run``; else those in which all but one are lost, or one."""
    sizes = range(len(labels) + 1) if WHOLE else sorted({1, len(labels) - 1})
    return [list(some) for size in sizes for some in combinations(labels, size)]


def each_loss(start: Callable[..., Actor]) -> Iterator[tuple[Actor, str, list[str]]]:
    """Yield an outer claim, its token and the descriptors that it is to lose."""
    losses = None
    while losses is None or losses:
        outer = start()
        token = outer.ask("claim", delegate=True)
        assert "Error" not in token, token
        if losses is None:
            losses = subsets(outer.ask("descriptors"))
        yield outer, token, losses.pop()
        outer.end()


KINDS = pytest.mark.parametrize(
    "rival_wants", [{}, {"delegate": True}, {"share": 45 * GIB}], ids=["whole", "both delegate", "share"]
)


@KINDS
@pytest.mark.parametrize(
    ("first", "directory"),
    [("rival", "other"), ("inner", "other"), *([("rival", "state"), ("inner", "state")] if WHOLE else [])],
)
def test_of_two_that_find_what_is_left_one_gets_it(
    start: Any, first: str, directory: str, rival_wants: dict[str, Any]
) -> None:
    for outer, token, lost in each_loss(start):
        outer.ask("lose", which=lost)
        rival, inner = start(directory), start("state", token)
        both = [(rival, rival_wants), (inner, {})]
        answers = [actor.ask("claim", **wants) for actor, wants in (both if first == "rival" else both[::-1])]
        assert any("Error" in answer for answer in answers), (lost, answers)
        rival.end()
        inner.end()


@KINDS
@pytest.mark.parametrize("step", STEPS)
def test_wherever_the_outer_claim_begins_to_die_while_one_inside_claims(
    start: Any, step: str, rival_wants: dict[str, Any]
) -> None:
    """The rival has another state directory, and so another host.lock."""
    for outer, token, lost in each_loss(start):
        rival, inner = start("other"), start("state", token)
        inner.ask("stop_at", step=step)
        assert inner.ask("claim") == "stopped"
        outer.ask("lose", which=lost)
        answers = [rival.ask("claim", **rival_wants), inner.ask("go on")]
        assert any("Error" in answer for answer in answers), (lost, answers)
        rival.end()
        inner.end()


def test_a_whole_outer_claim_lets_others_in(start: Any) -> None:
    """And what is left of it does not, once both of its names are gone: the claim inside is on its own then."""
    outer = start()
    token = outer.ask("claim", delegate=True)
    inner = start("third", token)
    assert inner.ask("claim") == ""
    outer.end()
    assert "Error" in start("other").ask("claim")
    inner.end()
    assert start("other").ask("claim") == ""
