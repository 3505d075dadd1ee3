"""Claims across many hosts in simulated time: rivals from opposite ends, and growth.

The engine's own code runs; hosts and network are simulated events. Each claim runs in a thread of its own. Only one
thread runs at any time: the one whose answer has come, by the order of events, so that a seed gives the same run every
time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from safe_gpu.engines.claim import ClusterClaim, Holder, claim_through
from safe_gpu.engines.holder import ClusterGpu, HostReport
from safe_gpu.errors import ClaimTimeout, HolderLostError, NotEnoughGpusError, SafeGpuError

GPUS = 8
ROUNDS = 20
QUIET = logging.getLogger("safe_gpu.simulated_cluster")
QUIET.setLevel(logging.ERROR)

# Seconds: of a message one way, which varies; of a host for a claim or release; of the claiming process for a message.
ONE_WAY = 0.001
WORK = 0.003
PER_MESSAGE = 20e-6


class Deadlock(Exception):
    """Claims wait, and nothing can happen any more."""


class World:
    """The clock, the events to come, and the tasks that wait for them."""

    def __init__(self, seed: int, spread: float = 0.5) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.spread = spread
        self._tasks: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen in so many seconds; at equal times, in the order of these calls."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), happen))

    def start(self, work: Callable[[], object], at: float = 0.0) -> None:
        """Start a task, which may call :meth:`sleep`."""
        self._tasks.append(Task(work))
        self.after(at, self._tasks[-1].resume)

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Deadlock: a task is left that nothing can wake up. An error of a task is raised as it is.
        """
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        left = [task for task in self._tasks if not task.done]
        for task in left:
            task.abandon()
        if left:
            raise Deadlock(f"{len(left)} of {len(self._tasks)} claims wait for ever")

    def sleep(self, seconds: float) -> None:
        """Called by a task: others go on meanwhile."""
        task: Any = threading.current_thread()
        self.after(seconds, task.resume)
        task.pause()

    def one_way(self, slowness: float) -> float:
        """How long a message takes to or from a host."""
        return slowness * self.random.lognormvariate(0.0, self.spread) * ONE_WAY


class Task(threading.Thread):
    """A thread that runs only between :meth:`resume` and its next :meth:`pause`, while nobody else does."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.done = False
        self._error: BaseException | None = None
        self._abandoned = False
        self._work = work
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)

    def resume(self) -> None:
        """Called by the world: let the task run until it pauses or ends."""
        if self.ident is None:
            self.start()
        self._go.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called by the task: give way until :meth:`resume`."""
        self._paused.release()
        self._go.acquire()
        if self._abandoned:
            raise SystemExit

    def abandon(self) -> None:
        """Called by the world: let the thread of a task that waits for ever end."""
        self._abandoned = True
        with suppress(SystemExit):
            self.resume()

    def run(self) -> None:
        self._go.acquire()
        try:
            self._work()
        except BaseException as err:
            self._error = err
        self.done = True
        self._paused.release()


class SimulatedHost:
    """GPUs that are given out first come, first served.

    Attributes:
        held: who holds how many.
        alive: False for a host whose holders exit before they answer a claim.
    """

    def __init__(self, world: World, number: int, slowness: float) -> None:
        self.world = world
        self.name = f"host{number:04d}"
        self.slowness = slowness
        self.held: dict[object, int] = {}
        self.alive = True
        self._queue: list[tuple[object, int, Callable[[Any], None]]] = []

    @property
    def free(self) -> int:
        return GPUS - sum(self.held.values())

    def claim(self, who: object, number: int, timeout: float | None, reply: Callable[[Any], None]) -> None:
        """Give GPUs now or later; ``reply`` gets them or the error that a holder would return."""
        refusal = f"{number} GPUs are not free"
        if not self._queue and self.free >= number:
            self._give(who, number, reply)
        elif timeout == 0:
            reply(NotEnoughGpusError(refusal, nb_gpus=number))
        else:
            entry = (who, number, reply)
            self._queue.append(entry)
            if timeout is not None:
                late = ClaimTimeout(refusal, nb_gpus=number, timeout=timeout)
                self.world.after(timeout, lambda: self._give_up(entry, late))

    def leave(self, who: object) -> None:
        """Take back what somebody holds here, and their place in the queue."""
        self.held.pop(who, None)
        self._queue = [entry for entry in self._queue if entry[0] is not who]
        self._serve()

    def _give(self, who: object, number: int, reply: Callable[[Any], None]) -> None:
        assert who not in self.held, "claimed twice"
        assert number <= self.free, "given out twice"
        self.held[who] = number
        reply(tuple(ClusterGpu(self.name, self.name, index, f"{self.name}-{index}") for index in range(number)))

    def _give_up(self, entry: tuple[object, int, Callable[[Any], None]], late: ClaimTimeout) -> None:
        if entry in self._queue:
            self._queue.remove(entry)
            entry[2](late)
            self._serve()

    def _serve(self) -> None:
        while self._queue and self._queue[0][1] <= self.free:
            self._give(*self._queue.pop(0))


