"""A claim looks once more after its entry has its name, and withdraws from what others have taken or closed by then."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim, try_claim

from safe_gpu.claim.claim import Claim
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry
from safe_gpu.errors import NotEnoughGpusError
from safe_gpu.host.held import Held

DRAINED = "{} - - - a fan is broken\n"


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Claim], None]], None]:
    """Call a function with each claim between its entry and its second look."""

    def install(act: Callable[[Claim], None]) -> None:
        take = Claim.take

        def take_and_act(taken: Claim, *args: Any, **options: Any) -> None:
            take(taken, *args, **options)
            act(taken)

        monkeypatch.setattr(Claim, "take", take_and_act)

    return install


def drain(directory: Path, uuids: list[str]) -> None:
    (directory / "closed").write_text("".join(map(DRAINED.format, uuids)))


def test_of_a_gpu_that_is_drained_meanwhile(host: Any, ground: Any, meanwhile: Any) -> None:
    meanwhile(lambda _: drain(ground.directory, host.uuids[:2]))
    assert try_claim(2) == (2, 3)


def test_of_all_gpus_that_are_drained_meanwhile(host: Any, ground: Any, meanwhile: Any, untouched: Any) -> None:
    meanwhile(lambda _: drain(ground.directory, host.uuids))
    with untouched(), pytest.raises(NotEnoughGpusError, match="a fan is broken"), claim(1):
        pass


def test_of_a_gpu_that_another_process_claims_meanwhile(
    host: Any, ground: Any, meanwhile: Any, cleanup: ExitStack
) -> None:
    """As if somebody had removed host.lock: both see each other."""
    held: list[Held] = []

    def claim_too(_: Claim) -> None:
        if not held:
            directory = cleanup.enter_context(Directory(str(ground.directory), "claims"))
            held.append(make_entry(directory, 99, {"gpus": {host.uuids[0]: None}}, by_children=False)[1])

    meanwhile(claim_too)
    assert try_claim(1) == (1,)
    held[0].release()
    assert try_claim(1) == (0,)
