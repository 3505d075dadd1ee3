"""What a claim does, in which order, what a look reads, and that it leaves nothing when any step of it fails."""

import itertools
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim, try_claim
from support.guard import is_locked

import safe_gpu
from safe_gpu import GPUOwner
from safe_gpu.claim import view
from safe_gpu.claim.claim import Claim
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry
from safe_gpu.errors import NoDriverError, NotEnoughGpusError
from safe_gpu.host import procfs
from safe_gpu.host.held import Held


def claim_two(spies: Any, **arguments: Any) -> Any:
    return safe_gpu.claim_gpus(
        2, spies.placeholder, **{"debug_sleep": spies.PAUSE, "timeout": 0, "affinity": "node", **arguments}
    )


def test_the_steps_come_in_the_order_of_the_protocol(host: Any, spies: Any) -> None:
    seen: list[str | None] = []
    host.on_poll = lambda number: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    owner = claim_two(spies)
    visible = ",".join(map(str, owner.devices_taken))
    assert seen == [None, None, visible], "the environment is set after the second poll and not before"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert host.events == [
        "options",
        "prepare",
        "poll",
        "visible_limit",
        "host.lock",
        *["door"] * 2,
        "entry",
        "unlock",
        "legacy lock",
        "usage",
        f"sleep, CUDA_VISIBLE_DEVICES={visible}",
        "placeholder 0",
        "placeholder 1",
        "verify",
        "usage",
        "legacy release",
        "bind",
        "bound",
        "close",
    ]
    host.events.clear()
    safe_gpu.release_gpus()
    assert host.events == ["placeholder released"] * 2


class Boom(BaseException):
    """Not an Exception: like KeyboardInterrupt, it passes every handler that does not clean up."""


@pytest.mark.parametrize("kind", [Boom, OSError, NoDriverError])
def test_a_failure_at_any_step_leaves_nothing(host, spies, untouched, kind: type[BaseException], monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    claim_two(spies, delegate=True)
    steps = list(host.events)
    safe_gpu.release_gpus()
    assert len(steps) > 15
    for failing, step in enumerate(steps):
        if step == "legacy release" or (step == "door" and kind is OSError):  # without doors the entry counts
            continue
        host.events.clear()

        def fail(event: str, failing: int = failing) -> None:
            if len(host.events) == failing + 1:
                raise kind(f"at {event}")

        host.on_event = fail
        with untouched():
            with pytest.raises(BaseException) as caught:
                claim_two(spies, delegate=True)
            assert f"at {step}" in f"{caught.value} {caught.value.__cause__}"
            host.on_event = lambda event: None
            assert not spies.legacy_held, host.events
        placed = [event for event in host.events[:failing] if event in ("placeholder 0", "placeholder 1")]
        assert host.events.count("placeholder released") == len(placed), host.events
    claim_two(spies)


class Breaking(logging.Logger):
    """A logger that fails at its nth line."""

    def __init__(self, number: int) -> None:
        super().__init__("breaking", logging.INFO)
        self.left = number

    def handle(self, record: logging.LogRecord) -> None:
        self.left -= 1
        if self.left < 0 and "Releasing" not in record.getMessage():
            raise Boom(record.getMessage())


def test_a_logger_that_fails_at_any_line_leaves_nothing(host: Any, spies: Any, untouched: Callable[[], Any]) -> None:
    for number in itertools.count():
        with untouched():
            try:
                claim_two(spies, logger=Breaking(number))
            except Boom:
                continue
            assert number > 5
            safe_gpu.release_gpus()
            break


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, RuntimeError])
def test_a_release_that_is_interrupted_or_fails_takes_its_other_steps(
    host, spies, untouched, monkeypatch, caplog: pytest.LogCaptureFixture, trouble: type[BaseException]
) -> None:
    """A placeholder that cannot be released is told, and an interrupt reaches the program."""
    genuine = spies.placeholder.release

    def failing(thing: Any) -> None:
        genuine(thing)
        raise trouble("context is corrupt")

    with untouched():
        owner = claim_two(spies)
        monkeypatch.setattr(spies.placeholder, "release", failing)
        with pytest.raises(trouble) if trouble is KeyboardInterrupt else nullcontext():
            owner.release_gpus()
        assert host.events.count("placeholder released") == 2
    assert caplog.text.count("context is corrupt") == 2 * (trouble is RuntimeError)


