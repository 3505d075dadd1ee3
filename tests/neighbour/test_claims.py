"""What a neighbour says in entries, knows of tokens and binds opens no claim, overbooks no GPU, uses no limit up and
blames nobody: whose an entry is says the owner of the file."""

import ctypes
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.state import simulated_doors

import safe_gpu

VICTIM, OTHER, THIEF = 4711, 4712, 4713
GIB = 1 << 30
REFUSED = "NotEnoughGpusError: "

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


# A stolen scope


@pytest.fixture
def victim(claim_as: Any) -> Callable[[int], str]:
    """``victim(2)``: another user holds that many GPUs and lets its children claim; its token."""
    return lambda nb_gpus: str(claim_as(VICTIM, nb_gpus, delegate=True, says="SAFE_GPU_SCOPE").hear())


@pytest.fixture
def attempt(claim_as: Any) -> Callable[..., str]:
    """``attempt(THIEF, token)``: which GPU that user gets with that value of SAFE_GPU_SCOPE, or why not."""
    return lambda uid, token, **options: str(claim_as(uid, scope=token, **options).hear())


def test_what_entries_and_doors_tell_opens_nothing_nor_a_token_that_leaked_to_others(
    state_dir: Path, victim: Any, attempt: Any
) -> None:
    token = victim(8)
    (entry,) = (state_dir / "claims").iterdir()
    read = json.loads(entry.read_text())["token"]
    assert token not in entry.read_text() + Path("/proc/net/unix").read_text()
    for uid, known in ((VICTIM, read), (THIEF, read), (THIEF, token), (0, token)):
        assert attempt(uid, known).startswith(REFUSED)
    assert attempt(VICTIM, token) == "[0]"


@contextmanager
def forged(entry_of: Any, gpu: str, token: str, number: int = 1) -> Iterator[None]:
    """A neighbour says the victim's hash, and its uid, in a claim of its own, and holds the doors of the token."""
    entry_of(THIEF, {"gpus": {gpu: None}, "parts": {gpu: 0}, "token": api.digest(token), "uid": VICTIM}, number=number)
    doors = simulated_doors()
    assert doors.take_whole(gpu, (), token)
    yield
    doors.release()


def test_a_forged_entry_does_not_lure_anybody_into_a_claim(entry_of: Any, attempt: Any, dgx: Any) -> None:
    token = "0123456789abcdef"
    with forged(entry_of, dgx.uuids[3], token):
        assert attempt(VICTIM, token) == "[2]", "outside, beside GPU 3, which somebody else has"


@pytest.mark.parametrize("number", [1, 999])
def test_a_forged_entry_adds_no_gpu_to_a_claim(victim, entry_of, attempt, dgx, number: int) -> None:
    """The hash is public. Of two claims that say it the victim's own counts, whichever has the lower number."""
    token = victim(1)
    with forged(entry_of, dgx.uuids[5], token, number):
        assert attempt(VICTIM, token) == "[0]"
        assert "which can give 0 of its 1" in attempt(VICTIM, token, only=5)


def test_another_claim_of_the_same_user_is_not_inside(victim: Any, attempt: Any) -> None:
    token, _other = victim(1), victim(1)
    assert attempt(VICTIM, token, only="0,1") == "[0]"
    assert "which can give 0 of its 1" in attempt(VICTIM, token, only=1)


def test_a_user_whom_the_namespace_does_not_know_is_in_no_claim(victim, attempt, monkeypatch) -> None:
    """All whom it does not know have one user id there."""
    token = victim(8)
    monkeypatch.setattr(api.procfs, "is_unknown_user", lambda uid: uid == VICTIM)
    assert attempt(VICTIM, token).startswith(REFUSED)


# Shares


@pytest.mark.parametrize(
    ("said", "room"), [(-60 * GIB, 0), ("x", 0), (GIB, 19), (60 * GIB, 0), (1 << 60, 0), (1 << 61, 0), (None, 0)]
)
def test_what_a_neighbour_says_of_its_share_overbooks_no_gpu_and_charges_no_limit(
    rules: Any, claim_as: Any, entry_of: Any, dgx: Any, said: object, room: int
) -> None:
    """It takes of the room that is left at most; what is no share is all of it."""
    rules("[default]\nmax_gpus = 1")
    assert claim_as(VICTIM, share="60GiB", only=0).hear() == "[0]"
    entry_of(THIEF, {"gpus": {dgx.uuids[0]: said}, "parts": {dgx.uuids[0]: 0}, "uid": VICTIM, "pid": 1})
    assert "NotEnoughGpusError" in claim_as(OTHER, share=f"{room + 1}GiB", only=0).hear()
    if room:
        assert claim_as(OTHER, share=f"{room}GiB", only=0).hear() == "[0]"
    assert "you hold 0.75 of your 1 GPU" in claim_as(VICTIM, share="30GiB", only=1).hear()
    assert claim_as(VICTIM, share="20GiB", only=1).hear() == "[1]"


