"""What the referee of the soak test concludes from what processes tell."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.actor import Actor
from support.real import long
from support.referee import Part, Referee, booked_twice
from support.stage import Stage, let_go

TOOLS = Path(__file__).parents[2] / "tools"
if not TOOLS.exists():
    pytest.skip("this is not a checkout: there is no tools/ here", allow_module_level=True)
sys.path.insert(0, str(TOOLS))

from soak_checks import Waiter, broken_promises  # noqa: E402
from soak_host import Policy, SoakHost, allowed, may_refuse  # noqa: E402

Moments = tuple[float, float, float]
NUMBERS = {"holder": 1, "large": 2, "second": 3, "small": 4}
WORDS = {1: 2.0, 2: 1.0, 3: 1.0, 4: 4.0}


def story(**moments: Moments) -> list[dict[str, Any]]:
    """Events of processes that begin, hold and release at these seconds; ``inf`` is never."""
    return [
        {"number": NUMBERS[name], "event": event, "at": at}
        for name, three in moments.items()
        for event, at in zip(("begins", "holds", "released"), three, strict=True)
        if at < math.inf
    ]


@pytest.mark.parametrize(
    ("holder", "large", "small", "to_blame"),
    [
        ((0, 0.1, 1.8), (0.2, 1.8, 1.9), (0.3, 1.9, 5.5), False),  # the small one came later
        ((0, 0.1, 1.8), (0.2, 3.9, 4.0), (0.3, 0.3, 3.9), True),  # it was let through, and the large one waited for it
        ((0, 0.1, 1.8), (0.2, 2.1, 2.2), (0.3, 0.3, 0.4), False),  # it was let through, and was gone early
        ((0, 0.1, 5.0), (0.2, 5.0, 5.1), (0.3, 0.3, 4.2), False),  # the holder overran by more
        ((0, 0.1, 1.8), (0.2, math.inf, math.inf), (0.3, 0.3, 3.9), True),  # the large one has given up
    ],
)
def test_who_is_to_blame_for_a_late_start(holder: Moments, large: Moments, small: Moments, to_blame: bool) -> None:
    told = story(holder=holder, large=large, second=(0.25, 6.0, 6.1), small=small)
    found = broken_promises([Waiter(2, 2.0)], WORDS, told)
    assert bool(found) == to_blame
    for violation in found:
        assert violation["let through"] == ["4, who said 4.0 s"]


def test_nobody_is_blamed_for_as_much_as_the_waiter_ahead_was_late() -> None:
    told = story(holder=(0, 0.1, 1.8), large=(0.2, 3.6, 3.7), second=(0.25, 4.6, 4.7), small=(0.5, 3.5, 4.6))
    waiters = [Waiter(2, 2.0), Waiter(3, 3.0)]
    assert [violation["number"] for violation in broken_promises(waiters, WORDS, told)] == [2]


def test_what_a_policy_may_refuse(tmp_path: Path) -> None:
    Policy(str(tmp_path)).set({7: 2}, {"max_hold": "1s"})
    for uid, nb_gpus, hold_for, expected in (
        (7, 3, None, True),
        (7, 2, None, False),
        (8, 3, None, False),
        (7, 2, 2.0, True),
        (7, 2, 1.0, False),
    ):
        assert may_refuse(str(tmp_path), uid, nb_gpus, hold_for) == expected


def test_every_policy_of_a_soak_can_be_read(tmp_path: Path) -> None:
    policy, rng = Policy(str(tmp_path)), random.Random(1)
    for _ in range(30):
        policy.change(rng, (7, 8))
        text = (tmp_path / "policy.ini").read_text()
        rules = api.config.parse(text, "policy.ini")
        for uid in (7, 8):
            number = api.config.resolve(rules, (str(uid),), lambda _: False, is_root=False).max_gpus
            assert allowed(str(tmp_path), uid) == (math.inf if number is None else number)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SoakHost:
    host = SoakHost(f"{tmp_path}/host", "dgx-a100")
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", host.tree)
    return host


def test_a_process_on_the_gpu_of_a_claim_is_a_violation(host: SoakHost) -> None:
    driver = api.SimulatedDriver("dgx-a100")
    gpu, other = (one.uuid for one in driver.idle.gpus[:2])
    with driver.occupy(gpu, pid=os.getppid()), driver.occupy(other, pid=os.getppid()):
        host.look_for_company([gpu])
    assert [(event["uuid"], event["rival"]) for event in host.referee.events()] == [(gpu, str(os.getppid()))]


def test_a_stranger_that_comes_while_the_referee_looks_is_none(host: SoakHost, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = api.SimulatedDriver("dgx-a100")
    driver.occupy(driver.idle.gpus[1].uuid).close()  # makes the tree
    gpu, contexts, listdir = driver.idle.gpus[0].uuid, [], os.listdir

    def then_a_stranger(path: str) -> list[str]:
        found = listdir(path)
        stranger = Path(host.path, "strangers", str(os.getppid()))
        if not stranger.exists():  # the driver lists that directory too
            stranger.touch()
            contexts.append(driver.occupy(gpu, pid=os.getppid()))
        return found

    monkeypatch.setattr(os, "listdir", then_a_stranger)
    host.look_for_company([gpu])
    assert contexts
    contexts.pop().close()
    assert host.referee.events() == []


WHOLE, HALF, INSIDE = Part(), Part(40), Part(inside=True)
PIECE, OTHER_PIECE, OTHER_MODE = Part(piece="a"), Part(piece="b"), Part(piece="b", mode="CPX")
SHARE_OF_PIECE, PIECE_INSIDE = Part(40, piece="a"), Part(piece="a", inside=True)


def test_who_may_have_a_gpu_together() -> None:
    for parts, wrong in (
        ([WHOLE, INSIDE], ""),
        ([HALF, HALF], ""),
        ([WHOLE, WHOLE], "booked twice"),
        ([WHOLE, INSIDE, INSIDE], "booked twice inside one claim"),
        ([HALF, WHOLE], "a share beside a whole claim"),
        ([HALF, HALF, HALF], "more promised than there is"),
        ([PIECE, OTHER_PIECE], ""),
        ([SHARE_OF_PIECE] * 3, ""),
        ([WHOLE, PIECE_INSIDE], ""),
        ([PIECE, PIECE], "a piece twice"),
        ([PIECE, SHARE_OF_PIECE], "a piece twice"),
        ([PIECE_INSIDE, PIECE_INSIDE], "booked twice inside one claim"),
        ([PIECE, OTHER_MODE], "pieces of two modes"),
        ([PIECE, HALF], "a piece beside all of the GPU, or a share of that"),
    ):
        assert booked_twice(parts, 80) == wrong


def test_a_mark_counts_as_long_as_its_process_lives(tmp_path: Path) -> None:
    referee = Referee(str(tmp_path), 80)
    holder = Actor(lambda line: (referee.begin("GPU-1"), line.send("has it"), line.recv()))
    assert holder.hear() == "has it"
    for end in (lambda: None, holder.end):
        end()
        referee.begin("GPU-1").end()
        assert [event["what"] for event in referee.events()] == ["booked twice"]
    assert referee.held() == []


def test_claims_on_a_stage_are_told_to_its_referee() -> None:
    stage = Stage()
    holder = stage.start("the holder", stage.claims(1))
    try:
        _, uuids, _ = holder.expect("holds")
        stage.referee.begin(uuids[0], inside=True).end()
        assert stage.referee.violations() == []
        stage.referee.begin(uuids[0]).end()
        (told,) = stage.referee.violations()
        assert told.startswith("booked twice: ")
        let_go(holder)
        assert stage.referee.held() == []
    finally:
        holder.end()
        stage.close()


@long
@pytest.mark.timeout(300)
def test_the_explorer_finds_nothing_in_the_unbroken_build() -> None:
    command = [sys.executable, str(TOOLS / "soak.py"), "--seed", "1", "--processes", "16", "--minutes", "0.1"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 violations" in ended.stdout
