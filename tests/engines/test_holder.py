"""The process that holds GPUs of one host: the claim, the report, the place of the workers, and its connection.

At its other end is the driver: each notices the end of the other.
"""

import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import pytest
from support import api
from support.actor import Actor
from support.real import wait_for

from safe_gpu import (
    AffinityOptions,
    AlreadyClaimedError,
    NoPlaceholder,
    NotEnoughGpusError,
    UnsatisfiableRequestError,
    get_free_gpus,
)


@pytest.fixture
def make() -> Iterator[Callable[..., api.HolderProcess]]:
    """Holders in this process, one at a time; they release at the end."""
    made: list[api.HolderProcess] = []

    def make_one(**wishes: Any) -> api.HolderProcess:
        made.append(api.HolderProcess(pickle.loads(pickle.dumps(api.ClaimArguments(**wishes))), "a test"))
        return made[-1]

    yield make_one
    for holder in made:
        holder.release()


def test_it_claims_delegates_and_gives_back(make: Any) -> None:
    before = dict(os.environ), os.sched_getaffinity(0)
    holder = make()
    held = holder.claim(2, 0)
    assert [gpu.index for gpu in held] == [0, 1]
    assert os.sched_getaffinity(0) == before[1], "the holder itself is not bound"
    for gpu in held:
        assert gpu.environment["CUDA_VISIBLE_DEVICES"] == str(gpu.index)
        assert gpu.inherited_position is None
        assert gpu.cpus == {cpu for core in gpu.cores for cpu in core} <= before[1]
    assert get_free_gpus() == ["2", "3", "4", "5", "6", "7"]
    holder.release()
    holder.release()
    assert (dict(os.environ), os.sched_getaffinity(0)) == before
    assert len(get_free_gpus()) == 8
    assert isinstance(holder.claim(8, 0), tuple), "and it may claim again"


def test_refusals_are_answers(make: Any, monkeypatch: Any) -> None:
    assert isinstance(make().claim(9, 0), UnsatisfiableRequestError)
    holder = make(affinity=AffinityOptions(mode="unique_contiguous", min_physical_cores=5000))
    assert not isinstance(holder.claim(1, 0), tuple)
    assert len(get_free_gpus()) == 8, "a claim whose CPUs cannot be planned holds nothing"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert isinstance(make().claim(1, 0), (NotEnoughGpusError, UnsatisfiableRequestError))


def test_uuids(make: Any) -> None:
    (gpu,) = make(visible_as="uuid", affinity=None, placeholder_fn=NoPlaceholder()).claim(1, 0)
    assert gpu.environment["CUDA_VISIBLE_DEVICES"] == gpu.uuid
    assert "CUDA_DEVICE_ORDER" not in gpu.environment
    assert (gpu.cpus, gpu.cores) == (frozenset(), ())


# the UUIDs of simulated:mi250x, by index
AMD = [gpu.uuid for gpu in api.find_preset("mi250x").gpus[:4]]


@pytest.mark.parametrize(
    ("inherited", "visible_as", "shown"),
    [
        ({}, "uuid", {"HIP_VISIBLE_DEVICES": AMD[2]}),
        ({"CUDA_VISIBLE_DEVICES": "3,2"}, "index", {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}),
        ({"ROCR_VISIBLE_DEVICES": "3,2"}, "index", {"HIP_VISIBLE_DEVICES": "1"}),
    ],
)
def test_amd_gpus_under_ray(make: Any, monkeypatch: Any, inherited: Any, visible_as: str, shown: Any) -> None:
    """ROCR_VISIBLE_DEVICES stays as it is: Ray cannot be imported where it is set."""
    for name, value in {**inherited, "RAY_RAYLET_PID": "7", "SAFE_GPU_DRIVER": "simulated:mi250x"}.items():
        monkeypatch.setenv(name, value)
    (gpu,) = make(visible_as=visible_as, selection={"only": [2]}).claim(1, 0)
    assert {name: value for name, value in gpu.environment.items() if name != "SAFE_GPU_SCOPE"} == shown


