"""A GPU and its pieces, such as MIG instances, are in each other's way, whatever the driver shows of them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import Host as SimulatedHost
from support.claims import claim
from support.gpus import PACKAGE_ROOT, FakeGpus
from support.real import long
from support.vendor_hosts import GIB, IntelHost, KfdHost

import safe_gpu

GPU, MIG = api.Gpu(0, "GPU-a"), api.Gpu(0, "GPU-a", mig_enabled=True)
ONE, TWO = (api.Gpu(0, f"MIG-{name}", mig_parent="GPU-a", mig_instance=0) for name in "12")
CARD = api.Gpu(0, "GPU-x1", place="AMD-5")  # its first core has the same name in all modes, in some kernels
FIRST, THIRD = (api.Gpu(0, f"GPU-x{name}", place="AMD-5", partition=True, mode="CPX") for name in (1, 3))
HALF = api.Gpu(0, "GPU-x4", place="AMD-5", partition=True, mode="DPX")
PHYSICAL = api.Gpu(0, "INTEL-18.0")
VIRTUAL, OTHER = (api.Gpu(0, f"INTEL-18.{number}", place="INTEL-18.0", partition=True) for number in (1, 2))
OTHER_CARD = api.Gpu(1, "INTEL-42.0")

RULE = [
    # what is held, what the driver shows now, and which of these nobody else may have
    (GPU, [GPU], [GPU]),
    (GPU, [MIG, ONE, TWO], [MIG, ONE, TWO]),
    (ONE, [MIG, ONE, TWO], [ONE]),
    (ONE, [GPU], [GPU]),
    (ONE, [MIG, TWO], [MIG]),  # no process can reach the new one by the old name
    (CARD, [CARD], [CARD]),
    (CARD, [CARD._replace(uuid="AMD-5-0")], [CARD._replace(uuid="AMD-5-0")]),  # where the kernel gives it no UUID
    (CARD, [FIRST, THIRD], [FIRST, THIRD]),
    (FIRST, [FIRST, THIRD], [FIRST]),
    (FIRST, [CARD], [CARD]),
    (THIRD, [CARD], [CARD]),
    (THIRD, [HALF], [HALF]),  # which may have the same silicon
    (THIRD._replace(mode=""), [FIRST], [FIRST]),  # nobody knows of which mode it is
    (THIRD, [FIRST], []),  # a container that was given this one alone
    (PHYSICAL, [PHYSICAL, VIRTUAL, OTHER, OTHER_CARD], [PHYSICAL, VIRTUAL, OTHER]),
    (VIRTUAL, [PHYSICAL, VIRTUAL, OTHER, OTHER_CARD], [PHYSICAL, VIRTUAL]),
]


def entry(*gpus: api.Gpu, share: int | None = None) -> api.Entry:
    """The claim of these devices as another process reads it."""
    said = {"v": 1, "gpus": {gpu.uuid: share for gpu in gpus}, **api.keys_of(gpus)}
    return api.Entry.read("1.00000000000000aa", 0, (1, 2), json.dumps(said).encode())


def ticket(*gpus: api.Gpu) -> api.Entry:
    """The ticket of a waiter that could have one of these, as another process reads it."""
    said = {"v": 1, **api.TicketRequest(1, frozenset()).for_gpus(gpus).as_facts()}
    return api.Entry.read("1.00000000000000aa", 0, (1, 2), json.dumps(said).encode())


@pytest.mark.parametrize(("held", "shown", "kept_off"), RULE)
@pytest.mark.parametrize("share", [None, GIB])
def test_what_a_claim_keeps_others_off(
    held: api.Gpu, shown: list[api.Gpu], kept_off: list[api.Gpu], share: int | None
) -> None:
    claims = api.Claims([entry(held, share=share)], shown)
    assert [gpu for gpu in shown if claims.in_the_way(gpu.uuid)] == kept_off
    assert {*claims.holders_as_written()} == {gpu.uuid for gpu in kept_off}


@pytest.mark.parametrize(
    ("held", "shown", "is_shared"),
    [
        (CARD, CARD, True),
        (FIRST, FIRST, True),
        (ONE, ONE, True),
        (CARD, FIRST, False),  # the same name, and another piece of silicon
        (FIRST, CARD, False),
        (FIRST, FIRST._replace(mode="DPX"), False),
    ],
)
def test_a_share_is_shared_with_those_of_the_same_device_alone(held: api.Gpu, shown: api.Gpu, is_shared: bool) -> None:
    """Where no door tells, in another network namespace, shares of a card and of its first core were added up."""
    holder = api.Claims([entry(held, share=GIB)], [shown]).holders_as_written()[shown.uuid]
    assert (len(holder.sharers) > 0) == is_shared


@pytest.mark.parametrize(("held", "shown", "kept_off"), RULE)
def test_tickets_compete_by_the_same_rule(held: api.Gpu, shown: list[api.Gpu], kept_off: list[api.Gpu]) -> None:
    """But for a GPU with MIG on, which nobody can claim itself, and of whose claims the instances tell."""
    for gpu in shown:
        if gpu.mig_enabled:
            continue
        for one, other in ((held, gpu), (gpu, held)):
            request = api.TicketRequest.of(ticket(one))
            assert request.competes_with(ticket(other)) == (gpu in kept_off)


def test_nobody_knows_when_one_starts_who_waits_behind_a_request_that_is_not_understood() -> None:
    """Nobody passes that, for the GPU of whose piece it waits."""
    shown = [api.GpuStatus(gpu, "free") for gpu in (PHYSICAL, VIRTUAL, OTHER)]
    later_version = ticket(VIRTUAL)._replace(version=2)
    behind = ticket(PHYSICAL)._replace(name="2.00000000000000aa", number=2)
    assert [start for start, _ in api.expected_starts([later_version, behind], shown, 100.0)] == [None, None]
    assert [start for start, _ in api.expected_starts([behind], shown, 100.0)] == [100.0]


def test_what_a_neighbour_says_of_a_gpu_counts_for_his_own_claim_alone() -> None:
    """That one GPU is a piece of another one makes no claim of others keep anybody off."""
    forged = entry(GPU)._replace(pieces={"GPU-b": ("GPU-a",)})
    other = api.Gpu(1, "GPU-b")
    honest = entry(ONE)._replace(name="2.00000000000000aa", number=2)
    for device, expected in ((GPU, [forged, honest]), (other, [forged]), (CARD, [])):
        shown = [GPU, other, CARD]
        assert api.Claims([forged, honest], shown).in_the_way(device.uuid) == expected


def test_doors_of_a_gpu_and_its_pieces(make_doors: Callable[[], api.Doors]) -> None:
    gpu, one, two, other = f"GPU-{os.urandom(8).hex()}", *(make_doors() for _ in range(3))
    assert one.take_part_of_pieces(gpu)
    assert two.take_part_of_pieces(gpu)
    assert one.parts != two.parts
    assert not other.take_whole(gpu, ())
    assert not other.take_share(gpu, ())
    assert not one.is_held_against_pieces(gpu)
    one.release()
    assert not other.take_whole(gpu, range(64)), "no entry vouches for a part of pieces"
    two.release()
    assert other.take_share(gpu, ())
    assert one.is_held_against_pieces(gpu)
    assert not one.take_part_of_pieces(gpu)
    other.release()
    assert other.take_whole(gpu, ())
    assert not one.take_part_of_pieces(gpu)
    assert one.parts == {}
    assert not one.holds_any
    other.release()
    assert one.take_part_of_pieces(gpu, "CPX")
    assert two.take_part_of_pieces(gpu, "CPX")
    assert not other.take_part_of_pieces(gpu, "DPX")
    assert not other.take_whole(gpu, ())


@pytest.fixture
def make_doors() -> Iterator[Callable[[], api.Doors]]:
    with ExitStack() as stack:

        def make(tree: str = "") -> api.Doors:
            doors = api.Doors(tree)
            stack.callback(doors.release)
            return doors

        yield make


# Behind the real drivers, whose files tell of another mode


GETS = """
import sys, safe_gpu
for device in sys.argv[1:]:
    try:
        with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None, only=device):
            print("granted")
    except safe_gpu.NotEnoughGpusError:
        print("refused")
