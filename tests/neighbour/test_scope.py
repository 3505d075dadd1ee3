"""A stolen scope: the claims of another user are not entered, whatever was read or written in its records."""

import ctypes
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.files.state_dir import StateDir
from safe_gpu.coordination.holders.by_kernel import leases_of_this_user, socket_of_this_user
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.leases.record import LeaseRecord
from safe_gpu.coordination.name_table import read_names
from safe_gpu.host import procfs

VICTIM, THIEF = 4711, 4712


def attempt(token: str, **options: Any) -> str:
    os.environ["SAFE_GPU_SCOPE"] = token
    try:
        return str(claim(1, **options).devices_taken)
    except safe_gpu.NotEnoughGpusError:
        return "refused"


@pytest.fixture
def victim(state_dir: Path, as_user: Any) -> Any:
    """Another user who holds all eight GPUs and lets its children claim; ``hear`` gives its token."""

    def hold(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        owner = claim(8, delegate=True)
        say(os.environ["SAFE_GPU_SCOPE"])
        listen()
        owner.release_gpus()

    return as_user(hold, uid=VICTIM)


def test_what_records_and_names_tell_opens_nothing(state_dir: Path, victim: Any, as_user: Any) -> None:
    token = victim.hear()
    read = json.loads(next((state_dir / "leases").glob("*.lock")).read_text())["token"]
    assert token not in "".join(file.read_text() for file in (state_dir / "leases").iterdir())
    assert token not in Path("/proc/net/unix").read_text()
    for uid in (VICTIM, THIEF):
        assert as_user(lambda say, listen: say(attempt(read)), uid=uid).hear() == "refused"


def test_a_token_that_leaked_opens_nothing_to_other_users(victim: Any, as_user: Any) -> None:
    token = victim.hear()
    for other in (THIEF, 0):
        assert as_user(lambda say, listen: say(attempt(token)), uid=other).hear() == "refused"
    assert as_user(lambda say, listen: say(attempt(token)), uid=VICTIM).hear() == "[0]"


@pytest.mark.parametrize("way", ["alive", "child"])
def test_a_forged_record_does_not_lure_anybody_into_a_claim(state_dir: Path, as_user: Any, ground, way: str) -> None:
    """A neighbour writes the victim's uid and hash into the record of a lease that the neighbour holds. In the second
    case the process that took the lock has ended, and a child of it holds the lock."""
    token = "0123456789abcdef"

    def lure(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        owner = claim(1, only=3)
        name = lease_name(owner.gpus[0].uuid)
        path = state_dir / "leases" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "uid": VICTIM, "token": names.digest(token)}))
        if way == "child" and os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        say(str(os.getpid()))
        listen()

    neighbour = as_user(lure, uid=THIEF)
    assert neighbour.hear()
    try:
        inside = as_user(lambda say, listen: say(attempt(token)), uid=VICTIM)
        assert inside.hear() == "[2]"  # outside, beside GPU 3, which somebody else has
    finally:
        neighbour.tell()