def test_who_says_display_is_at_its_limit_as_anybody(rules: Any, claim_as: Any, entry_of: Any, dgx: Any) -> None:
    """On a host whose GPUs nobody shares by their display."""
    rules("[default]\nmax_gpus = 1")
    entry_of(VICTIM, {"gpus": {dgx.uuids[0]: None}, "display": True})
    assert "you hold 1 of your 1 GPU" in claim_as(VICTIM, only=1).hear()
    assert claim_as(OTHER, only=1).hear() == "[1]"


def test_a_share_that_rounds_to_nothing_is_at_the_limit_of_its_user(rules: Any, claim_as: Any, entry_of, dgx) -> None:
    """Its ticket stands first, and is passed."""
    rules(f"[default]\nmax_gpus = 2\n[user {THIEF}]\nmax_gpus = 0")
    process = {"pid": os.getpid(), "start": api.procfs.start_time(os.getpid()), "pidns": api.procfs.pid_namespace()}
    entry_of(THIEF, {"nb_gpus": 1, "gpus": [*dgx.uuids], "share": 1, **process}, part="queue")
    assert claim_as(VICTIM, 2, timeout=20).hear() == "[0, 1]"


@pytest.mark.parametrize("wanted", [{}, {"share": "30GiB"}])
def test_a_neighbour_does_not_vouch_for_a_part_of_another_state_directory(
    state_dir: Path, claim_as: Any, entry_of: Any, dgx: Any, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str]
) -> None:
    """Of two claims of a neighbour one is inside the other, so it takes no room, and says that it has that part."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(state_dir / "simulated"))
    other = {"SAFE_GPU_DIR": str(state_dir.parent / "other")}
    assert claim_as(VICTIM, share="60GiB", before=lambda: os.environ.update(other)).hear() == "[0]"
    entry_of(THIEF, {"gpus": {}, "token": "t"})
    entry_of(THIEF, {"gpus": {dgx.uuids[0]: None}, "inside": "t", "parts": {dgx.uuids[0]: 0}})
    with claim(1, **wanted) as owner:
        assert owner.devices_taken == [1]


@pytest.mark.parametrize("wanted", [{}, {"share": "1GiB"}], ids=["whole", "share"])
@pytest.mark.parametrize("part", [None, 0, 31])
def test_a_gpu_behind_a_door_of_nobody_here_is_taken_elsewhere(
    state_dir: Path, as_user: Any, dgx: Any, wanted: dict[str, str], part: int | None
) -> None:
    """A neighbour may hold a GPU so, as another state directory does. Claims take others, and name no user of it."""

    def bind(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        doors, uuid = simulated_doors(), dgx.uuids[0]
        say(doors.take_whole(uuid, ()) if part is None else doors.take_share(uuid, {*range(part)}))
        listen()

    assert as_user(bind, uid=THIEF).hear() == "True"
    with claim(1, only="0,1", **wanted) as owner:
        assert owner.devices_taken == [1]
    one = api.gather().gpus[0]
    assert (one.state, one.claim and (one.claim.pid, one.claim.user)) == ("claimed", (None, None))


# Limits


def granted(one: Any) -> int:
    """How many GPUs that process got."""
    return len(json.loads(one.hear()))


@pytest.fixture
def limit(rules: Any, state_dir: Path) -> None:
    """Everybody may hold two GPUs."""
    rules("[default]\nmax_gpus = 2")


def test_what_an_entry_says_of_users_is_never_believed(limit: None, claim_as: Any, entry_of: Any, as_user: Any) -> None:
    """The victim's uid, its name, and a process of hers, in the claims and the tickets of somebody else."""
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    said = {"uid": VICTIM, "user": str(VICTIM), "pid": victim.pid, "start": api.procfs.start_time(victim.pid)}
    entry_of(OTHER, {"gpus": {"GPU-a": None, "GPU-b": None}, **said})
    entry_of(OTHER, {"gpus": ["GPU-a"], "nb_gpus": 1, **said}, part="queue")
    assert granted(claim_as(VICTIM, 2)) == 2
    assert "you hold 2 of your 2 GPUs" in claim_as(OTHER).hear()


