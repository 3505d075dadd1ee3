"""A simulated cluster for claims across hosts: the engine's own code runs; hosts and network are simulated events.

Each claim runs :func:`safe_gpu.engines.claim.claim_through` in a thread of its own. Only one thread runs at any time:
the one whose answer has come, by the order of events, so that a seed gives the same run every time.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from safe_gpu.engines.claim import ClusterClaim, Holder, claim_through
from safe_gpu.engines.holder import ClusterGpu, HostReport
from safe_gpu.errors import ClaimTimeout, HolderLostError, NotEnoughGpusError, SafeGpuError

GPUS = 8
_QUIET = logging.getLogger("safe_gpu.simulated_cluster")
_QUIET.setLevel(logging.ERROR)


class Deadlock(Exception):
    """Claims wait, and nothing can happen any more."""


class Network(NamedTuple):
    """How long messages take: log-normal, and longer to and from stragglers. Times in seconds.

    Attributes:
        median: one way. spread: the sigma of its logarithm.
        stragglers: the share of slow hosts. slowness: how many times longer everything takes there.
        work: what a host needs for a claim or a release.
        per_message: what the claiming process needs to send or to receive a message.
    """

    median: float = 0.001
    spread: float = 0.5
    stragglers: float = 0.01
    slowness: float = 20.0
    work: float = 0.003
    per_message: float = 20e-6


class World:
    """The clock, the events to come, and the tasks that wait for them."""

    def __init__(self, network: Network, seed: int) -> None:
        self.now = 0.0
        self.network = network
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen in so many seconds; at equal times, in the order of these calls."""
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, happen))

    def start(self, work: Callable[[], None], at: float = 0.0) -> None:
        """Start a task, which may call :meth:`sleep` and :meth:`wait_for`."""
        task = Task(work)
        self.tasks.append(task)
        self.after(at, task.resume)

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Deadlock: a task is left that nothing can wake up. An error of a task is raised as it is.
        """
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            for task in self.tasks:
                if task.error is not None:
                    raise task.error
        left = [task for task in self.tasks if not task.done]
        for task in left:
            task.abandon()
        if left:
            raise Deadlock(f"{len(left)} of {len(self.tasks)} claims wait for ever")

    def sleep(self, seconds: float) -> None:
        """Called by a task: others go on meanwhile."""
        task = Task.current()
        self.after(seconds, task.resume)
        task.pause()

    def one_way(self, slowness: float) -> float:
        """How long a message takes to or from a host."""
        return slowness * self.random.lognormvariate(0.0, self.network.spread) * self.network.median


class Task:
    """A thread that runs only between :meth:`resume` and its next :meth:`pause`, while nobody else does."""

    _of_thread = threading.local()

    def __init__(self, work: Callable[[], None]) -> None:
        self.done = False
        self.error: BaseException | None = None
        self._abandoned = False
        self._work = work
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    @classmethod
    def current(cls) -> Task:
        task: Task = cls._of_thread.task
        return task

    def resume(self) -> None:
        """Called by the world: let the task run until it pauses or ends."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._paused.acquire()

    def pause(self) -> None:
        """Called by the task: give way until :meth:`resume`."""
        self._paused.release()
        self._go.acquire()
        if self._abandoned:
            raise SystemExit

    def abandon(self) -> None:
        """Called by the world: let the thread of a task that waits for ever end."""
        self._abandoned = True
        self.resume()

    def _run(self) -> None:
        self._of_thread.task = self
        self._go.acquire()
        try:
            self._work()
        except BaseException as err:
            self.error = err
        self.done = True
        self._paused.release()


class SimulatedHost:
    """GPUs that are given out first come, first served.

    Attributes:
        held: who holds how many.
        alive: False for a host whose holders exit before they answer a claim.
    """

    def __init__(self, world: World, number: int, *, straggles: bool = False) -> None:
        self.world = world
        self.name = f"host{number:04d}"
        self.held: dict[object, int] = {}
        self.alive = True
        self.slowness = world.network.slowness if straggles else 1.0
        self._queue: list[tuple[object, int, Callable[[Any], None]]] = []

    @property
    def free(self) -> int:
        return GPUS - sum(self.held.values())

    def claim(self, who: object, number: int, timeout: float | None, reply: Callable[[Any], None]) -> None:
        """Give GPUs now or later; ``reply`` gets them or the error that a holder would return."""
        if not self._queue and self.free >= number:
            self._give(who, number, reply)
        elif timeout == 0:
            reply(self._refusal(NotEnoughGpusError, number))
        else:
            entry = (who, number, reply)
            self._queue.append(entry)
            if timeout is not None:
                self.world.after(timeout, lambda: self._give_up(entry, timeout))

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

    def _give_up(self, entry: tuple[object, int, Callable[[Any], None]], timeout: float) -> None:
        if entry in self._queue:
            self._queue.remove(entry)
            entry[2](self._refusal(ClaimTimeout, entry[1], timeout=timeout))
            self._serve()

    def _serve(self) -> None:
        while self._queue and self._queue[0][1] <= self.free:
            self._give(*self._queue.pop(0))

    def _refusal(self, kind: type[NotEnoughGpusError], number: int, **more: float) -> NotEnoughGpusError:
        return kind(f"{self.free} of {number} GPUs are free", nb_gpus=number, **more)