def test_a_name_of_another_user_does_not_add_a_gpu_to_a_claim(state_dir: Path, as_user: Any, ground: Any) -> None:
    """The hash is public, so a neighbour can bind ``UUID.HASH`` for a GPU that the victim does not hold."""

    def hold(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        claim(1, only=0, delegate=True)
        say(os.environ["SAFE_GPU_SCOPE"])
        listen()

    def bind(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        prefix = names.simulated_prefix(str(state_dir / "simulated"))
        say(str(names.take_name(names.scope_of(ground.uuids[5], token, prefix)) is not None))
        listen()

    victim = as_user(hold, uid=VICTIM)
    token = victim.hear()
    assert as_user(bind, uid=THIEF).hear() == "True"
    assert as_user(lambda say, listen: say(attempt(token)), uid=VICTIM).hear() == "[0]"
    other = as_user(lambda say, listen: say(attempt(token, only=5)), uid=VICTIM)
    assert "which can give 0 of its 1" in other.hear()


@pytest.mark.parametrize("own_pids", [False, True], ids=["", "in a PID namespace"])
def test_a_forged_record_adds_no_gpu_to_a_claim(state_dir: Path, as_user: Any, ground: Any, own_pids: bool) -> None:
    """The user has two jobs. Into the record of one, and of an honest user, a neighbour writes the hash of the other's
    token, and the user: they are not inside."""

    def hold(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        index = int(listen())
        with claim(1, only=index, delegate=True):
            say(os.environ["SAFE_GPU_SCOPE"])
            listen()

    jobs = [as_user(hold, uid=uid) for uid in (VICTIM, VICTIM, 4713)]
    tokens = []
    for index, job in enumerate(jobs):
        job.tell(str(index))
        tokens.append(job.hear())
    for uuid in ground.uuids[1:3]:
        path = state_dir / "leases" / lease_name(uuid)
        said = {**json.loads(path.read_text()), "uid": VICTIM, "token": names.digest(tokens[0])}
        path.write_text(json.dumps(said))

    def inside(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        os.environ["SAFE_GPU_SCOPE"] = tokens[0]
        try:
            say(claim(2).devices_taken)
        except safe_gpu.UnsatisfiableRequestError as err:
            say(err)

    answer = _in_a_pid_namespace(as_user, inside) if own_pids else as_user(inside, uid=VICTIM).hear()
    assert "claim_gpus(2) runs inside" in answer
    assert "which holds 1 GPU:" in answer


def _in_a_pid_namespace(as_user: Any, work: Callable[[Callable[[str], None], Callable[[], str]], None]) -> str:
    def enter(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x20000000 | 0x00020000):  # CLONE_NEWPID, CLONE_NEWNS
            say("no")
            return
        if child := os.fork():
            os.waitpid(child, 0)
            return
        libc.mount(b"none", b"/", None, 1 << 18 | 1 << 14, None)  # MS_PRIVATE, MS_REC
        libc.mount(b"proc", b"/proc", b"proc", 0, None)
        os.setresgid(VICTIM, VICTIM, VICTIM)
        os.setresuid(VICTIM, VICTIM, VICTIM)
        try:
            work(say, listen)
        finally:
            os._exit(0)

    answer = as_user(enter, uid=0).hear()
    if answer == "no":
        pytest.skip("needs root, to make namespaces")
    return str(answer)


def said(uid: int) -> LeaseRecord:
    return LeaseRecord.of_this_process(None, None)._replace(uid=uid)


def test_an_inherited_lock_is_still_ours(state_dir: Path) -> None:
    """The process that took it has ended, and a child of it lives on: no holder stands in /proc/locks."""
    with StateDir(str(state_dir)) as root, StateDir("leases", root) as leases:
        fd = leases.open_or_create("GPU-1.lock")
        other = leases.open_or_create("GPU-2.lock")
        if not (child := os.fork()):
            fcntl.flock(fd, fcntl.LOCK_EX)
            os._exit(0)
        os.waitpid(child, 0)
        assert leases_of_this_user(leases, {"GPU-1.lock": said(-1)}) == ({"GPU-1.lock"}, True)
        assert leases_of_this_user(leases, {"GPU-2.lock": said(-1)}) == (frozenset(), True)
        os.close(fd)
        os.close(other)


def _shows_locks_of_the_dead(directory: Path) -> bool:
    """Whether /proc/locks shows a lock whose owner has ended; in a PID namespace it does not."""
    with (directory / "probe").open("w") as file:
        if not (child := os.fork()):
            fcntl.flock(file, fcntl.LOCK_EX)
            os._exit(0)
        os.waitpid(child, 0)
        return bool(procfs.flock_holders({os.fstat(file.fileno()).st_ino}))


def test_an_open_file_is_not_a_held_lock(state_dir: Path, tmp_path: Path, as_user: Any) -> None:
    """What holds the lock is a neighbour's child, whose parent took it and has ended; this process only looks."""
    if not _shows_locks_of_the_dead(tmp_path):
        pytest.skip("in a PID namespace the kernel does not show locks of processes that have ended")

    def lock(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        fd = os.open(state_dir / "leases" / "GPU-1.lock", os.O_RDWR)
        if not os.fork():
            fcntl.flock(fd, fcntl.LOCK_EX)
            os._exit(0)
        os.wait()
        say("locked")
        listen()

    with StateDir(str(state_dir)) as root, StateDir("leases", root) as leases:
        fd = leases.open_or_create("GPU-1.lock")
        neighbour = as_user(lock, uid=THIEF)
        assert neighbour.hear() == "locked"
        assert leases_of_this_user(leases, {"GPU-1.lock": said(os.geteuid())}) == (frozenset(), True)
        os.close(fd)


def test_whose_socket_it_is(as_user: Any) -> None:
    unique = f"test-{os.getpid()}-{time.monotonic_ns()}"
    theirs, ours = names.name_of(f"{unique}.a"), names.name_of(f"{unique}.b")

    def bind(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        say(str(names.take_name(theirs) is not None))
        listen()

    neighbour = as_user(bind, uid=THIEF)
    assert neighbour.hear() == "True"
    own = names.take_name(ours)
    assert own is not None
    table = read_names()
    for name, expected in ((theirs, THIEF), (ours, os.geteuid())):
        one = table.get(name)
        assert one is not None
        assert one.uid == expected
        assert socket_of_this_user(one) is (expected == os.geteuid())
        unknown = one._replace(uid=None)  # as on kernels before 5.3: a process that has it is looked for
        assert socket_of_this_user(unknown) is (expected == os.geteuid())
    own.release()
