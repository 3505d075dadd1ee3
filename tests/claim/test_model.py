"""Random sequences of claims, releases, kills and strangers, against a model of who must hold what."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import safe_gpu
from safe_gpu.drivers.simulated import SimulatedContext, SimulatedDriver

WORKER = """
import json, os, safe_gpu
owner = None
while line := listen():
    order = json.loads(line)
    try:
        if order["do"] == "claim":
            owner = safe_gpu.GPUOwner(order["number"], safe_gpu.NoPlaceholder() if order["bare"] else None, timeout=0,
                                      affinity=None, only=order["only"], delegate=order["delegate"])
            answer = owner.devices_taken
            expected = ",".join(map(str, answer))
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected, os.environ
        else:
            owner.release_gpus()
            answer = []
            assert "CUDA_VISIBLE_DEVICES" not in os.environ and "SAFE_GPU_SCOPE" not in os.environ
    except safe_gpu.SafeGpuError as err:
        assert "CUDA_VISIBLE_DEVICES" not in os.environ or type(err) is safe_gpu.AlreadyClaimedError
        answer = type(err).__name__
    say(json.dumps(answer))
"""
WORKERS = 4
GPUS = 8

GPU_SETS = st.frozensets(st.integers(0, GPUS - 1))
CLAIMS = st.tuples(st.integers(0, WORKERS - 1), st.integers(1, GPUS + 1), GPU_SETS, st.booleans(), st.booleans())
orders = st.one_of(
    CLAIMS.map(lambda order: ("claim", *order)),
    st.tuples(st.sampled_from(["release", "kill"]), st.integers(0, WORKERS - 1)),
    st.tuples(st.sampled_from(["come", "go"]), st.integers(0, GPUS - 1)),
)


class World:
    """The real thing and the model of it, side by side."""

    def __init__(self, start: Callable[[], Any], stranger_pid: int) -> None:
        self.start = start
        self.workers = [start() for _ in range(WORKERS)]
        self.host = SimulatedDriver("dgx-a100")
        self.stranger_pid = stranger_pid
        self.held: list[set[int] | None] = [None] * WORKERS
        self.strangers: dict[int, SimulatedContext] = {}

    @property
    def free(self) -> set[int]:
        return set(range(GPUS)) - set().union(*(held or () for held in self.held)) - set(self.strangers)

    def ask(self, worker: int, **order: object) -> Any:
        self.workers[worker].tell(json.dumps(order))
        return json.loads(self.workers[worker].hear())

    def claim(self, worker: int, number: int, only: frozenset[int], bare: bool, delegate: bool) -> None:
        answer = self.ask(worker, do="claim", number=number, only=sorted(only), bare=bare, delegate=delegate)
        allowed = set(only) or set(range(GPUS))
        if self.held[worker] is not None:
            assert answer == "AlreadyClaimedError"
        elif number > len(allowed):
            assert answer == "UnsatisfiableRequestError"
        elif number > len(allowed & self.free):
            assert answer == "NotEnoughGpusError"
        else:
            assert isinstance(answer, list), answer
            assert len(answer) == len(set(answer)) == number
            assert set(answer) <= allowed & self.free
            self.held[worker] = set(answer)

    def release(self, worker: int) -> None:
        if self.held[worker] is not None:
            assert self.ask(worker, do="release") == []
            self.held[worker] = None

    def kill(self, worker: int) -> None:
        if self.held[worker] is not None:  # starting another one costs time: only where it shows something
            self.workers[worker].kill()
            self.workers[worker] = self.start()
            self.held[worker] = None

    def come(self, gpu: int) -> None:
        if gpu not in self.strangers and gpu in self.free:
            self.strangers[gpu] = self.host.occupy(self.host.idle.gpus[gpu].uuid, pid=self.stranger_pid)

    def go(self, gpu: int) -> None:
        if gpu in self.strangers:
            self.strangers.pop(gpu).close()

    def check(self) -> None:
        assert safe_gpu.get_free_gpus() == [str(index) for index in sorted(self.free)]

    def clear(self) -> None:
        for worker in range(WORKERS):
            self.release(worker)
        for gpu in list(self.strangers):
            self.go(gpu)


def test_whatever_happens_in_whatever_order(child: Any, stranger_pid: int) -> None:
    world = World(lambda: child(WORKER), stranger_pid)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.lists(orders, max_size=25))
    def check(story: list[tuple[Any, ...]]) -> None:
        try:
            for name, *arguments in story:
                getattr(world, name)(*arguments)
                world.check()
        finally:
            world.clear()
        world.check()

    check()
