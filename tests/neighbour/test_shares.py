"""What a neighbour says of a share of its own: it overbooks no GPU, and charges no limit of others."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim
from support.ground import simulated_doors

from safe_gpu.status.gather import gather

VICTIM, OTHER, NEIGHBOUR = 4711, 4712, 4713
GIB = 1 << 30

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


@pytest.fixture
def share(state_dir: Path, as_user: Any) -> Callable[..., str]:
    """``share(VICTIM, "20GiB")``: a process of that user that holds such a share of GPU 0; what became of it."""

    def start(uid: int, size: str, *, only: int = 0) -> str:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            owner = claim(1, only=only, share=size)
            say(owner.devices_taken)
            listen()

        said: str = as_user(work, uid=uid).hear()
        return said

    return start


@pytest.mark.parametrize(
    ("said", "room"),
    [(-60 * GIB, 20), (0, 20), ("x", 20), (1e30, 20), (GIB, 19), (60 * GIB, 0), (1 << 60, 0), (1 << 61, 20), (None, 0)],
)
def test_what_a_neighbour_says_of_its_share_overbooks_no_gpu_and_charges_no_limit(
    rules: Any, share: Any, entry_of: Any, ground: Any, said: object, room: int
) -> None:
    """It takes of the room that is left at most; what is no share counts for nothing."""
    rules("[default]\nmax_gpus = 1")
    assert share(VICTIM, "60GiB") == "[0]"
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[0]: said}, "parts": {ground.uuids[0]: 0}, "uid": VICTIM, "pid": 1})
    assert "NotEnoughGpusError" in share(OTHER, f"{room + 1}GiB")
    if room:
        assert share(OTHER, f"{room}GiB") == "[0]"
    assert "you hold 0.75 of your 1 GPU" in share(VICTIM, "30GiB", only=1)
    assert share(VICTIM, "20GiB", only=1) == "[1]"


HOLD_A_SHARE = """
import safe_gpu
owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, share="60GiB")
say(*owner.devices_taken)
listen()
"""


@pytest.mark.parametrize("wanted", [{}, {"share": "30GiB"}])
def test_a_neighbour_does_not_vouch_for_a_part_of_another_state_directory(
    state_dir: Path, child: Any, entry_of: Any, ground: Any, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str]
) -> None:
    """Of two claims of a neighbour one is inside the other, so it takes no room, and says that it has that part."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(state_dir / "simulated"))
    holder = child(HOLD_A_SHARE, env={"SAFE_GPU_DIR": str(state_dir.parent / "other")})
    assert holder.hear() == "0"
    entry_of(NEIGHBOUR, {"gpus": {}, "token": "t"})
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[0]: None}, "inside": "t", "parts": {ground.uuids[0]: 0}})
    with claim(1, **wanted) as owner:
        assert owner.devices_taken == [1]


@pytest.mark.parametrize("wanted", [{}, {"share": "1GiB"}], ids=["whole", "share"])
@pytest.mark.parametrize("part", [None, 0, 31])
def test_a_gpu_behind_a_door_of_nobody_here_is_taken_elsewhere(
    state_dir: Path, as_user: Any, ground: Any, wanted: dict[str, str], part: int | None
) -> None:
    """A neighbour may hold a GPU so, as another state directory does. Claims take others, and name no user of it."""

    def bind(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        doors, uuid = simulated_doors(), ground.uuids[0]
        say(doors.take_whole(uuid, ()) if part is None else doors.take_share(uuid, {*range(part)}))
        listen()

    assert as_user(bind, uid=NEIGHBOUR).hear() == "True"
    with claim(1, only="0,1", **wanted) as owner:
        assert owner.devices_taken == [1]
    one = gather().gpus[0]
    assert (one.state, one.claim and (one.claim.pid, one.claim.user)) == ("claimed", (None, None))
