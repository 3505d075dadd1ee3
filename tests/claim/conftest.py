"""Hosts, other users and waiters for claims in this process, and a check that a claim left nothing behind."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
from support import api, guard
from support.claims import Host, Spies, claim

from safe_gpu import drivers


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch, stranger_pid: int) -> Iterator[Callable[[str], Host]]:
    """``host_of("laptop")``: that host, in place of whatever driver a claim in this process would open."""
    hosts: list[Host] = []

    def install(preset: str) -> Host:
        api.driver_pids.clear()  # by which pids another host's driver has shown this process
        host = Host(preset, stranger_pid)
        hosts.append(host)
        monkeypatch.setenv("SAFE_GPU_DRIVER", host.name)
        monkeypatch.setattr(drivers, "open_driver", lambda name=None, **choice: host)
        return host

    yield install
    for stranger in [stranger for host in hosts for stranger in host.strangers]:
        stranger.close()


@pytest.fixture
def host(host_of: Callable[[str], Host]) -> Host:
    """Eight equal GPUs."""
    return host_of("dgx-a100")


@pytest.fixture
def spies(host: Host, monkeypatch: pytest.MonkeyPatch) -> Spies:
    """All steps of a claim as events."""
    return Spies(host, monkeypatch)


@pytest.fixture
def untouched() -> Callable[[], AbstractContextManager[None]]:
    """``with untouched():`` whatever happens inside, it leaves this process and the state directory as they were.

    Compared are the environment, every thread's CPU mask, descriptors, threads, claims, tickets, simulated contexts,
    and what the package remembers of claims.
    """
    return guard.untouched


@pytest.fixture(autouse=True)
def release_after_test() -> Iterator[None]:
    """Release what a test has claimed in this process, so that it does not reach the next one."""
    yield
    holder = api.owner.current_owner()
    if holder is not None:
        holder.release_gpus()


@pytest.fixture
def join_queue(dgx: Any) -> Iterator[Callable[..., api.Waiter]]:
    """``join_queue(2, (0, 1), hold_for=600)``: a ticket of this process for two GPUs of those, until the test ends."""
    with ExitStack() as stack:

        def join(
            nb_gpus: int, gpus: Sequence[int] = range(8), *, hold_for: float | None = None, **more: Any
        ) -> api.Waiter:
            uuids = frozenset(dgx.uuids[index] for index in gpus)
            host = stack.enter_context(api.Host())
            host.prepare()
            waiter = api.Waiter(host, api.TicketRequest(nb_gpus, uuids, tuple(more.items()), hold_for), by_turns=False)
            stack.callback(waiter.leave)
            with api.DeferredSignals() as signals, host.locked(time.monotonic() + 30, signals):
                host.queue.refresh()
                waiter.join(api.facts_of_this_process(None))
            return waiter

        yield join


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """What is to be closed after the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def claim_as(as_user: Any) -> Callable[..., Any]:
    """``claim_as(ANNA, 2)``: a process of hers that claims two GPUs, says how many it has, or the error, and releases
    them when it is told to.

    With ``gate`` it says "ready" and waits to be told before it claims. With ``gets`` the test fails unless it gets
    them.
    """

    def start(uid: int, nb_gpus: int = 1, *, gate: bool = False, gets: bool = False, **options: Any) -> Any:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            if gate:
                say("ready")
                listen()
            owner = claim(nb_gpus, **options)
            say(len(owner.gpus))
            listen()
            owner.release_gpus()
            say("released")
            listen()

        one = as_user(work, uid=uid)
        assert not gets or one.hear() == str(nb_gpus)
        return one

    return start


@pytest.fixture
def wait_as(claim_as: Any, dgx: Any, eventually: Any) -> Callable[..., Any]:
    """``wait_as(ANNA, 2)``: a process of hers that has a ticket for two GPUs."""

    def start(uid: int, nb_gpus: int = 1, **options: Any) -> Any:
        before = len(dgx.tickets())
        one = claim_as(uid, nb_gpus, **{"timeout": None, **options})
        eventually(lambda: len(dgx.tickets()) > before)
        return one

    return start


@pytest.fixture
def in_first_pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """``in_first_pause(do)``: call ``do`` in the first pause of a claim that waits in this process."""
    genuine_sleep = time.sleep
    to_do: list[Callable[[], object]] = []

    def sleep(seconds: float) -> None:
        if to_do:
            to_do.pop()()
        genuine_sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    return to_do.append


@pytest.fixture
def same_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver tells that it shows the same GPUs ever after, so the second poll is about those of a claim alone."""
    monkeypatch.setattr(api.SimulatedDriver, "shows_same", lambda driver, snapshot: True)


@pytest.fixture
def rarely_polled(monkeypatch: pytest.MonkeyPatch, same_gpus: None) -> None:
    """Who waits polls the driver only where something has happened."""
    monkeypatch.setattr(api.search, "SHORTEST_POLL_PAUSE", 1e6)
    monkeypatch.setattr(api.search, "LONGEST_POLL_PAUSE", 1e6)


@pytest.fixture
def often_polled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits polls the driver as often as it does at first."""
    monkeypatch.setattr(api.search, "LONGEST_POLL_PAUSE", 0.25)
