"""Holders in other PID namespaces: their numbers mean nothing here, and nobody else is blamed for them."""

import json
import os
import shutil
from pathlib import Path

import pytest

from safe_gpu import NoPlaceholder, NotEnoughGpusError, claim_gpus
from safe_gpu.claim.view import pids_of_around
from safe_gpu.coordination.entry import Entry
from safe_gpu.gpus.devices import Gpu, Holder, HostSnapshot
from safe_gpu.host import procfs
from safe_gpu.selection.request import Selection
from safe_gpu.selection.verdicts import judge
from safe_gpu.status.gather import gather

OTHER = 4026539999
FIRST = procfs.FIRST_PID_NAMESPACE


@pytest.mark.parametrize(
    ("own", "other", "place"),
    [
        (FIRST, FIRST, ""),
        (FIRST, None, ""),
        (OTHER, OTHER, ""),
        (FIRST, OTHER, "in a container"),
        (OTHER, FIRST, "outside this container"),
        (OTHER, OTHER + 1, "in another container"),
    ],
)
def test_where_a_process_is(monkeypatch: pytest.MonkeyPatch, own: int, other: int | None, place: str) -> None:
    monkeypatch.setattr(procfs, "pid_namespace", lambda: own)
    assert procfs.namespace_text(other) == place


def test_an_unrelated_process_with_that_number_is_not_blamed(state_dir: Path, ground, as_user) -> None:
    """Who has the entry is found by root and its user; for others it cannot be seen."""
    ground.hold(0, pid=1, start=1, pidns=OTHER)

    def work(say, listen) -> None:
        one = gather().gpus[0]
        say(f"{one.claim.pid} {one.claim.user} {one.claim.note}")

    (claim,) = gather().gpus[0].claims
    assert (claim.pid, claim.uid) == (os.getpid(), os.geteuid())
    assert claim.note.endswith("container, as process 1 there")
    said = as_user(work, uid=12345).hear()
    assert said.startswith(f"None {claim.user} ")
    assert said.endswith("container, as process 1 there, which cannot be seen from here")


def test_a_claim_in_a_real_pid_namespace(ground, child) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare")
    code = "import ctypes, os, safe_gpu\nassert ctypes.CDLL(None).unshare(0x20000000) == 0\n"  # CLONE_NEWPID
    code += "if os.fork() == 0:\n    safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None)\n"
    code += "    say(os.getpid())\n    listen()\nelse:\n    os.wait()\n"
    parent = child(code)
    try:
        assert parent.hear() == "1", "pid 1 of its namespace"
        (holder,) = procfs.descendants(parent.pid)
        one = gather().gpus[0]
        assert one.claim is not None
        assert (one.claim.pid, one.claim.uid) == (holder, 0)
        assert one.claim.note.endswith("container, as process 1 there")
        assert "process 1 (" not in one.reason
    finally:
        parent.tell()


def test_the_processes_of_a_claim_around_this_one_elsewhere() -> None:
    said = {"v": 1, "gpus": {}, "pid": 7, "pidns": procfs.pid_namespace()}
    around = Entry.read("1.x", 0, (1, 1), json.dumps(said).encode())
    assert pids_of_around(around) == (7,)
    assert pids_of_around(around._replace(pidns=OTHER)) == tuple(procfs.ancestors(os.getpid()))


def test_what_a_refusal_says() -> None:
    gpu = Gpu(0, "GPU-0")
    held = {"GPU-0": Holder(7, "ada", command="train", namespace="in a container")}
    (verdict,) = judge(HostSnapshot((gpu,)), Selection(), claimed=held)
    assert verdict.reason == "claimed by process 7 in a container (ada, train)"
    assert verdict.pid is None


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_number_of_another_namespace_is_no_ancestor(ground, elsewhere: bool) -> None:
    said = {"pidns": OTHER} if elsewhere else {}
    ground.hold(*range(8), pid=os.getpid(), start=procfs.start_time(os.getpid()), **said)
    with pytest.raises(NotEnoughGpusError) as refused:
        claim_gpus(1, NoPlaceholder(), affinity=None, timeout=0.01)
    assert ("this process itself holds" in str(refused.value)) is not elsewhere