def test_the_environment_of_before_comes_back(spies, untouched, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("SAFE_GPU_SCOPE", "stale")
    with untouched():
        owner = claim_two(spies, delegate=True)
        assert os.environ["SAFE_GPU_SCOPE"] not in ("stale", "")
        assert set(owner.devices_taken) < {0, 1, 2, 3}
        safe_gpu.release_gpus()
    claim_two(spies)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    safe_gpu.release_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "what the program set since stays as it set it"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


# What a look takes and reads: nothing slow under host.lock


def test_a_process_is_looked_up_once_and_never_under_host_lock(
    host: Any, line: Any, cleanup: ExitStack, monkeypatch: Any
) -> None:
    """Others wait for host.lock. The waiter ahead is judged too: it wants what the stranger has, and is passed."""
    cleanup.enter_context(host.stranger(0))
    line(8)
    looked_up = []

    def describe(pid: int) -> Any:
        looked_up.append((pid, is_locked(Path(os.environ["SAFE_GPU_DIR"], "host.lock"))))
        return procfs.describe_process(pid)

    monkeypatch.setattr(view, "describe_process", describe)
    assert try_claim(1) == (1,)
    assert looked_up == [(host.stranger_pid, False)]


@pytest.mark.parametrize(("age", "polls"), [(0.5, 0), (2.0, 1)])
def test_who_passes_a_waiter_knows_the_host_of_this_second(
    age: float, polls: int, host: Any, line: Any, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What blocks the waiter may have ended since the poll, and then it may not be passed."""
    cleanup.enter_context(host.stranger(7))
    assert try_claim(1) == (6,)
    usual = host.polls
    monkeypatch.setattr(view.Polls, "age", property(lambda self: age if host.polls == usual + 1 else 0.0))
    line(8)
    assert try_claim(1) == (6,)
    assert host.polls == 2 * usual + polls


def test_an_interrupt_while_it_is_prepared_for_exec_leaves_all_of_a_claim_prepared(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the command may hold a part of its GPUs."""
    kept: list[Held] = []
    genuine = Held.move

    def keep(held: Held, fd: int) -> None:
        if not kept:
            signal.raise_signal(signal.SIGINT)
        genuine(held, fd)
        kept.append(held)

    monkeypatch.setattr(Held, "move", keep)
    with GPUOwner(2, timeout=0) as owner:
        with pytest.raises(KeyboardInterrupt):
            owner.keep_across_exec()
        assert [os.get_inheritable(held.fd) for held in kept] == [True] * 4, "the entry, its directory, two doors"


# A claim looks once more after its entry has its name, and withdraws from what others have taken or closed by then


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Claim], None]], None]:
    """Call a function with each claim between its entry and its second look."""

    def install(act: Callable[[Claim], None]) -> None:
        take = Claim.take

        def take_and_act(taken: Claim, *args: Any, **options: Any) -> None:
            take(taken, *args, **options)
            act(taken)

        monkeypatch.setattr(Claim, "take", take_and_act)

    return install


def test_of_gpus_that_are_drained_meanwhile(host: Any, ground: Any, meanwhile: Any, untouched: Any) -> None:
    def drain(number: int) -> None:
        lines = (f"{uuid} - - - a fan is broken\n" for uuid in host.uuids[:number])
        (ground.directory / "closed").write_text("".join(lines))

    meanwhile(lambda _: drain(2))
    assert try_claim(2) == (2, 3)
    meanwhile(lambda _: drain(8))
    with untouched(), pytest.raises(NotEnoughGpusError, match="a fan is broken"), claim(1):
        pass


def test_of_a_gpu_that_another_process_claims_meanwhile(
    host: Any, ground: Any, meanwhile: Any, cleanup: ExitStack
) -> None:
    """As if somebody had removed host.lock: both see each other."""
    held: list[Held] = []

    def claim_too(_: Claim) -> None:
        if not held:
            directory = cleanup.enter_context(Directory(str(ground.directory), "claims"))
            held.append(make_entry(directory, 99, {"gpus": {host.uuids[0]: None}}, by_children=False)[1])

    meanwhile(claim_too)
    assert try_claim(1) == (1,)
    held[0].release()
    assert try_claim(1) == (0,)
