"""What a neighbour writes into the record of a share: it overbooks no GPU, and charges no limit."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.leases.file_names import slot_name
from safe_gpu.selection.sharing import share_capacity
from safe_gpu.status.gather import gather
from safe_gpu.status.render import render

VICTIM, OTHER, NEIGHBOUR = 4711, 4712, 4713
GIB = 1 << 30

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


@pytest.fixture
def share(state_dir: Path, as_user: Any) -> Callable[..., str]:
    """``share(VICTIM, "20GiB")``: a process of that user that holds such a share of GPU 0; what became of it."""

    def start(uid: int, size: str, *, only: int = 0) -> str:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, only=only, share=size)
            say(owner.devices_taken)
            listen()

        said: str = as_user(work, uid=uid).hear()
        return said

    return start


@pytest.fixture
def forge(state_dir: Path, ground: Any, as_user: Any) -> Callable[[int], None]:
    """``forge(SHARE)`` writes that share into the record of the first slot of GPU 0, as anybody may."""

    def write(share: int) -> None:
        path = state_dir / "leases" / slot_name(ground.uuids[0], 0)

        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            path.write_text(json.dumps({**json.loads(path.read_text()), "share": share}) + "\n")
            say("written")

        assert as_user(work, uid=NEIGHBOUR).hear() == "written"

    return write


def test_a_smaller_share_in_a_record_overbooks_no_gpu(share: Any, forge: Any) -> None:
    assert share(VICTIM, "60GiB") == "[0]"
    forge(GIB)
    assert "NotEnoughGpusError" in share(OTHER, "40GiB")
    forge(60 * GIB)
    assert share(OTHER, "10GiB") == "[0]"


@pytest.fixture
def limited(rules: Any) -> None:
    """Everybody may hold one GPU."""
    rules("[default]\nmax_gpus = 1")


@pytest.mark.parametrize(("forged", "name"), [(1 << 50, False), (78 * GIB, False), (78 * GIB, True)])
def test_a_larger_share_in_a_record_charges_no_limit(
    limited: None, state_dir: Path, ground: Any, as_user: Any, share: Any, forge: Any, forged: int, name: bool
) -> None:
    """Also where the neighbour binds the name that goes with it."""
    assert share(VICTIM, "40GiB") == "[0]"
    forge(forged)

    def bind(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        place, prefix = (state_dir / "leases").stat(), names.simulated_prefix(str(state_dir / "simulated"))
        kept = names.take_name(names.amount_of(names.slot_of(ground.uuids[0], 0, prefix), forged, place))
        say(kept is not None)
        listen()

    if name:
        assert as_user(bind, uid=NEIGHBOUR).hear() == "True"
    assert share(VICTIM, "60GiB", only=1) == "[1]"


def test_a_share_counts_as_what_it_is(limited: None, share: Any) -> None:
    assert share(VICTIM, "40GiB") == "[0]"
    assert "you hold 0.5 of your 1 GPU" in share(VICTIM, "60GiB", only=1)
    assert share(VICTIM, "30GiB", only=1) == "[1]"


def test_status_says_what_is_hearsay(state_dir: Path, ground: Any, share: Any, forge: Any) -> None:
    assert share(VICTIM, "40GiB") == "[0]"
    assert share(OTHER, "10GiB") == "[0]"
    before = gather().gpus[0]
    assert [(one.share, one.note) for one in before.shares] == [(40 * GIB, ""), (10 * GIB, "")]
    forge(1 << 50)
    status = gather()
    first, second = status.gpus[0].shares
    assert (first.user, first.note) == ("4711", "its share is only what its record says")
    assert (first.share, second.share, second.note) == (share_capacity(status.gpus[0].gpu), 10 * GIB, "")
    assert "its share is only what its record says" in render(status, width=200, color=False)