class SimulatedHolder(Holder):
    """A holder of one claim on one host."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host = self.node_id = host.name
        self.messages = 0
        self._on = host
        self._world = host.world
        self._answers: list[Any] = []
        self._waiting: Any = None
        self._sent_until = 0.0  # messages keep their order
        self._over = False

    def call(self, method: str, *arguments: Any) -> None:
        self._world.sleep(PER_MESSAGE)
        work = WORK * self._on.slowness if method in ("claim", "release") else 0.0
        self._send(lambda: getattr(self, f"_{method}")(*arguments), work)

    def answer(self, limit: float | None) -> Any:
        while not self._answers:
            self._waiting = threading.current_thread()
            self._waiting.pause()
        self._world.sleep(PER_MESSAGE)
        answer = self._answers.pop(0)
        if isinstance(answer, HolderLostError):
            raise answer
        return answer

    def end(self) -> None:
        if not self._over:
            self._over = True
            self._send(lambda: self._on.leave(self), 0.0)

    def _send(self, arrive: Callable[[], None], work: float) -> None:
        self.messages += 1
        arrival = self._world.now + self._world.one_way(self._on.slowness) + work
        self._sent_until = max(self._sent_until, arrival)
        self._world.after(self._sent_until - self._world.now, arrive)

    def _reply(self, answer: Any) -> None:
        self.messages += 1
        self._world.after(self._world.one_way(self._on.slowness), lambda: self._arrived(answer))

    def _arrived(self, answer: Any) -> None:
        self._answers.append(answer)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.resume()

    # What the host does when a message arrives

    def _report(self, count_for: int) -> None:
        self._reply(HostReport((self.host,), self._on.free))

    def _claim(self, number: int, timeout: float | None) -> None:
        if not self._on.alive:
            self._reply(HolderLostError(f"the holder on {self.host} has exited", host=self.host))
        elif not self._over:
            self._on.claim(self, number, timeout, self._reply)

    def _release(self) -> None:
        self._on.leave(self)
        self._reply(None)


class Claim(NamedTuple):
    """What became of one claim: seconds until it was there or refused, and messages in both directions per host."""

    seconds: float
    messages: float
    error: SafeGpuError | None


def make_hosts(world: World, number: int, stragglers: float = 0.01) -> list[SimulatedHost]:
    """The hosts of a cluster, some of them stragglers, for which everything takes longer."""
    slow = [world.random.random() < stragglers for _ in range(number)]
    return [SimulatedHost(world, index, 20.0 if one else 1.0) for index, one in enumerate(slow)]


def run_claim(
    world: World, hosts: Sequence[SimulatedHost], timeout: float | None, hold: float = 0.0, gpus_per_host: int = GPUS
) -> Claim:
    """Called by a task: claim on all of these hosts or on none, hold the GPUs, and release them."""
    holders = [SimulatedHolder(host) for host in hosts]
    began = world.now
    error = held = None
    try:
        granted = claim_through(holders, len(holders), gpus_per_host, timeout, QUIET, clock=lambda: world.now)
        held = ClusterClaim(granted)
    except SafeGpuError as err:
        error = err
    claim = Claim(world.now - began, sum(holder.messages for holder in holders) / len(holders), error)
    if held is not None:
        assert len(held.gpus) == gpus_per_host * len(hosts)
        assert held.hosts == tuple(host.name for host in hosts), "not in the order of the nodes"
        world.sleep(hold)
        for holder, host in zip(holders, hosts, strict=True):
            assert host.held.get(holder) == gpus_per_host, f"{host.name} is not held"
        held.release()
    return claim


def storm(number: int, seed: int) -> list[Claim]:
    """Rival claims of some of ``number`` hosts each, in any order, with any timeout; now and then a host is lost.

    None waits for ever, none fails without reason, and nothing stays held.
    """
    world = World(seed)
    pick = world.random
    hosts = make_hosts(world, number, stragglers=0.05)
    if pick.random() < 0.2:
        pick.choice(hosts).alive = False
    claims: list[Claim] = []

    def one(wanted: list[SimulatedHost], timeout: float | None, hold: float, gpus: int) -> None:
        claims.append(claim := run_claim(world, wanted, timeout, hold, gpus))
        lost = not all(host.alive for host in wanted)
        allowed: tuple[type[SafeGpuError], ...] = (HolderLostError,) if lost else ()
        if timeout is not None:
            allowed += (NotEnoughGpusError,) if timeout == 0 else (ClaimTimeout,)
        assert claim.error is None or isinstance(claim.error, allowed), f"a claim failed: {claim.error!r}"
        assert claim.error is not None or not lost, "a claim succeeded on a lost host"

    for rival in range(pick.randint(2, 6)):
        wanted = pick.sample(hosts, pick.choice([number, pick.randint(1, number)]))
        wanted.sort(key=lambda host: host.name, reverse=rival % 2 == 1)
        timeout = pick.choice([None, None, 0, pick.uniform(0.01, 1)])
        terms = wanted, timeout, pick.uniform(0, 0.1), pick.randint(1, GPUS)
        world.start(lambda terms=terms: one(*terms), at=pick.uniform(0, 0.02))
    world.run()
    assert not any(host.held for host in hosts), "something is held after all claims have ended"
    return claims


def test_rivals_never_deadlock_and_get_all_or_nothing() -> None:
    seed = random.randrange(10**6)
    print(f"seeds from {seed}")
    claims = [claim for turn in range(ROUNDS) for claim in storm(64, seed + turn)]
    assert len(claims) >= 2 * ROUNDS
    assert {claim.error is None for claim in claims} == {False, True}


def test_a_cycle_of_waiting_claims_is_found() -> None:
    world = World(1)
    hosts = make_hosts(world, 2)

    def one_after_the_other(wanted: Sequence[SimulatedHost]) -> None:
        for host in wanted:
            holder = SimulatedHolder(host)
            holder.call("claim", GPUS, None)
            holder.answer(None)
            world.sleep(1)

    world.start(lambda: one_after_the_other(hosts))
    world.start(lambda: one_after_the_other(hosts[::-1]))
    with pytest.raises(Deadlock, match="2 of 2"):
        world.run()


def test_a_claim_takes_as_long_as_its_slowest_host() -> None:
    """A report and a claim, and their answers: of 64 hosts as of the slow one alone."""
    found = []
    for number in (1, 64):
        world = World(5, spread=0.0)
        hosts = make_hosts(world, number, stragglers=0.0)
        hosts[0].slowness = 20.0
        world.start(lambda world=world, hosts=hosts: found.append(run_claim(world, hosts, 10.0)))
        world.run()
    alone, all_of_them = found
    assert (alone.error, all_of_them.error, alone.messages, all_of_them.messages) == (None, None, 4, 4)
    assert alone.seconds < all_of_them.seconds <= alone.seconds + 4 * 64 * PER_MESSAGE


@pytest.mark.parametrize("timeout", [0, None])
def test_four_rivals_for_64_hosts_from_opposite_ends(timeout: float | None) -> None:
    world = World(7)
    hosts = make_hosts(world, 64)
    claims: list[Claim] = []
    for wanted in (hosts, hosts[::-1]) * 2:
        world.start(lambda wanted=wanted: claims.append(run_claim(world, wanted, timeout, 0.05)))
    world.run()
    assert sum(claim.error is None for claim in claims) == (1 if timeout == 0 else 4)
    assert max(claim.messages for claim in claims) < 16  # a handful of rounds, whatever the number of hosts
