"""GPUs and their pieces, such as MIG instances, between the client in C and this package: what one holds, the other
does not get, whatever mode the GPU is in now, in one state directory and in two. Their waiters stand in one queue."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support import api
from support.real import REQUIRED, long

KINDS = ("c", "python")
BOTH = pytest.mark.parametrize(("first", "second"), [KINDS, KINDS[::-1]], ids=["C first", "Python first"])
DIRECTORIES = pytest.mark.parametrize("directory", ["state", "other"])


class Division(NamedTuple):
    """A simulated host whose first card is divided, and what its card is then.

    Attributes:
        modes: in which it has pieces; those of the second are in the way of those of the first.
    """

    preset: str
    modes: tuple[str, ...]


MIG = Division("dgx-a100", ("mig 3g.40gb/2 40320 1g.10gb 9856",))
AMD = Division("mi300x-cpx", ("partitions 8", "partitions 2"))
INTEL = Division("max1550", ("functions 2",))
ALL = pytest.mark.parametrize(
    "division", [MIG, *(pytest.param(other, marks=long) for other in (AMD, INTEL))], ids=["MIG", "AMD", "Intel"]
)


def until_held(party: Any) -> Any:
    assert party.process.stdout.readline() == b"held\n"
    return party


class Card:
    """The first card of a host.

    Args:
        directory: the state directory of who comes second; that of the first is ``state``.
    """

    def __init__(self, scene: Any, directory: str) -> None:
        self.scene = scene
        self.driver = api.SimulatedDriver(scene.preset)
        self.name = self.driver.idle.gpus[0].whole
        self.env = {"SAFE_GPU_DIR": str(scene.directory / directory)}

    def divide(self, mode: str) -> list[api.Gpu]:
        """The devices of the card in that mode: the GPU, or its pieces."""
        self.driver.divide(self.name, mode)
        shown = [gpu for gpu in self.driver.snapshot().gpus if gpu.whole == self.name and not gpu.unusable]
        return [gpu for gpu in shown if gpu.is_piece] or shown

    def start(self, kind: str, gpu: api.Gpu, *options: str, **more: Any) -> Any:
        """A process that waits for a device, and says when it has it."""
        command = ["sh", "-c", "echo held; exec sleep 600"]
        return self.scene.start(kind, 1, *options, only=[gpu], command=command, **more)

    def hold(self, kind: str, gpu: api.Gpu, *options: str, **more: Any) -> Any:
        """A process that holds a device."""
        return until_held(self.start(kind, gpu, "now", *options, **more))

    def gets(self, kind: str, gpu: api.Gpu) -> bool:
        """Whether the other one gets a device."""
        code = self.scene.ends(kind, 1, "now", only=[gpu], env=self.env)
        assert code in (0, 75)
        return bool(code == 0)


@pytest.fixture
def card_of(scene_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Card]:
    def make(division: Division, directory: str) -> Card:
        if directory == "state" and not REQUIRED:
            pytest.skip("needs SAFE_GPU_REQUIRE_REAL=1, as it takes long")
        scene = scene_of(division.preset)
        monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", scene.env["SAFE_GPU_SIMULATED_DIR"])
        return Card(scene, directory)

    return make


@ALL
@DIRECTORIES
@BOTH
def test_each_sees_what_the_other_holds(card_of: Any, division: Division, directory: str, first: str, second: str):
    card = card_of(division, directory)
    (whole,) = card.divide("whole")
    holder = card.hold(first, whole)
    assert not card.gets(second, whole)
    for mode in division.modes:
        assert not any(card.gets(second, gpu) for gpu in card.divide(mode)[:3])
    holder.end()
    one, other, *_ = card.divide(division.modes[0])
    holder = card.hold(first, one)
    assert [card.gets(second, gpu) for gpu in (one, other)] == [False, True]
    beside = card.hold(second, other)
    for mode in ("whole", *division.modes[1:]):
        assert not any(card.gets(second, gpu) for gpu in card.divide(mode))
    holder.end()
    card.divide("whole")
    assert not card.gets(first, whole)
    beside.end()
    assert card.gets(second, whole)


@BOTH
@DIRECTORIES
def test_a_share_of_a_gpu_is_in_the_way_of_its_pieces(card_of: Any, directory: str, first: str, second: str) -> None:
    card = card_of(MIG, directory)
    (whole,) = card.divide("whole")
    card.hold(first, whole, "10 GiB")
    assert not any(card.gets(second, gpu) for gpu in card.divide(MIG.modes[0]))


@BOTH
def test_who_waits_for_a_gpu_and_who_waits_for_its_pieces_stand_in_one_queue(card_of: Any, first: str, second: str):
    card = card_of(INTEL, "state")
    one, other = card.divide(INTEL.modes[0])
    (whole,) = [gpu for gpu in card.driver.snapshot().gpus if gpu.uuid == card.name]
    holder = card.hold(first, one)
    scene = card.scene
    waiter = scene.until_waits(card.start(first, whole))
    assert not card.gets(second, other)
    behind = scene.until_waits(card.start(second, other))
    assert scene.tickets() == [waiter.pid, behind.pid]
    holder.end()
    until_held(waiter)
    assert behind.pid in scene.tickets()
    waiter.end()
    until_held(behind)


def test_a_client_that_takes_no_part_of_the_gpu_is_seen(card_of: Any) -> None:
    """By who takes the GPU from another state directory."""
    card = card_of(MIG, "other")
    one, *_ = card.divide(MIG.modes[0])
    card.hold("c", one, broken="no part of the GPU")
    (whole,) = card.divide("whole")
    assert card.gets("python", whole)
