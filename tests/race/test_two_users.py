"""Two users with different umasks claim in one state directory, which either of them may have made."""

import os
from collections.abc import Iterator

import pytest
from support.actor import GONE
from support.stage import Stage, claims, import_everything, let_go

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


@pytest.fixture
def stage() -> Iterator[Stage]:
    import_everything()
    stage = Stage()
    yield stage
    stage.close()


@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077)], ids=["strict first", "open first"])
def test_they_share_a_state_directory(stage: Stage, umasks: tuple[int, int]) -> None:
    """One makes everything; the other one claims, waits, and outlives it."""
    stage.renew(first_use=True)
    mask, other_mask = umasks
    holder = stage.start("the holder", claims(6), umask=mask)
    holder.expect("holds")
    guest = stage.start("the guest", claims(2), other=True, umask=other_mask)
    guest.expect("holds")
    for other in (False, True):
        refused = stage.start("a third", claims(1), other=other, umask=mask)
        assert sorted(refused.expect("refused")[2]) == sorted([holder.pid] * 6 + [guest.pid] * 2)
        refused.end()
    waiter = stage.start("the waiter", claims(8, 60.0), other=True, umask=other_mask)
    stage.until_queued(waiter)
    holder.end()
    let_go(guest)
    waiter.expect("holds")
    for one in (guest, waiter):
        one.end()


def test_they_come_first_at_once(stage: Stage) -> None:
    """Neither finds the state directory, so both make it."""
    for number in range(5):
        stage.renew(first_use=True)
        umasks = [(0o077, 0o022)[(one + number) % 2] for one in range(12)]
        racers = [
            stage.start(f"racer {one}", claims(1), other=bool(one % 2), umask=umask) for one, umask in enumerate(umasks)
        ]
        said = [racer.expect("holds", "refused") for racer in racers]
        held = [uuid for word, uuids, *_ in said if word == "holds" for uuid in uuids]
        assert len(held) == len(set(held)) == 8
        for racer, (word, *_) in zip(racers, said, strict=True):
            if word == "holds":
                let_go(racer)
            assert racer.hear() == GONE
            racer.end()
        assert stage.flaws() == []
