"""Limits of users count entries by their owners: no neighbour uses another one's limit up, whatever stands in files."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

from safe_gpu.host import procfs

ANNA, BEN = 4711, 4712

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


@pytest.fixture
def limit(rules: Any, state_dir: Path) -> None:
    """Everybody may hold two GPUs."""
    rules("[default]\nmax_gpus = 2")


@pytest.fixture
def user(as_user: Any) -> Callable[..., Any]:
    """``user(ANNA, 1)``: a process of hers that claims one GPU, says how that went, and holds it. ``before`` and
    ``after`` the claim these are called in it; ``start_as`` is its user before that."""

    def start(uid: int, nb_gpus: int = 1, *, start_as=None, before=bool, after=bool, **options: Any) -> Any:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            before()
            owner = claim(nb_gpus, **options)
            after()
            say(len(owner.gpus))
            listen()

        return as_user(work, uid=uid if start_as is None else start_as)

    return start


def test_what_an_entry_says_of_users_is_never_believed(limit: None, user: Any, entry_of: Any, as_user: Any) -> None:
    """The victim's uid, its name, and a process of hers, in the claims and the tickets of somebody else."""
    victim = as_user(lambda say, listen: listen(), uid=ANNA)
    said = {"uid": ANNA, "user": str(ANNA), "pid": victim.pid, "start": procfs.start_time(victim.pid)}
    entry_of(BEN, {"gpus": {"GPU-a": None, "GPU-b": None}, **said})
    entry_of(BEN, {"gpus": ["GPU-a"], "nb_gpus": 1, **said}, part="queue")
    assert user(ANNA, 2).hear() == "2"
    assert "you hold 2 of your 2 GPUs" in user(BEN).hear()


def test_a_child_of_a_process_that_has_ended_counts_for_its_user(limit: None, user: Any) -> None:
    """It keeps the entry. Nobody has to see into it."""

    def leave() -> None:
        if os.fork():
            os._exit(0)

    gone = user(ANNA, 2, after=leave)
    assert gone.hear() == "2"
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    try:
        assert "you hold 2 of your 2 GPUs" in user(ANNA).hear()
        assert user(BEN, 2).hear() == "2"
    finally:
        gone.tell()


def test_a_claim_counts_for_the_effective_user(limit: None, user: Any) -> None:
    """Of a program that keeps another real user, and for who claimed, whoever the process becomes after that."""
    assert user(BEN, start_as=0, before=lambda: os.setresuid(ANNA, BEN, BEN)).hear() == "1"
    assert user(BEN, start_as=0, before=lambda: os.seteuid(BEN), after=lambda: os.setresuid(0, 0, 0)).hear() == "1"
    assert "you hold 2 of your 2 GPUs" in user(BEN).hear()
    assert user(ANNA, 2).hear() == "2"


def test_users_whom_this_namespace_does_not_know_share_no_limit(
    limit: None, user: Any, ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They all look like one user, who is nobody."""
    ground.hold(0, 1, uid=BEN)
    monkeypatch.setattr(procfs, "is_unknown_user", lambda uid: uid == BEN)
    assert user(BEN, 2).hear() == "2"