@pytest.mark.parametrize(
    ("driver", "inherited", "positions"),
    [
        ("dgx-h100", {"CUDA_VISIBLE_DEVICES": "6,1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [2, 1]),
        # HIP's own variable limits the claim, and is no list of Dragon's
        ("mi250x", {"ROCR_VISIBLE_DEVICES": "3,2,1,0", "HIP_VISIBLE_DEVICES": "2,3"}, [3, 2]),
        ("mi250x", {"HIP_VISIBLE_DEVICES": "1,0"}, [None, None]),
    ],
)
def test_places_in_an_inherited_list(make: Any, monkeypatch: Any, driver: str, inherited: Any, positions: Any) -> None:
    for name, value in {**inherited, "SAFE_GPU_DRIVER": f"simulated:{driver}"}.items():
        monkeypatch.setenv(name, value)
    held = make(selection={"only": [0, 1]}).claim(2, 0)
    assert [(gpu.index, gpu.inherited_position) for gpu in held] == list(enumerate(positions))


def test_the_vendor_is_chosen(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    before = dict(os.environ)
    for vendor in ("amd", "nvidia"):
        holder = make(selection={"vendor": vendor})
        assert holder.report(1).free > 0
        (gpu,) = holder.claim(1, 0)
        assert gpu.vendor == vendor
        assert ("ROCR_VISIBLE_DEVICES" in gpu.environment) == (vendor == "amd")
        holder.release()
        assert dict(os.environ) == before
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    holder = make(selection={"vendor": "nvidia"})
    assert isinstance(holder.claim(1, 0), UnsatisfiableRequestError)
    assert holder.report(1).free == -1


def test_the_report(make: Any) -> None:
    holder = make()
    assert (here := holder.report()) == make().report()
    assert holder.report(3).free == 8
    holder.claim(2, 0)
    assert isinstance(make().claim(1, 0), AlreadyClaimedError)
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.delenv("CUDA_VISIBLE_DEVICES")
        assert make().report(3).free == 6
        assert make().report(9).free == -1
        elsewhere.setenv("SAFE_GPU_DIR", os.environ["SAFE_GPU_DIR"] + "-other")
        assert make().report().rank != here.rank, "two state directories are two hosts"


def test_an_exclusive_gpu_is_left_to_the_workers(fake_gpus: Any) -> None:
    code = """
from safe_gpu.engines.holder import HolderProcess as Holder, ClaimArguments as Wishes
holder = Holder(Wishes(affinity=None), "a test")
assert isinstance(holder.claim(1, 0), tuple)
print(len([thing for thing in holder._owner.placeholders if thing is not None]))
"""
    assert fake_gpus.python(code).split() == ["1"]
    fake_gpus.change(7, mode=3)
    assert fake_gpus.python(code).split() == ["1"], "it is not claimed"
    fake_gpus.set(8, mode=3)
    assert fake_gpus.python(code).split() == ["0"]


def test_a_worker_is_moved_or_says_why_not(caplog: pytest.LogCaptureFixture) -> None:
    mask = os.sched_getaffinity(0)
    assert "bound" in api.enter_worker([min(mask)], None, None)
    assert os.sched_getaffinity(0) == {min(mask)}
    assert caplog.text == ""
    some = api.enter_worker([min(mask), max(mask) + 4096], None, None)
    assert "the kernel cut" in some
    assert some in caplog.text
    api.restore_state()
    assert api.enter_worker([], None, None) == "not bound"
    assert api.enter_worker([max(mask) + 4096], None, None).startswith("not bound: ")
    api.restore_state()
    assert os.sched_getaffinity(0) == mask


class HolderHere(api.RemoteHolder):
    """A holder of "hosta" in a process of its own on this host; it calls, or ends at once."""

    def __init__(self, calls: bool = True) -> None:
        super().__init__("hosta", "1")
        self.calls = calls

    def start_process(self, port: int, token: bytes) -> None:
        def hold(line: Connection) -> None:
            if self.calls:
                api.serve(("127.0.0.1", port), token, api.ClaimArguments(affinity=None), "a test")

        self.process = Actor(hold)

    def why_ended(self) -> str:
        if api.has_ended(self.process.pid):
            return "its process is gone"
        return ""


@pytest.fixture
def connect(state_dir: Any) -> Iterator[Callable[..., tuple[api.RemoteHolder, int]]]:
    """Start a holder, and return it with the pid of its process."""
    started: list[HolderHere] = []

    def make(calls: bool = True) -> tuple[api.RemoteHolder, int]:
        holder = HolderHere(calls)
        api.start_all([holder])
        started.append(holder)
        return holder, holder.process.pid

    yield make
    for holder in started:
        holder.process.end()


def ask(holder: api.RemoteHolder, method: str, *arguments: Any) -> Any:
    holder.call(method, *arguments)
    return holder.answer(30.0)


def test_it_ends_with_the_connection(connect: Any) -> None:
    holder, pid = connect()
    assert ask(holder, "report", 3).free == 8
    assert [gpu.index for gpu in ask(holder, "claim", 2, 0)] == [0, 1]
    assert isinstance(ask(holder, "claim", 9, 0), Exception), "errors are answers"
    assert len(get_free_gpus()) == 6
    holder.end()
    holder.end()
    wait_for(lambda: api.has_ended(pid), "the end of the holder")
    assert len(get_free_gpus()) == 8


def test_a_holder_that_waits_ends_too(connect: Any) -> None:
    first, _ = connect()
    second, pid = connect()
    ask(first, "claim", 8, 0)
    assert isinstance(ask(second, "claim", 1, 0), NotEnoughGpusError)
    second.call("claim", 1, None)
    with pytest.raises(api.HolderLostError, match="does not answer within"):
        second.answer(0.1)
    second.end()
    wait_for(lambda: api.has_ended(pid), "the end of the waiting holder")
    first.end()


def test_a_holder_that_is_killed_or_never_calls_is_lost(connect: Any) -> None:
    holder, pid = connect()
    ask(holder, "claim", 2, 0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(api.HolderLostError, match="hosta: the process that held the GPUs there has exited"):
        ask(holder, "ping")
    holder.end()
    holder, _ = connect(calls=False)
    with pytest.raises(api.HolderLostError, match="ended before it began"):
        ask(holder, "report")
    holder.end()


def test_the_end_of_the_driver_frees_its_gpus_although_a_forked_child_lives(state_dir: Any) -> None:
    def drive(line: Connection) -> None:
        holder = HolderHere()
        api.start_all([holder])
        ask(holder, "claim", 8, 0)
        if os.fork():
            line.send("claimed")
            signal.pause()
        line.recv()  # the child lives as long as the test

    driver = Actor(drive)
    assert driver.hear() == "claimed"
    assert get_free_gpus() == []
    os.kill(driver.pid, signal.SIGKILL)
    wait_for(lambda: len(get_free_gpus()) == 8, "the end of the holder")
    driver.end()


def test_one_that_cannot_be_started_ends_those_before_it(state_dir: Any) -> None:
    class Broken(api.RemoteHolder):
        def start_process(self, port: int, token: bytes) -> None:
            raise ValueError("no such node")

    before, broken, behind = HolderHere(), Broken("hostb", "2"), Broken("hostc", "3")
    with pytest.raises(api.HolderLostError, match="hostb: a holder could not be started there: no such node") as caught:
        api.start_all([before, broken, behind])
    assert caught.value.host == "hostb"
    wait_for(lambda: api.has_ended(before.process.pid), "the end of the holder that was started")
    before.process.end()


def test_strangers_are_not_let_in() -> None:
    ports: list[int] = []

    class NeverCalls(api.RemoteHolder):
        def start_process(self, port: int, token: bytes) -> None:
            ports.append(port)

        def why_ended(self) -> str:
            return ""

    holder = NeverCalls("hosta", "1")
    api.start_all([holder])
    with Connection(socket.create_connection(("127.0.0.1", ports[0])).detach()) as stranger:
        stranger.send_bytes(bytes(32))
        with pytest.raises(EOFError):
            stranger.recv_bytes()
    holder.call("report")
    with pytest.raises(api.HolderLostError, match="does not answer"):
        holder.answer(0.05)
    holder.end()


def test_a_holder_reads_no_object_of_a_stranger_who_got_the_port() -> None:
    """A driver that has ended leaves its port to anybody."""

    def welcome() -> None:
        link = Connection(server.accept()[0].detach())
        link.recv_bytes()
        link.send_bytes(b"#CHALLENGE#" + bytes(20))
        link.recv_bytes()
        link.send_bytes(b"#WELCOME#")
        link.recv_bytes()
        link.send_bytes(bytes(16))
        link.send(("release", ()))
        link.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = Thread(target=welcome)
        stranger.start()
        with pytest.raises(AuthenticationError):
            api.serve(server.getsockname(), bytes(32), api.ClaimArguments(), "a test")
        stranger.join()
