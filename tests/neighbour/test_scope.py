"""A stolen scope: the claims of another user are not entered, whatever was read in entries and written into others."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.ground import simulated_doors

import safe_gpu
from safe_gpu.coordination.doors import digest
from safe_gpu.host import procfs

VICTIM, THIEF = 4711, 4712

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


@pytest.fixture
def victim(state_dir: Path, as_user: Any) -> Callable[[int], str]:
    """``victim(2)``: another user holds that many GPUs and lets its children claim; its token."""

    def start(nb_gpus: int) -> str:
        def hold(say: Callable[[str], None], listen: Callable[[], str]) -> None:
            with claim(nb_gpus, delegate=True):
                say(os.environ["SAFE_GPU_SCOPE"])
                listen()

        return str(as_user(hold, uid=VICTIM).hear())

    return start


@pytest.fixture
def attempt(as_user: Any) -> Callable[..., str]:
    """``attempt(THIEF, token)``: which GPU a process of that user gets with that value of SAFE_GPU_SCOPE, or why
    not."""

    def start(uid: int, token: str, **options: Any) -> str:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            os.environ["SAFE_GPU_SCOPE"] = token
            try:
                say(claim(1, **options).devices_taken)
            except safe_gpu.UnsatisfiableRequestError as err:
                say(err)
            except safe_gpu.NotEnoughGpusError:
                say("refused")

        return str(as_user(work, uid=uid).hear())

    return start


def test_what_entries_and_doors_tell_opens_nothing(state_dir: Path, victim: Any, attempt: Any) -> None:
    token = victim(8)
    (entry,) = (state_dir / "claims").iterdir()
    read = json.loads(entry.read_text())["token"]
    assert token not in entry.read_text() + Path("/proc/net/unix").read_text()
    for uid in (VICTIM, THIEF):
        assert attempt(uid, read) == "refused"


def test_a_token_that_leaked_opens_nothing_to_other_users(victim: Any, attempt: Any) -> None:
    token = victim(8)
    for other in (THIEF, 0):
        assert attempt(other, token) == "refused"
    assert attempt(VICTIM, token) == "[0]"


def test_a_forged_entry_does_not_lure_anybody_into_a_claim(entry_of: Any, attempt: Any, ground: Any) -> None:
    """A neighbour says the victim's hash, and its uid, in a claim of the neighbour's own, and holds the doors of its
    token."""
    token, gpu = "0123456789abcdef", ground.uuids[3]
    entry_of(THIEF, {"gpus": {gpu: None}, "parts": {gpu: 0}, "token": digest(token), "uid": VICTIM})
    doors = simulated_doors()
    try:
        assert doors.take_whole(gpu, (), token)
        assert attempt(VICTIM, token) == "[2]", "outside, beside GPU 3, which somebody else has"
    finally:
        doors.release()


@pytest.mark.parametrize("number", [1, 999])
def test_a_forged_entry_adds_no_gpu_to_a_claim(
    victim: Any, entry_of: Any, attempt: Any, ground: Any, number: int
) -> None:
    """The hash is public. Of two claims that say it the victim's own counts, whichever has the lower number."""
    token, gpu = victim(1), ground.uuids[5]
    entry_of(THIEF, {"gpus": {gpu: None}, "parts": {gpu: 0}, "token": digest(token), "uid": VICTIM}, number=number)
    doors = simulated_doors()
    try:
        assert doors.take_whole(gpu, (), token)
        assert attempt(VICTIM, token) == "[0]"
        assert "which can give 0 of its 1" in attempt(VICTIM, token, only=5)
    finally:
        doors.release()


def test_another_claim_of_the_same_user_is_not_inside(victim: Any, attempt: Any) -> None:
    token, _other = victim(1), victim(1)
    assert attempt(VICTIM, token, only="0,1") == "[0]"
    assert "which can give 0 of its 1" in attempt(VICTIM, token, only=1)


def test_a_user_whom_the_namespace_does_not_know_is_in_no_claim(
    victim: Any, attempt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All whom it does not know have one user id there."""
    token = victim(8)
    monkeypatch.setattr(procfs, "is_unknown_user", lambda uid: uid == VICTIM)
    assert attempt(VICTIM, token) == "refused"