def test_a_claim_counts_for_the_effective_user(limit: None, claim_as: Any) -> None:
    """Of a program that keeps another real user, and for who claimed, whoever the process becomes after that."""
    assert granted(claim_as(OTHER, start_as=0, before=lambda: os.setresuid(VICTIM, OTHER, OTHER))) == 1
    assert (
        granted(claim_as(OTHER, start_as=0, before=lambda: os.seteuid(OTHER), after=lambda: os.setresuid(0, 0, 0))) == 1
    )
    assert "you hold 2 of your 2 GPUs" in claim_as(OTHER).hear()
    assert granted(claim_as(VICTIM, 2)) == 2


def test_users_whom_this_namespace_does_not_know_share_no_limit(limit: None, claim_as, dgx, monkeypatch) -> None:
    """They all look like one user, who is nobody."""
    dgx.hold(0, 1, uid=OTHER)
    monkeypatch.setattr(api.procfs, "is_unknown_user", lambda uid: uid == OTHER)
    assert granted(claim_as(OTHER, 2)) == 2


# Who is blamed


@pytest.fixture
def seen(as_user: Any) -> Callable[[int], list[Any]]:
    """``seen(UID)``: pid, user, uid and job of the claim of GPU 0, as ``status`` shows them to that user, and what a
    claim that is refused says."""

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        one = api.gather().gpus[0].claim
        with pytest.raises(safe_gpu.NotEnoughGpusError) as refused:
            claim(only=0)
        say(json.dumps([one.pid, one.user, one.uid, one.job, str(refused.value)]))

    return lambda uid: json.loads(as_user(work, uid=uid).hear())


@pytest.mark.parametrize("start", ["right", "of another process", "none"])
def test_an_entry_that_names_a_living_process_of_somebody_else(state_dir, as_user, dgx, seen, start: str) -> None:
    """Its number is that of an innocent process now, whether its start fits or not."""
    victim = as_user(lambda say, listen: listen(), uid=VICTIM)
    began = api.procfs.start_time(victim.pid) or 0
    when = {"right": began, "of another process": began + 1, "none": None}[start]
    said = {"user": "4711", "job": "sge:1", **({} if when is None else {"start": when})}
    dgx.hold(0, uid=THIEF, pid=victim.pid, **said)
    pid, user, uid, job, refusal = seen(OTHER)
    assert (pid, user, uid, job) == (None, "4713", THIEF, "sge:1")
    assert "4713" in refusal
    assert f"process {victim.pid} (" not in refusal
    assert not re.search(r"\b4711\b", refusal)


def test_a_child_that_outlives_its_parent(state_dir: Path, rules: Any, claim_as: Any, as_user: Any, seen: Any) -> None:
    """It is told of, and counts for its user's limit, by the entry that it keeps. Nobody has to see into it."""

    def leave(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim(8)
        if os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        say(os.getpid())
        listen()

    gone = as_user(leave, uid=THIEF)
    orphan = int(gone.hear())
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    try:
        for uid, pid in ((OTHER, None), (THIEF, orphan), (0, orphan)):
            with next((state_dir / "claims").iterdir()).open():  # who only has it open does not hold it
                *told, _, refusal = seen(uid)
            assert told == [pid, "4713", THIEF]
            holder = f"process {orphan}, which" if pid else "a process that"
            assert f"{holder} process {gone.pid} left behind (4713" in refusal
        rules("[default]\nmax_gpus = 8")
        assert "you hold 8 of your 8 GPUs" in claim_as(THIEF).hear()
    finally:
        gone.tell()


def test_who_is_unknown_to_a_user_namespace_is_nobody(state_dir: Path, claim_as: Any, as_user: Any) -> None:
    """All whom it does not know look like one user, who is not this one."""
    assert claim_as(VICTIM, 8).hear() == str([*range(8)])

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> Any:
        if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
            return say("null")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {OTHER} 1")
        api.procfs.is_unknown_user.cache_clear()
        one = api.gather().gpus[0].claim
        assert one is not None
        return say(json.dumps([[entry.uid for entry in api.living_claims()], one.user, one.uid]))

    answer = as_user(look, uid=OTHER).hear()
    if answer == "null":
        pytest.skip("no user namespaces here")
    assert json.loads(answer) in ([[-1], None, None], [[-1], None, -1])
