"""A claim of which only some descriptors are left, as while it dies: nobody gets its GPU twice.

The kernel closes the descriptors of the dying one by one, in the order of their numbers or in the reverse one. So every
state between is tried, before and at each step of a claim inside it.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.actor import Actor, Listen, Say, in_words

import safe_gpu
from safe_gpu.coordination.doors import Doors
from safe_gpu.coordination.host_lock import Host

HELD = 5  # descriptors of a claim of one GPU that allows claims inside it: four doors and the entry
LOSSES = [*((number, "first") for number in range(1, HELD)), *((number, "last") for number in range(1, HELD))]
REFUSED = "refused"


def held() -> list[int]:
    """The descriptors of doors and entries in this process, by their numbers."""
    found = []
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as one:
                name = one.getsockname()
            if isinstance(name, bytes) and name.startswith(b"\0safe-gpu/1/"):
                found.append(number)
        elif "/claims/" in target:
            found.append(number)
    return found


def stop_at(step: str, stop: Callable[[], None]) -> None:
    """Let the next claim inside another one stop at this step."""
    take, is_inside, locked = Doors.take_inside, Doors.is_inside, Host.locked
    taking: list[str] = []

    def take_inside(doors: Doors, uuid: str, *arguments: Any) -> bool:
        if step == "before the part":
            stop()
        taking.append(uuid)
        return take(doors, uuid, *arguments)

    def asked(doors: Doors, *arguments: Any) -> bool:
        if taking and step == "after the part":
            stop()
        return is_inside(doors, *arguments)

    @contextmanager
    def holding(*arguments: Any) -> Iterator[None]:
        with locked(*arguments):
            yield
        if step == "before the second listing":
            stop()

    Doors.take_inside, Doors.is_inside, Host.locked = take_inside, asked, holding


class Process(Actor):
    """A process with a state directory that claims GPU 0 and loses what it holds, as told."""

    def __init__(self, directory: Path, scope: str = "") -> None:
        def work(say: Say, listen: Listen) -> None:
            os.environ["SAFE_GPU_DIR"], os.environ["SAFE_GPU_SCOPE"] = str(directory), scope
            while True:
                verb, _, rest = listen().partition(" ")
                if verb == "claim":
                    say(claim(**json.loads(rest)))
                elif verb == "stop":
                    stop_at(rest, lambda: (say("stopped"), listen()))
                    say("ready")
                else:
                    say(lose(int(verb), rest))

        super().__init__(in_words(work))

    def ask(self, *words: object) -> str:
        self.tell(" ".join(map(str, words)))
        return self.hear()

    def claim(self, **options: Any) -> str:
        """Claim GPU 0. Returns the token of the claim, or "" if it has none, or "refused"."""
        return self.ask("claim", json.dumps(options))


def claim(**options: Any) -> str:
    if options.get("delegate"):
        del os.environ["SAFE_GPU_SCOPE"]
    try:
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, only=0, **options)
    except safe_gpu.NotEnoughGpusError:
        return REFUSED
    return os.environ["SAFE_GPU_SCOPE"] if options.get("delegate") else ""


def lose(number: int, which: str) -> int:
    descriptors = held()
    assert len(descriptors) == HELD
    for fd in descriptors[:number] if which == "first" else descriptors[-number:]:
        os.close(fd)
    return number


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, everything_imported: None
) -> Iterator[Callable[..., Process]]:
    """``start("other", scope)``: a process with that state directory, on the host that all share."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    processes: list[Process] = []

    def start(directory: str = "state", scope: str = "") -> Process:
        processes.append(Process(tmp_path / directory, scope))
        return processes[-1]

    yield start
    for process in processes:
        process.end()


KINDS = pytest.mark.parametrize(
    "rival_wants", [{}, {"delegate": True}, {"share": 45 << 30}], ids=["whole", "both delegate", "share"]
)


@KINDS
@pytest.mark.parametrize(("first", "directory"), [("rival", "other"), ("inside", "other"), ("rival", "state")])
def test_of_two_that_find_what_is_left_one_gets_it(
    start: Any, first: str, directory: str, rival_wants: dict[str, Any]
) -> None:
    for number, which in LOSSES:
        around = start()
        token = around.claim(delegate=True)
        around.ask(number, which)
        rival, inside = start(directory), start("state", token)
        both = [(rival, rival_wants), (inside, {})]
        answers = [process.claim(**wants) for process, wants in (both if first == "rival" else both[::-1])]
        assert REFUSED in answers, (number, which, answers)
        for process in (around, rival, inside):
            process.end()


@KINDS
@pytest.mark.parametrize("step", ["before the part", "after the part", "before the second listing"])
def test_wherever_the_claim_around_it_begins_to_die_while_one_inside_claims(
    start: Any, step: str, rival_wants: dict[str, Any]
) -> None:
    """The rival has another state directory, and so another host.lock."""
    for number, which in LOSSES:
        around = start()
        rival, inside = start("other"), start("state", around.claim(delegate=True))
        assert inside.ask("stop", step) == "ready"
        assert inside.claim() == "stopped"
        around.ask(number, which)
        answer = rival.claim(**rival_wants)
        inside.tell()
        while (other := inside.hear()) == "stopped":
            inside.tell()
        assert REFUSED in (answer, other), (number, which, answer, other)
        for process in (around, rival, inside):
            process.end()
