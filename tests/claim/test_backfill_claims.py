"""Short claims that go first where they delay nobody: by a table in this process, and with real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import NoPlaceholder, NotEnoughGpusError, claim_gpus
from safe_gpu.coordination.locks import HostLock
from safe_gpu.coordination.queue import TicketRequest, Waiter

ALL = tuple(range(8))
HOUR = 3600.0


@dataclass
class Case:
    """A claim of ``nb_gpus`` for ``hold_for`` that does not wait, and the GPUs that it gets; () is none."""

    gets: tuple[int, ...]
    hold_for: float | None = 600
    nb_gpus: int = 1
    ahead: list[tuple[int, tuple[int, ...], float | None]] = field(default_factory=lambda: [(8, ALL, None)])
    """Tickets: how many of which GPUs, for how long."""
    due: dict[int, float] = field(default_factory=lambda: dict.fromkeys(ALL[1:], HOUR))
    """Leased GPUs, and in how many seconds they are to be free."""
    unknown: tuple[int, ...] = ()
    """Leased GPUs of which nobody knows."""
    only: tuple[int, ...] = ()


CASES = {
    "ends in time": Case((0,)),
    "ends too late": Case((), hold_for=2 * HOUR),
    "does not say": Case((), hold_for=None),
    "the large one's date is not known": Case((), due=dict.fromkeys(ALL[1:7], HOUR), unknown=(7,)),
    "the date is known without that one": Case(
        (0,), ahead=[(7, ALL, None)], due=dict.fromkeys(ALL[1:7], HOUR), unknown=(7,)
    ),
    "a holder is overdue": Case((), due={**dict.fromkeys(ALL[1:], -5.0)}),
    "one is overdue, the others are not": Case((0,), due={1: -5.0, **dict.fromkeys(ALL[2:], HOUR)}),
    "too few are free": Case((), nb_gpus=2),
    "two": Case((0, 1), nb_gpus=2, due=dict.fromkeys(ALL[2:], HOUR)),
    "past two who cannot start either": Case((0,), ahead=[(8, ALL, None), (1, (0,), None)]),
    "past one of them only": Case((), ahead=[(8, ALL, None), (1, (0,), 60)]),
    "the third, whose GPU is promised": Case(
        (), ahead=[(1, (1,), 60), (2, (0, 1, 2), 60)], due={1: 600, 2: HOUR}, only=(0,), hold_for=2 * HOUR
    ),
    "nobody wants that GPU": Case((0,), hold_for=None, ahead=[(1, (1,), None)], due={1: HOUR}, only=(0,)),
}


@pytest.fixture
def line(ground: Any) -> Iterator[Callable[..., None]]:
    """Tickets, played in this process: ``line(2, [0, 1], 600)``."""
    waiters: list[Waiter] = []

    def join(nb_gpus: int, gpus: tuple[int, ...], hold_for: float | None, min_memory: int | None = None) -> None:
        demand = TicketRequest(nb_gpus, frozenset(ground.uuids[index] for index in gpus), min_memory, hold_for)
        waiters.append(Waiter(demand))
        with HostLock(time.monotonic() + 30) as host:
            waiters[-1].join(host)

    yield join
    for waiter in waiters:
        waiter.leave()
    safe_gpu.release_gpus()


def claim(nb_gpus: int, **options: Any) -> tuple[int, ...]:
    try:
        with claim_gpus(nb_gpus, NoPlaceholder(), affinity=None, timeout=0, **options) as owner:
            return tuple(owner.devices_taken)
    except NotEnoughGpusError:
        return ()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_who_goes_first(case: Case, ground: Any, line: Any) -> None:
    now = time.time()
    for index, seconds in case.due.items():
        ground.hold(index, until=now + seconds)
    ground.hold(*case.unknown)
    for nb_gpus, gpus, hold_for in case.ahead:
        line(nb_gpus, gpus, hold_for)
    assert claim(case.nb_gpus, only=case.only, hold_for=case.hold_for) == case.gets
    assert len(ground.tickets()) == len(case.ahead)


def test_nobody_passes_a_ticket_that_cannot_be_read(ground: Any, line: Any) -> None:
    for index in ALL[1:]:
        ground.hold(index, until=time.time() + HOUR)
    line(8, ALL, None)
    (name,) = ground.tickets()
    (ground.directory / "queue" / name).write_text("?")
    assert claim(1, hold_for=1) == ()


def rewritten(path: Path, *without: str) -> None:
    """Make a record or a ticket one of a client that does not know these keys."""
    line = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in line.items() if key not in without}) + "\n")


def test_clients_that_say_nothing_are_passed_by_their_holders_dates_only(ground: Any, line: Any) -> None:
    for index in ALL[1:]:
        ground.hold(index, until=time.time() + HOUR)
    line(8, ALL, 60)
    (name,) = ground.tickets()
    rewritten(ground.directory / "queue" / name, "hold_for", "pidns")
    assert claim(1, hold_for=600) == (0,)
    rewritten(ground.directory / "leases" / f"{ground.uuids[3]}.lock", "until", "pidns")
    assert claim(1, hold_for=600) == ()  # nobody knows when the large request can start


def test_a_gpu_that_is_too_full_for_a_waiter_is_not_kept_for_it(ground: Any, line: Any) -> None:
    ground.occupy(0, kind="graphics")
    ground.hold(1, until=time.time() + HOUR)
    line(1, (0, 1), None, 80 << 30)
    assert claim(1, only=(0,), hold_for=None) == (0,)
    assert claim(1, only=(1,), hold_for=None) == ()


def test_a_stranger_s_gpu_has_no_date(ground: Any, line: Any, child: Any) -> None:
    stranger = child(
        "from safe_gpu.drivers.simulated import SimulatedDriver\n"
        f"context = SimulatedDriver('dgx-a100').occupy({ground.uuids[1]!r})\nsay('there'); listen()"
    )
    assert stranger.hear() == "there"
    for index in ALL[2:]:
        ground.hold(index, until=time.time() + HOUR)
    line(2, (0, 1, 2), None)
    assert claim(1, hold_for=60) == (0,)  # the waiter's date is that of GPU 2
    line(1, (1,), None)
    assert claim(1, hold_for=60) == (0,)


# Real processes

HOLD = """
import safe_gpu
owner = safe_gpu.claim_gpus({nb_gpus}, safe_gpu.NoPlaceholder(), affinity=None, hold_for={hold_for}, timeout=60)
say(*owner.devices_taken)
listen()
"""


def holds(child: Any, nb_gpus: int, hold_for: object) -> Any:
    return child(HOLD.format(nb_gpus=nb_gpus, hold_for=hold_for))


def until(ground: Any, index: int) -> float:
    return float(json.loads((ground.directory / "leases" / f"{ground.uuids[index]}.lock").read_text())["until"])


def large_waiter(command: Any) -> subprocess.Popen[str]:
    waiter = command.start("run", "-n", 8, "--", "sh", "-c", "echo started; cat", stdin=subprocess.PIPE)
    waiter.stderr.readline()
    return waiter  # type: ignore[no-any-return]


def test_a_short_job_passes_a_large_waiter_which_starts_no_later(ground: Any, child: Any, command: Any) -> None:
    holder = holds(child, 7, 3600)
    assert len(holder.hear().split()) == 7
    large = large_waiter(command)
    passer = holds(child, 1, 600)
    index = int(passer.hear())
    date = max(until(ground, other) for other in ALL if other != index)
    assert until(ground, index) <= date
    assert command.run("run", "--timeout", 0, "--for", "2h", "--", "true").returncode == 75
    passer.tell()
    passer.finish()
    holder.tell()
    holder.finish()
    assert large.stdout.readline() == "started\n"
    large.communicate(timeout=60)


def test_an_overdue_holder_stops_the_passing(ground: Any, child: Any, command: Any) -> None:
    holder = holds(child, 7, 1)
    holder.hear()
    large = large_waiter(command)
    while time.time() <= until(ground, 0):
        time.sleep(0.05)
    refused = command.run("run", "--timeout", 0, "--for", 1, "--", "true")
    assert refused.returncode == 75
    assert "behind" in refused.stderr
    holder.kill()
    assert large.stdout.readline() == "started\n"
    large.communicate(timeout=60)


def test_a_passer_that_is_killed_leaves_nothing(ground: Any, child: Any, command: Any) -> None:
    holder = holds(child, 7, 3600)
    holder.hear()
    large = large_waiter(command)
    for _ in range(2):
        passer = holds(child, 1, 600)
        passer.hear()
        passer.process.send_signal(signal.SIGKILL)
        passer.process.wait(30)
    assert len(ground.tickets()) == 1
    holder.kill()
    assert large.stdout.readline() == "started\n"
    large.communicate(timeout=60)


def test_a_sleeper_notices_that_it_may_pass(ground: Any, child: Any, command: Any) -> None:
    holder, brief = holds(child, 7, 3600), holds(child, 1, None)
    assert len(holder.hear().split()) + len(brief.hear().split()) == 8
    large = large_waiter(command)
    sleeper = child(
        "from safe_gpu.claim import search as news\nnews._EARLY_INTERVAL = 0.1\n" + HOLD.format(nb_gpus=1, hold_for=60)
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