"""


class Host:
    """A host whose first GPU changes its mode, and claims there.

    Args:
        where: what the others share with the claim that holds: the state directory ("one directory"), nothing ("two
            directories"), the path of the directory ("private /tmp"), all but host.lock ("without host.lock").
    """

    def __init__(self, place: Path, where: str) -> None:
        self.place = place
        self.where = where
        self.number = int.from_bytes(os.urandom(1), "big")  # names of GPUs are one for all that runs on this machine
        self.env: dict[str, str] = {}
        self._holder: subprocess.Popen[str] | None = None

    def show(self, root: Path, driver: str) -> None:
        now = self.place / "now"
        now.unlink(missing_ok=True)
        now.symlink_to(root)
        said = {"SAFE_GPU_FSROOT": str(now), "SAFE_GPU_DRIVER": driver, "PYTHONPATH": str(PACKAGE_ROOT)}
        self.env = {**os.environ, **said}

    def hold(self, only: str) -> None:
        """Let a command hold a device; it ends before the next one holds."""
        self.let_go()
        words = f"-m safe_gpu run --quiet --affinity none --timeout 0 --only {only} --"
        command = [sys.executable, *words.split(), "sh", "-c", "echo held; read line"]
        env = {**self.env, "SAFE_GPU_DIR": str(self.place / "one")}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._holder = subprocess.Popen(command, env=env, **pipes)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "held\n"

    def let_go(self) -> None:
        if self._holder is not None:
            self._holder.communicate("\n")
            self._holder = None

    def gets(self, *devices: str) -> list[bool]:
        """Whether other claims, of one process, get each of these devices at once; what cannot be had at all is a
        mistake of the test."""
        directory = self.place / ("two" if self.where == "two directories" else "one")
        command = [sys.executable, "-c", GETS, *devices]
        if self.where == "private /tmp":
            mount = f"mount -t tmpfs -o mode=1777 tmpfs {directory}"
            command = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"', *command]
        if self.where == "without host.lock":
            (directory / "host.lock").unlink()
        env = {**self.env, "SAFE_GPU_DIR": str(directory)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [line == "granted" for line in done.stdout.splitlines()]


PLACES = [
    "one directory",
    *(pytest.param(place, marks=long) for place in ("two directories", "private /tmp", "without host.lock")),
]


@pytest.fixture
def host(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    where = request.param
    probe = ["unshare", "--mount", "true"]
    if where == "private /tmp" and (os.geteuid() or subprocess.run(probe, capture_output=True).returncode):
        pytest.skip("needs root, to make namespaces")
    made = Host(tmp_path, where)
    yield made
    made.let_go()


@pytest.mark.parametrize("host", PLACES, indirect=True)
def test_mig_instances(host: Host, fake_gpus: FakeGpus) -> None:
    """Two compute instances of one GPU instance, and another GPU instance."""
    instances = ",".join(fake_gpus.uuid("MIG", number) for number in range(3))
    without = [{"mig": 0}, {"mig": 0}]
    divided = [{"mig": 1, "instances": instances, "gi": "1,1,2", "ci": "0,1,0", "imem": 10 * GIB}, {"mig": 0}]
    fake_gpus.write(*without)
    host.env = fake_gpus.env
    host.hold("0")
    fake_gpus.write(*divided)
    assert host.gets("0:0", "0:1", "0:2", "1") == [False, False, False, True]
    host.hold("0:0")
    assert host.gets("0:0", "0:1", "0:2", "1") == [False, True, True, True]
    fake_gpus.write(*without)
    assert host.gets("0", "1") == [False, True]
    host.let_go()
    assert host.gets("0") == [True]


def show_amd(host: Host, partitions: int, *, named: bool) -> None:
    """Have one AMD GPU in so many partitions, which have a name each in newer kernels."""
    kfd = KfdHost(host.place / f"{partitions}-{len(os.listdir(host.place))}")
    (kfd.root / "dev").mkdir()
    (kfd.root / "dev/kfd").write_text("")
    for one in range(partitions):
        unique = (0xABC00 + host.number << 40) + (one * 8 // partitions if named else 0)
        kfd.bank(kfd.gpu(host.number, 500 + one, unique, partition=one), 8 * GIB)
    mode = {1: "SPX", 2: "DPX", 8: "CPX"}[partitions]
    (kfd.pci / f"0000:{host.number:02x}:00.0/current_compute_partition").write_text(f"{mode}\n")
    host.show(kfd.root, "kfd")


@pytest.mark.parametrize("host", PLACES, indirect=True)
@pytest.mark.parametrize("named", [True, pytest.param(False, marks=long)])
def test_amd_partitions(host: Host, named: bool) -> None:
    show_amd(host, 1, named=named)
    host.hold("0")
    show_amd(host, 8, named=named)
    assert host.gets("0", "3", "7") == [False, False, False]
    host.hold("3")
    assert host.gets("4", "3") == [True, False]
    show_amd(host, 1, named=named)
    assert host.gets("0") == [False]
    show_amd(host, 2, named=named)
    assert host.gets("0", "1") == [False, False]


def intel_host(place: Path, cards: int = 1, bus: int = 0x18) -> IntelHost:
    """Cards with two virtual functions each."""
    intel = IntelHost(place)
    for number in range(cards):
        card = intel.gpu(f"0000:{bus + number:02x}:00.0", memory=48 * GIB)
        for function in (1, 2):
            path = intel.gpu(f"0000:{bus + number:02x}:00.{function}", memory=24 * GIB)
            (path / "physfn").symlink_to(card)
    return intel


@pytest.mark.parametrize("host", PLACES, indirect=True)
def test_intel_virtual_functions(host: Host) -> None:
    host.show(intel_host(host.place / "intel", bus=max(1, host.number)).root, "intel")
    host.hold("0")
    assert host.gets("0", "1", "2") == [False, False, False]
    host.hold("1")
    assert host.gets("0", "1", "2") == [False, False, True]


def test_several_gpus_are_never_a_gpu_and_a_piece_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(intel_host(tmp_path / "intel", cards=2).root))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "intel")
    for nb_gpus in (2, (1, 6)):
        with claim(nb_gpus) as claimed:
            assert [gpu.pci_bus_id for gpu in claimed.gpus] == ["0000:18:00.0", "0000:19:00.0"]
    with pytest.raises(safe_gpu.UnsatisfiableRequestError):
        claim(3)
    with claim((1, 2), only="0,1,2") as claimed:
        assert len(claimed.gpus) == 1
    with claim((1, 3), only="1,2") as claimed:
        assert [gpu.pci_bus_id for gpu in claimed.gpus] == ["0000:18:00.1", "0000:18:00.2"]


# On simulated hosts


def divide_at(host: SimulatedHost, poll: int, mode: str) -> None:
    """Divide the first card just before a poll."""
    card = host.idle.gpus[0].whole

    def divide(number: int) -> None:
        if number == poll:
            host.divide(card, mode)

    host.on_poll = divide


@pytest.mark.parametrize(
    ("preset", "before", "after"),
    [
        ("mi300x-cpx", "partitions 8", "partitions 2"),
        ("mi300x-cpx", "partitions 8", "whole"),
        ("mi300x-cpx", "whole", "partitions 4"),
    ],
)
def test_the_second_poll_compares_what_a_name_stands_for(
    host_of: Callable[[str], SimulatedHost], preset: str, before: str, after: str
) -> None:
    """The first partition has the same name in all modes, and the card too. The claim chooses again."""
    host = host_of(preset)
    card = host.idle.gpus[0].whole
    host.divide(card, before)
    divide_at(host, 2, after)
    with claim(only="0") as claimed:
        (gpu,) = claimed.gpus
        now = host.snapshot().gpus[0]
        assert (gpu.uuid, gpu.mode, gpu.is_piece) == (now.uuid, now.mode, now.is_piece)
        (said,) = api.living_claims()
        assert said.pieces == {card: (gpu.uuid,) if gpu.is_piece else ()}
        assert said.modes == ({card: gpu.mode} if gpu.mode else {})


def test_a_whole_gpu_that_is_divided_before_the_second_poll_is_not_claimed(
    host_of: Callable[[str], SimulatedHost],
) -> None:
    host = host_of("dgx-a100")
    divide_at(host, 2, "mig 3g.40gb/2 40320")
    with claim(only="0") as claimed:
        assert [gpu.label for gpu in claimed.gpus] == ["0:0"]


HOLD = """
import os, safe_gpu
owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, only=%r, hold_for=%r, share=%r)
say(owner.gpus[0].label)
listen()
"""


def test_a_claim_that_is_gone_by_its_name_is_in_the_way_until_it_ends(
    host_of: Callable[[str], SimulatedHost], forked: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    host = host_of("dgx-a100")
    card = host.idle.gpus[0].uuid
    host.divide(card, "mig 3g.40gb 40320 2g.20gb 19968")
    holder = forked(HOLD % ("0:1", None, None), "0:1")
    host.divide(card, "whole")
    with pytest.raises(safe_gpu.NotEnoughGpusError) as caught:
        claim(only="0")
    assert caught.value.verdicts[0].pid == holder.pid
    host.divide(card, "mig 1g.10gb 9856 1g.10gb 9856")
    with claim(only="0:1"):
        pass  # of another piece, which no process reaches by the old name
    host.divide(card, "whole")
    holder.kill()
    eventually(lambda: not api.living_claims())
    with claim(only="0"):
        pass


def test_shares_of_a_piece(host_of: Callable[[str], SimulatedHost], forked: Callable[..., Any]) -> None:
    host = host_of("dgx-a100")
    card = host.idle.gpus[0].uuid
    host.divide(card, "mig 3g.40gb 40320 2g.20gb 19968")
    forked(HOLD % ("0:0", None, "20GiB"), "0:0")
    with claim(only="0:0", share="15GiB"):
        pass
    host.divide(card, "whole")
    for share in (None, "1GiB"):
        with pytest.raises(safe_gpu.NotEnoughGpusError):
            claim(only="0", share=share)
    host.divide(card, "mig 3g.40gb 40320 2g.20gb 19968")
    with pytest.raises(safe_gpu.NotEnoughGpusError):
        claim(only="0:0")


@pytest.fixture
def functions(host_of: Callable[[str], SimulatedHost]) -> SimulatedHost:
    """A host whose first card has 40 virtual functions."""
    host = host_of("max1550")
    host.divide(host.idle.gpus[0].uuid, "functions 40")
    return host


SENTENCE = "32 claims hold pieces of GPU INTEL-0000:18:00.0, which is the most"
FREE_PIECES = [33, 34, 35, 36, 37, 38, 39, 40]


@pytest.fixture
def crowd(
    functions: SimulatedHost, make_doors: Callable[..., api.Doors], forked: Callable[..., Any]
) -> list[api.Doors]:
    """As many claims of pieces of its first card as can be: a share of piece 1 here, the others elsewhere."""
    forked(HOLD % ("1", None, "1GiB"), "1")
    found = []
    for number in range(2, 33):
        doors = make_doors(functions.idle.name_prefix)
        assert doors.take_part_of_pieces(functions.idle.gpus[0].uuid)
        assert doors.take_whole(f"INTEL-0000:18:00.{number}", ())
        found.append(doors)
    return found


@pytest.mark.parametrize(("only", "share"), [("35,36", None), ("35,36", "1GiB"), ("1,35", "1GiB")])
def test_one_claim_more_than_a_gpu_has_parts_is_refused_with_that_sentence(
    crowd: list[api.Doors], only: str, share: str | None
) -> None:
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=SENTENCE) as caught:
        claim(only=only, share=share)
    assert [one.reason for one in caught.value.verdicts if one.state == "claimed"] == [SENTENCE] * 2
    with claim(only="41"):
        pass  # another card
    crowd.pop().release()
    with claim(only=only, share=share):
        pass


def test_it_waits_until_one_of_these_claims_ends(crowd: list[api.Doors], command: Any) -> None:
    waiter = command.start("run", "--only", "35", "--", "echo", "got it")
    assert SENTENCE in waiter.stderr.readline()
    crowd.pop().release()
    assert waiter.stdout.readline() == "got it\n"


def test_a_gpu_that_is_held_in_another_directory_keeps_its_pieces_too(
    functions: SimulatedHost, make_doors: Callable[..., api.Doors]
) -> None:
    doors = make_doors(functions.idle.name_prefix)
    assert doors.take_whole(functions.idle.gpus[0].uuid, ())
    elsewhere = [one.gpu.index for one in api.gather().gpus if "in another state directory" in one.reason]
    assert elsewhere == [*range(41)]
    doors.release()
    assert doors.take_part_of_pieces(functions.idle.gpus[0].uuid)
    assert [one.gpu.index for one in api.gather().gpus if "in another state directory" in one.reason] == [0]


def test_who_only_asks_is_told_the_same(crowd: list[api.Doors], run_here: Callable[..., Any]) -> None:
    shown = {one.gpu.index: one for one in api.gather().gpus}
    assert [index for index, one in shown.items() if one.reason == SENTENCE] == FREE_PIECES
    assert [index for index, one in shown.items() if "in another state directory" in one.reason] == [*range(2, 33)]
    assert (shown[1].state, shown[1].share_free) == ("claimed", 0)
    assert f"GPU 33-40: {SENTENCE}" in run_here("status").stdout
    refused = run_here("wait", "--only", "35", "--timeout", "0")
    assert (refused.returncode, SENTENCE in refused.stderr) == (75, True)
    assert run_here("wait", "--only", "41", "--timeout", "0").returncode == 0
    (check,) = [one for one in api.run_checks() if one.name == "state directories of claims"]
    assert ",30,31,32: claimed in another state directory" in check.detail
