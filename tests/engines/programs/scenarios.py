"""Scenarios, and parts of them, that are the same for every engine, given its ``claim``; the referee, and neighbours.

    scenarios.py neighbour STOP_FILE NB_GPUS [hold]
    scenarios.py mpi_rank DIRECTORY

The referee's marks lie in a directory that all hosts share, and are made by O_EXCL: no double booking is missed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safe_gpu
from safe_gpu.coordination.holders import living_claims

MARKS = os.environ["TEST_MARKS"]
GO_ON = f"{MARKS}/go-on"
"""Training has started when there is this file with ".started", and goes on until there is this file."""


@contextmanager
def using(*uuids: str, host: str | None = None) -> Iterator[None]:
    """Mark GPUs of a host as used; someone who uses one at the same time is a double booking, recorded for good."""
    paths = [f"{MARKS}/{host or socket.gethostname()}:{uuid}" for uuid in uuids]
    for path in paths:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            os.close(os.open(f"{path}.DOUBLE", os.O_CREAT))
            raise AssertionError(f"double booking: {path}") from None
    try:
        yield
    finally:
        for path in paths:
            os.unlink(path)


def meet(name: str, me: int, everyone: int = 2, seconds: float = 100.0) -> None:
    """Wait until ``everyone`` has come to this point."""
    os.close(os.open(f"{MARKS}/meet-{name}-{me}", os.O_CREAT))
    wait(lambda: all(os.path.exists(f"{MARKS}/meet-{name}-{other}") for other in range(everyone)), name, seconds)


def put(path: Path, content: bytes) -> None:
    """Have a file that nobody sees half of."""
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


def wait(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(0.01)


def raises(kind: type[BaseException], *words: str, call: Any) -> Any:
    """The error that ``call`` raises; it must be of this kind and have these words in its message."""
    try:
        call()
    except kind as err:
        if missing := [word for word in words if word not in str(err)]:
            raise AssertionError(f"{missing} not in: {err}") from err
        return err
    raise AssertionError(f"no {kind.__name__}")


class Worker(NamedTuple):
    """What a worker has: its host, its CPUs, and variables of its environment, None where they are not set."""

    host: str
    cpus: tuple[int, ...]
    cuda: str | None
    order: str | None
    rocr: str | None
    hip: str | None


def me() -> Worker:
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    return Worker(socket.gethostname(), tuple(sorted(os.sched_getaffinity(0))), *map(os.environ.get, names))


def holder_of(uuid: str, *, inside: bool = False) -> int:
    """The pid of the claim that holds a GPU of this host, or of the one inside it."""
    return next(one.pid for one in living_claims() if uuid in one.gpus and bool(one.inside) is inside)


def refusals(claim: Callable[..., Any], more: Callable[[], None] = lambda: None) -> None:
    """What cannot be, is said, with the host where it was found; others' GPUs are waited for; nothing is left.

    ``more`` is called while another user holds three GPUs of hosta.
    """
    refused = safe_gpu.UnsatisfiableRequestError
    raises(refused, "hostx", "hosta, hostb", call=lambda: claim(nodes=["hosta", "hostx"]))
    raises(refused, "hosta: ", call=lambda: claim(nodes=2, gpus_per_node=9))
    stop = f"{MARKS}/stop"
    both = ["hostb", "hosta"]
    with subprocess.Popen(
        [sys.executable, __file__, "neighbour", stop, "3", "hold"], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout is not None
            assert "holding [0, 1, 2]" in other.stdout.readline()
            busy = raises(safe_gpu.NotEnoughGpusError, "hosta: 6 GPUs", call=lambda: claim(both, 6, timeout=0))
            assert (busy.host, busy.nb_gpus, len(busy.verdicts)) == ("hosta", 6, 8)
            assert [verdict.pid for verdict in busy.verdicts if not verdict.free] == [other.pid] * 3
            late = raises(safe_gpu.ClaimTimeout, "hosta: ", call=lambda: claim(both, 6, timeout=0.5))
            assert (late.host, late.timeout) == ("hosta", 0.5)
            wait(lambda: len(safe_gpu.get_free_gpus()) == 5, "what the failed claims held")
            with claim(nodes=1, gpus_per_node=6, timeout=0) as held:  # any node: the one that can
                assert held.hosts == ("hostb",)
            more()
        finally:
            open(stop, "w").close()
    assert other.returncode == 0
    with claim(both, 8, timeout=60):
        assert safe_gpu.get_free_gpus() == []


def lose_holder(held: Any, use: Callable[[], object]) -> None:
    """The holder of hosta dies while a worker holds its first GPU: the others are free, and ``use`` of one fails."""
    working, idle = held.gpus[:2]
    wait(lambda: os.path.exists(f"{GO_ON}.started"), "training")
    os.kill(holder_of(idle.uuid), signal.SIGKILL)
    wait(lambda: len(safe_gpu.get_free_gpus()) == 7, "GPUs of the dead holder")
    assert str(working.index) not in safe_gpu.get_free_gpus()
    lost = raises(safe_gpu.SafeGpuError, "hosta: ", "has exited", call=held.check)
    assert lost.host == "hosta"
    raises(type(lost), "hosta: ", call=use)


def lose_worker(working: Any) -> None:
    """The worker that holds this GPU of hosta dies: the GPU is free."""
    os.kill(holder_of(working.uuid, inside=True), signal.SIGKILL)
    wait(lambda: len(safe_gpu.get_free_gpus()) == 8, "the dead worker's GPU")
    os.unlink(f"{MARKS}/hosta:{working.uuid}")  # its mark died with it


def driver(claim: Callable[..., Any], end: str) -> None:
    """A claim that nobody releases: the driver is killed, or simply ends."""
    _held = claim(nodes=2, gpus_per_node=8)
    open(f"{MARKS}/driver", "w").close()
    wait(lambda: os.path.exists(f"{MARKS}/end-driver"), "the end", 100)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def race(claim: Callable[..., Any], me: int, rounds: int) -> None:
    """Two drivers claim the same GPUs on two hosts, from opposite ends, over and over.

    Of claims that may not wait exactly one wins, of claims that may, which take turns with them, both do.
    """
    hosts = ["hosta", "hostb"] if me == 0 else ["hostb", "hosta"]
    wins = 0
    for number in range(rounds):
        patient = number % 2 == 1
        meet(f"start-{number}", me)
        refusal = None
        try:
            held = claim(nodes=hosts, gpus_per_node=8, timeout=100 if patient else 0)
        except safe_gpu.NotEnoughGpusError as err:
            refusal = err
        if refusal is not None:
            assert not patient, refusal
            assert refusal.host in hosts
            assert refusal.verdicts
            meet(f"end-{number}", me)
            continue
        wins += 1
        assert [gpu.host for gpu in held.gpus] == [hosts[0]] * 8 + [hosts[1]] * 8
        with ExitStack() as marks:
            for gpu in held.gpus:
                marks.enter_context(using(gpu.uuid, host=gpu.host))
            if not patient:
                meet(f"end-{number}", me)  # held until the other one has failed
        held.release()
        if patient:
            meet(f"end-{number}", me)
    print(f"driver {me} won {wins} of {rounds}", flush=True)


def neighbour(stop: str, nb_gpus: str, hold: str = "") -> None:
    """Another user of the host: claims, uses and gives back GPUs until a file says stop, or holds some until then."""
    rounds = 0
    while not os.path.exists(stop):
        try:
            owner = safe_gpu.GPUOwner(int(nb_gpus), timeout=60 if hold else 1, affinity=None)
        except safe_gpu.NotEnoughGpusError:
            continue
        with owner, using(*(gpu.uuid for gpu in owner.gpus)):
            if hold:
                print("holding", owner.devices_taken, flush=True)
                wait(lambda: os.path.exists(stop), "the end", 300)
                return
            time.sleep(0.02)
        rounds += 1
        print("round", rounds, flush=True)
        time.sleep(0.02)


def mpi_rank(directory: str) -> None:
    """One MPI rank, started under ``safe-gpu bind``: claims its GPU, meets the others, and writes what it has."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with safe_gpu.GPUOwner(1, timeout=10, affinity=None) as owner, using(owner.gpus[0].uuid):
        found = {
            "ranks": world.allreduce(1),  # all ranks hold their GPU at this point
            "place": (socket.gethostname(), os.environ["CUDA_VISIBLE_DEVICES"], owner.gpus[0].uuid),
            "expect": os.environ.get("SAFE_GPU_EXPECT"),
        }
        put(Path(directory, f"rank{world.rank}"), json.dumps(found).encode())
        world.Barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
