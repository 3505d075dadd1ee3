"""A GPU and its pieces, such as MIG instances, are in each other's way, whatever the driver shows of them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.gpus import PACKAGE_ROOT
from support.vendor_hosts import GIB, IntelHost, KfdHost

GPU, MIG = api.Gpu(0, "GPU-a"), api.Gpu(0, "GPU-a", mig_enabled=True)
ONE, TWO = (api.Gpu(0, f"MIG-{name}", mig_parent="GPU-a", mig_instance=0) for name in "12")
CARD = api.Gpu(0, "GPU-x1", place="AMD-5")  # its first core has the same name in all modes, in some kernels
FIRST, THIRD = (api.Gpu(0, f"GPU-x{name}", place="AMD-5", partition=True, mode="CPX") for name in (1, 3))
HALF = api.Gpu(0, "GPU-x4", place="AMD-5", partition=True, mode="DPX")


def entry(gpu: api.Gpu, share: int | None = None) -> api.Entry:
    """The claim of a device as another process reads it."""
    pieces = {gpu.whole: [gpu.uuid] if gpu.is_piece else []} if gpu.whole != gpu.uuid else {}
    said = {"v": 1, "gpus": {gpu.uuid: share}, "pieces": pieces, "modes": {gpu.whole: gpu.mode} if gpu.mode else {}}
    return api.Entry.read("1.00000000000000aa", 0, (1, 2), json.dumps(said).encode())


@pytest.mark.parametrize(
    ("held", "shown", "kept_off"),
    [
        (GPU, [GPU], [GPU]),
        (GPU, [MIG, ONE, TWO], [MIG, ONE, TWO]),
        (ONE, [MIG, ONE, TWO], [ONE]),
        (ONE, [GPU], [GPU]),
        (ONE, [MIG, TWO], [MIG]),  # no process can reach the new one by the old name
        (CARD, [CARD], [CARD]),
        (CARD, [FIRST, THIRD], [FIRST, THIRD]),
        (FIRST, [FIRST, THIRD], [FIRST]),
        (FIRST, [CARD], [CARD]),
        (THIRD, [CARD], [CARD]),
        (THIRD, [HALF], [HALF]),  # which may have the same silicon
        (THIRD, [FIRST], []),  # a container that was given this one alone
    ],
)
@pytest.mark.parametrize("share", [None, GIB])
def test_what_a_claim_keeps_others_off(
    held: api.Gpu, shown: list[api.Gpu], kept_off: list[api.Gpu], share: int | None
) -> None:
    claims = api.Claims([entry(held, share)], shown)
    assert [gpu for gpu in shown if claims.in_the_way(gpu.uuid)] == kept_off
    assert {*claims.holders(told=False)} == {gpu.uuid for gpu in kept_off}


def test_doors_of_a_gpu_and_its_pieces(make_doors: Callable[[], api.Doors]) -> None:
    gpu, one, two, other = f"GPU-{os.urandom(8).hex()}", *(make_doors() for _ in range(3))
    assert one.take_part_of_pieces(gpu)
    assert two.take_part_of_pieces(gpu)
    assert one.parts != two.parts
    assert not other.take_whole(gpu, ())
    assert not other.take_share(gpu, ())
    assert not one.is_held_against_pieces(gpu)
    one.release()
    assert not other.take_whole(gpu, ())
    two.release()
    assert other.take_share(gpu, ())
    assert one.is_held_against_pieces(gpu)
    assert not one.take_part_of_pieces(gpu)
    other.release()
    assert other.take_whole(gpu, ())
    assert not one.take_part_of_pieces(gpu)
    assert one.parts == {}
    other.release()
    assert one.take_part_of_pieces(gpu, "CPX")
    assert two.take_part_of_pieces(gpu, "CPX")
    assert not other.take_part_of_pieces(gpu, "DPX")
    assert not other.take_whole(gpu, ())


@pytest.fixture
def make_doors() -> Iterator[Callable[[], api.Doors]]:
    made: list[api.Doors] = []

    def make() -> api.Doors:
        made.append(api.Doors())
        return made[-1]

    yield make
    for doors in made:
        doors.release()


class Host:
    """A host whose GPU changes its mode, and two state directories."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.number = int.from_bytes(os.urandom(1), "big")
        self.held: list[subprocess.Popen[str]] = []

    def amd(self, partitions: int, *, named: bool) -> None:
        """Have one AMD GPU in so many partitions, which have a name each in newer kernels."""
        host = KfdHost(self.place / f"{partitions}-{len(os.listdir(self.place))}")
        (host.root / "dev").mkdir()
        (host.root / "dev/kfd").write_text("")
        for one in range(partitions):
            unique = (0xABC00 + self.number << 40) + (one * 8 // partitions if named else 0)
            host.bank(host.gpu(self.number, 500 + one, unique, partition=one), 8 * GIB)
        mode = {1: "SPX", 2: "DPX", 8: "CPX"}[partitions]
        (host.pci / f"0000:{self.number:02x}:00.0/current_compute_partition").write_text(f"{mode}\n")
        self.show(host.root, "kfd")

    def show(self, root: Path, driver: str) -> None:
        now = self.place / "now"
        now.unlink(missing_ok=True)
        now.symlink_to(root)
        said = {"SAFE_GPU_FSROOT": str(now), "SAFE_GPU_DRIVER": driver, "PYTHONPATH": str(PACKAGE_ROOT)}
        self.env = {**os.environ, **said}

    def start(self, only: str, directory: str, *command: str, **more: Any) -> "subprocess.Popen[str]":
        env = {**self.env, "SAFE_GPU_DIR": str(self.place / directory)}
        run = [sys.executable, *"-m safe_gpu run --quiet --affinity none --timeout 0 --only".split(), only]
        return subprocess.Popen([*run, "--", *command], env=env, text=True, stdout=subprocess.PIPE, stderr=-3, **more)

    def hold(self, only: str) -> None:
        process = self.start(only, "one", "sh", "-c", "echo held; read x", stdin=subprocess.PIPE)
        self.held.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"

    def gets(self, only: str, directory: str) -> bool:
        return "got" in self.start(only, directory, "echo", "got").communicate()[0]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    for process in made.held:
        process.communicate("\n")


@pytest.mark.parametrize("directory", ["one", "two"])
@pytest.mark.parametrize("named", [True, False])
def test_amd_partitions(host: Host, directory: str, named: bool) -> None:
    host.amd(1, named=named)
    host.hold("0")
    host.amd(8, named=named)
    assert not any(host.gets(only, directory) for only in ("0", "3", "7"))
    host.held.pop().communicate("\n")
    host.hold("3")
    assert host.gets("4", directory)
    assert not host.gets("3", directory)
    host.amd(1, named=named)
    assert not host.gets("0", directory)
    host.amd(2, named=named)
    assert not any(host.gets(only, directory) for only in "01")


@pytest.mark.parametrize("directory", ["one", "two"])
def test_intel_virtual_functions(host: Host, directory: str) -> None:
    intel = IntelHost(host.place / "intel")
    card = intel.gpu(f"00{host.number:02x}:18:00.0", memory=48 * GIB)
    for number in (1, 2):
        function = intel.gpu(f"00{host.number:02x}:18:00.{number}", memory=24 * GIB)
        (function / "physfn").symlink_to(card)
    host.show(intel.root, "intel")
    host.hold("0")
    assert not any(host.gets(only, directory) for only in "012")
    host.held.pop().communicate("\n")
    host.hold("1")
    assert [host.gets(only, directory) for only in "012"] == [False, False, True]