class SimulatedHolder(Holder):
    """A holder of one claim on one host."""

    def __init__(self, host: SimulatedHost) -> None:
        self.host = self.node_id = host.name
        self.messages = 0
        self.alone = 0.0  # what this host took for one report and one claim, seconds
        self._on = host
        self._world = host.world
        self._answers: list[Any] = []
        self._waiting: Task | None = None
        self._sent_until = 0.0  # messages keep their order
        self._sent = 0
        self._over = False

    def call(self, method: str, *arguments: Any) -> None:
        self._world.sleep(self._world.network.per_message)
        work = self._world.network.work * self._on.slowness if method in ("claim", "release") else 0.0
        self._send(lambda: getattr(self, f"_{method}")(*arguments), work)

    def answer(self, limit: float | None) -> Any:
        while not self._answers:
            self._waiting = Task.current()
            self._waiting.pause()
        self._world.sleep(self._world.network.per_message)
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
        self._sent += 1
        began = self._world.now
        self._sent_until = max(self._sent_until, began + self._world.one_way(self._on.slowness) + work)
        self._world.after(self._sent_until - began, arrive)
        if self._sent <= 2:  # the report and the first try
            self.alone += self._sent_until - began

    def _reply(self, answer: Any) -> None:
        self.messages += 1
        delay = self._world.one_way(self._on.slowness)
        if self._sent <= 2:
            self.alone += delay
        self._world.after(delay, lambda: self._arrived(answer))

    def _arrived(self, answer: Any) -> None:
        self._answers.append(answer)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.resume()

    # What the host does when a message arrives

    def _report(self, count_for: int) -> None:
        self._reply(HostReport((self.host,), self._on.free))

    def _claim(self, number: int, timeout: float | None) -> None:
        if self._over:
            return
        if not self._on.alive:
            self._reply(HolderLostError(f"the holder on {self.host} has exited", host=self.host))
        else:
            self._on.claim(self, number, timeout, self._reply)

    def _release(self) -> None:
        self._on.leave(self)
        self._reply(None)


class Claim(NamedTuple):
    """What became of one claim.

    Attributes:
        seconds: simulated, until all hosts were held or the claim failed.
        slowest: simulated seconds that the slowest host took for a report and a claim, rivals and queues included.
        messages: in both directions, per host.
        error: the error that it failed with, or None.
    """

    seconds: float
    slowest: float
    messages: float
    error: SafeGpuError | None


def make_hosts(world: World, number: int) -> list[SimulatedHost]:
    """The hosts of a cluster, some of them stragglers."""
    share = world.network.stragglers
    return [SimulatedHost(world, index, straggles=world.random.random() < share) for index in range(number)]


def run_claim(
    world: World, hosts: Sequence[SimulatedHost], gpus_per_host: int, timeout: float | None, hold: float
) -> Claim:
    """Called by a task: claim on all of these hosts, hold the GPUs, and release them.

    Raises:
        AssertionError: it got GPUs on some hosts only.
    """
    holders = [SimulatedHolder(host) for host in hosts]
    began = world.now
    error = None
    held = None
    try:
        held = ClusterClaim(
            claim_through(holders, len(holders), gpus_per_host, timeout, _QUIET, clock=lambda: world.now)
        )
    except SafeGpuError as err:
        error = err
    took = world.now - began
    messages = sum(holder.messages for holder in holders) / len(holders)
    if held is not None:
        assert len(held.gpus) == gpus_per_host * len(hosts)
        assert held.hosts == tuple(host.name for host in hosts), "not in the order of the nodes"
        world.sleep(hold)
        for holder, host in zip(holders, hosts, strict=True):
            assert host.held.get(holder) == gpus_per_host, f"{host.name} is not held"
        held.release()
    return Claim(took, max(holder.alone for holder in holders), messages, error)


def storm(number: int, seed: int) -> list[Claim]:
    """Rival claims of some of ``number`` hosts each, in any order, with any timeout; now and then a host is lost.

    Returns:
        The claims in the order in which they began.

    Raises:
        Deadlock: some wait for ever. AssertionError: one got some of its hosts only, or failed without reason, or
        something stays held.
    """
    world = World(Network(stragglers=0.05), seed)
    pick = world.random
    hosts = make_hosts(world, number)
    if pick.random() < 0.2:
        pick.choice(hosts).alive = False
    claims: dict[int, Claim] = {}

    def one(rival: int, wanted: list[SimulatedHost], gpus: int, timeout: float | None, hold: float) -> None:
        claims[rival] = claim = run_claim(world, wanted, gpus, timeout, hold)
        lost = not all(host.alive for host in wanted)
        allowed: tuple[type[SafeGpuError], ...] = (HolderLostError,) if lost else ()
        if timeout is not None:
            allowed += (NotEnoughGpusError,) if timeout == 0 else (ClaimTimeout,)
        assert claim.error is None or isinstance(claim.error, allowed), f"claim {rival} failed: {claim.error!r}"
        assert claim.error is not None or not lost, f"claim {rival} succeeded on a lost host"

    for rival in range(pick.randint(2, 6)):
        wanted = pick.sample(hosts, pick.choice([number, pick.randint(1, number)]))
        wanted.sort(key=lambda host: host.name, reverse=rival % 2 == 1)
        timeout = pick.choice([None, None, 0, pick.uniform(0.01, 1)])
        terms = wanted, pick.randint(1, GPUS), timeout, pick.uniform(0, 0.1)
        world.start(lambda rival=rival, terms=terms: one(rival, *terms), at=pick.uniform(0, 0.02))
    world.run()
    assert not any(host.held for host in hosts), "something is held after all claims have ended"
    return [claims[rival] for rival in sorted(claims)]
