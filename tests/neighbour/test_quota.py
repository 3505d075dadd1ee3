"""Limits of users count by the kernel's word: no neighbour uses another one's limit up, whatever names files get."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import name_table
from safe_gpu.coordination.files.state_dir import StateDir
from safe_gpu.coordination.holders.by_kernel import lease_owners
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.socket_names import simulated_prefix
from safe_gpu.host import procfs

ANNA, BEN = 4711, 4712

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


@pytest.fixture
def leases(rules: Any, state_dir: Path) -> Path:
    """Everybody may hold two GPUs."""
    rules("[default]\nmax_gpus = 2")
    return state_dir / "leases"


@pytest.fixture
def user(as_user: Any, next_tick: Callable[[], None]) -> Callable[..., Any]:
    """``user(ANNA, 1)``: a process of hers, started when no other was, that claims one GPU, says how that went, and
    holds it. ``before`` and ``after`` the claim these are called in it; ``start_as`` is its user before that."""

    def start(uid: int, nb_gpus: int = 1, *, start_as=None, before=bool, after=bool, **options: Any) -> Any:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            before()
            owner = safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, **options)
            after()
            say(len(owner.gpus))
            listen()

        next_tick()
        return as_user(work, uid=uid if start_as is None else start_as)

    return start


def owners(leases: Path, *indices: int) -> list[int | None]:
    """Whom these GPUs count for, and all others for nobody."""
    from safe_gpu.drivers.presets import preset

    uuids = [gpu.uuid for gpu in preset("dgx-a100").gpus()]
    with StateDir(str(leases.parent)) as root, StateDir("leases", root) as directory:
        found = lease_owners(directory, uuids, simulated_prefix(str(leases.parent / "simulated"))).users
    told = [found.get(lease_name(uuids[index])) for index in indices]
    assert len(found) == sum(uid is not None for uid in told)
    return told


def test_other_names_of_host_lock_and_of_a_lease(leases: Path, user: Any, ground: Any, as_user: Any) -> None:
    """Who looks at limits holds host.lock, and who has claimed one GPU has not claimed as many as there are names."""
    assert user(ANNA, only=0).hear() == "1"

    def link(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        for number in range(3):
            os.link(leases.parent / "host.lock", leases / f"host{number}.lock")
            os.link(leases / lease_name(ground.uuids[0]), leases / f"lease{number}.lock")
        os.link(leases.parent / "host.lock", leases / lease_name(ground.uuids[5]))
        os.link(leases / lease_name(ground.uuids[0]), leases / lease_name(ground.uuids[6]))
        say("linked")

    assert as_user(link, uid=BEN).hear() == "linked"
    assert user(ANNA, only="1-4").hear() == "1"
    assert user(BEN, 2, only="1-4").hear() == "2"


def test_a_directory_full_of_leases_is_not_listed(leases: Path, user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user(ANNA).hear() == "1"
    monkeypatch.setattr(StateDir, "names", lambda self: pytest.fail("listed"))
    assert owners(leases, 0, 1) == [ANNA, None]


def test_a_record_is_never_believed(leases: Path, user: Any, as_user: Any) -> None:
    """The uid of the victim, and a process of hers, in the record of a lease that somebody else holds."""
    victim = as_user(lambda say, listen: listen(), uid=ANNA)
    assert user(BEN, 2).hear() == "2"
    for path in leases.glob("*.lock"):
        said = {"uid": ANNA, "pid": victim.pid, "start": procfs.start_time(victim.pid)}
        path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    assert owners(leases, 0, 1) == [BEN, BEN]
    assert user(ANNA, 2).hear() == "2"


def test_a_pid_that_is_used_again(leases: Path, user: Any, as_user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/locks goes on showing the number of a process that has ended while its child holds the lock."""
    victim = as_user(lambda say, listen: listen(), uid=ANNA)
    holder = user(BEN)
    assert holder.hear() == "1"
    assert owners(leases, 0) == [BEN]
    genuine = procfs.flock_holders
    monkeypatch.setattr(
        procfs,
        "flock_holders",
        lambda *args, **more: procfs.LockTable((inode, [victim.pid]) for inode in genuine(*args, **more)),
    )
    assert owners(leases, 0) == [BEN], "by the name of the GPU"
    monkeypatch.setattr(name_table, "_NAME_AND_UID", 1)  # as on kernels before 5.3
    assert owners(leases, 0) == [None]


def test_a_child_of_a_process_that_has_ended_counts_for_its_user_alone(leases: Path, user: Any, as_user: Any) -> None:
    """It holds the leases, and no names. Others cannot see into it, and count it for nobody."""

    def leave() -> None:
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)

    gone = user(ANNA, 2, after=leave)
    assert gone.hear() == "2"
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    try:
        for uid, told in ((0, [None, None]), (BEN, [None, None]), (ANNA, [ANNA, ANNA])):
            look = as_user(lambda say, listen: say(owners(leases, 0, 1)), uid=uid)
            assert look.hear() == str(told)
        assert "you hold 2 of your 2 GPUs" in user(ANNA).hear()
        assert user(BEN, 2).hear() == "2"
    finally:
        gone.tell()


def test_a_claim_counts_for_who_started_the_program(leases: Path, user: Any) -> None:
    """As after ``safe-gpu run -- su``."""
    for _ in range(2):
        assert user(BEN, start_as=0, before=lambda: os.setresuid(ANNA, BEN, BEN)).hear() == "1"
    assert owners(leases, 0, 1) == [ANNA, ANNA]
    assert "you hold 2 of your 2 GPUs" in user(ANNA).hear()
    assert user(BEN, 2).hear() == "2"
