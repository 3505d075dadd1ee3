"""Short claims that go first where they delay nobody: by a table in this process, and with real processes."""

import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.claims import try_claim

ALL = tuple(range(8))
HOUR = 3600.0


@dataclass
class Case:
    """A claim of ``nb_gpus`` for ``hold_for`` that does not wait, and the GPUs that it gets (None: refused)."""

    gets: tuple[int, ...] | None
    hold_for: float | None = 600
    nb_gpus: int = 1
    ahead: list[tuple[int, tuple[int, ...], float | None]] = field(default_factory=lambda: [(8, ALL, None)])
    """Tickets: how many of which GPUs, for how long."""
    due: dict[int, float] = field(default_factory=lambda: dict.fromkeys(ALL[1:], HOUR))
    """Claimed GPUs, and in how many seconds they are to be free."""
    unknown: tuple[int, ...] = ()
    """Claimed GPUs of which nobody knows."""
    only: tuple[int, ...] = ()


CASES = {
    "ends in time": Case((0,)),
    "ends too late": Case(None, hold_for=2 * HOUR),
    "does not say": Case(None, hold_for=None),
    "the large one's date is not known": Case(None, due=dict.fromkeys(ALL[1:7], HOUR), unknown=(7,)),
    "the date is known without that one": Case(
        (0,), ahead=[(7, ALL, None)], due=dict.fromkeys(ALL[1:7], HOUR), unknown=(7,)
    ),
    "a holder is overdue": Case(None, due={**dict.fromkeys(ALL[1:], -5.0)}),
    "one is overdue, the others are not": Case((0,), due={1: -5.0, **dict.fromkeys(ALL[2:], HOUR)}),
    "too few are free": Case(None, nb_gpus=2),
    "two": Case((0, 1), nb_gpus=2, due=dict.fromkeys(ALL[2:], HOUR)),
    "past two who cannot start either": Case((0,), ahead=[(8, ALL, None), (1, (0,), None)]),
    "past one of them only": Case(None, ahead=[(8, ALL, None), (1, (0,), 60)]),
    "the third, whose GPU is promised": Case(
        None, ahead=[(1, (1,), 60), (2, (0, 1, 2), 60)], due={1: 600, 2: HOUR}, only=(0,), hold_for=2 * HOUR
    ),
    "nobody wants that GPU": Case((0,), hold_for=None, ahead=[(1, (1,), None)], due={1: HOUR}, only=(0,)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_who_goes_first(case: Case, ground: Any, line: Any) -> None:
    now = time.time()
    for index, seconds in case.due.items():
        ground.hold(index, until=now + seconds)
    ground.hold(*case.unknown)
    for nb_gpus, gpus, hold_for in case.ahead:
        line(nb_gpus, gpus, hold_for=hold_for)
    assert try_claim(case.nb_gpus, only=case.only, hold_for=case.hold_for) == case.gets
    assert len(ground.tickets()) == len(case.ahead)


def test_a_stranger_s_gpu_has_no_date(ground: Any, line: Any, stranger: Any) -> None:
    stranger(1)
    for index in ALL[2:]:
        ground.hold(index, until=time.time() + HOUR)
    line(2, (0, 1, 2))
    assert try_claim(1, hold_for=60) == (0,)  # the waiter's date is that of GPU 2
    line(1, (1,))
    assert try_claim(1, hold_for=60) == (0,)


# Real processes

HOLD = """
import safe_gpu
owner = safe_gpu.claim_gpus({nb_gpus}, safe_gpu.NoPlaceholder(), affinity=None, hold_for={hold_for}, timeout=60)
say(*owner.devices_taken)
listen()
"""


def holds(child: Any, nb_gpus: int, hold_for: object) -> Any:
    return child(HOLD.format(nb_gpus=nb_gpus, hold_for=hold_for))


def large_waiter(command: Any) -> subprocess.Popen[str]:
    waiter = command.start("run", "-n", 8, "--", "sh", "-c", "echo started; cat", stdin=subprocess.PIPE)
    waiter.stderr.readline()
    return waiter  # type: ignore[no-any-return]


def test_a_sleeper_notices_that_it_may_pass(ground: Any, child: Any, command: Any) -> None:
    holder, brief = holds(child, 7, 3600), holds(child, 1, None)
    assert len(holder.hear().split()) + len(brief.hear().split()) == 8
    large = large_waiter(command)
    sleeper = child(
        "from safe_gpu.claim.search import wait_reports as news\nnews._EARLY_INTERVAL = 0.1\n"
        + HOLD.format(nb_gpus=1, hold_for=60)
    )
    while len(ground.tickets()) < 2:
        time.sleep(0.02)
    brief.tell()
    brief.finish()
    sleeper.hear()
    assert len(ground.tickets()) == 1
    holder.kill()
    sleeper.kill()
    assert large.stdout.readline() == "started\n"
    large.communicate(timeout=60)
