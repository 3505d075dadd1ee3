"""Held and used: what looks see of claims, what they keep of it, what they tell the history, and what people see."""

import json
import math
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import api
from support.state import PlayedClaim

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
BEGAN = time.mktime((2026, 11, 16, 0, 0, 0, 0, 0, -1))
LOOKED = api.Use(looked=100.0, idle=25.0, absent=10.0, untold=20.0, used=40.0, memory=5 << 30)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to play other users")


def entry(pid: int, since: float, *gpus: str) -> api.Entry:
    said = {"pid": pid, "since": since, "gpus": dict.fromkeys(gpus)}
    return api.Entry.read(f"{pid}.{'0' * 16}", 1000, (1, pid), json.dumps(said).encode())


def sight(utilization: int | None = 50, *, absent: bool | None = False) -> api.Sight:
    return api.Sight(utilization, 1 << 30, absent)


def looks_at(*sights: tuple[float, api.Sight]) -> api.Use:
    """What is kept of looks at the one GPU of a claim, so many seconds after it began."""
    claim = api.ClaimLooks(7, BEGAN, 0.0, (api.Use(),), ("GPU-a",))
    for age, seen in sights:
        claim = claim.with_look({"GPU-a": seen}, BEGAN + age)
    (use,) = claim.uses
    return use


# What is kept


def test_a_look_stands_for_the_time_since_the_one_before() -> None:
    use = looks_at((40, sight(80)), (100, sight(20)), (160, sight(0)), (220, sight(absent=True)))
    assert use == api.Use(looked=220, idle=120, absent=60, used=40 * 0.8 + 60 * 0.2 + 60 * 0.5, memory=1 << 30)
    assert use.utilization == pytest.approx(100 * use.used / 220)


@pytest.mark.parametrize(
    ("seen", "idle", "untold"),
    [
        (sight(None), 0, 60),  # as of a MIG instance
        (sight(None, absent=True), 60, 60),
        (sight(0, absent=None), 60, 0),  # the driver lists no processes
        (sight(1, absent=None), 0, 0),
    ],
)
def test_a_driver_that_tells_half(seen: api.Sight, idle: float, untold: float) -> None:
    use = looks_at((60, seen))
    assert (use.looked, use.idle, use.untold) == (60, idle, untold)


def test_where_a_driver_tells_nothing_nobody_has_looked() -> None:
    assert looks_at((60, sight(None, absent=None))) == api.Use()


def test_what_was_not_looked_at_is_not_idle() -> None:
    """Looks are missing for a day, and then the clock is set back."""
    idle = sight(0, absent=True)
    assert looks_at((60, idle), (60 + DAY, idle), (120 + DAY, idle)).looked == 120
    assert looks_at((60, idle), (0, idle), (30, idle), (90, idle)).looked == 90
    assert looks_at((DAY, idle)).looked == 0, "the first look at a claim that is old"


def test_a_gpu_that_a_look_misses_was_not_looked_at() -> None:
    claim = api.ClaimLooks(7, BEGAN, 0.0, (api.Use(), api.Use()), ("GPU-a", "GPU-b"))
    claim = claim.with_look({"GPU-a": sight()}, BEGAN + 60).with_look({"GPU-b": sight()}, BEGAN + 120)
    assert [use.looked for use in claim.uses] == [60, 60]


def test_the_history_is_told_at_growing_distances() -> None:
    told = 0.0
    ages = []
    for minute in range(1, 3 * 24 * 60):
        age = minute * MINUTE + 0.5
        if age >= api.next_telling(told):
            ages.append(minute)
            told = age
    hours = [*range(1, 25), *range(30, 72, 6)]
    assert ages == [1, 2, 4, 8, 16, 32, *(60 * hour for hour in hours)]


SECONDS = st.floats(0, 1e9).map(lambda number: round(number, 3))
USES = st.builds(
    lambda looked, parts, memory: api.Use(looked, *[round(looked * part, 3) for part in parts], memory),
    SECONDS,
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 0.4)),
    st.integers(0, 1 << 40),
)


@given(st.lists(USES, min_size=1, max_size=8))
def test_a_line_tells_all_that_was_seen(uses: list[api.Use]) -> None:
    """To a tenth of a second."""
    looks = api.ClaimLooks(7, BEGAN, 2e9, tuple(uses))
    read = api.status_history.parse_line(api.line_of(looks))
    assert (read.pid, read.since, read.span) == (looks.pid, looks.since, looks.span)
    for use, expected in zip(read.uses, uses, strict=True):
        assert use == pytest.approx(expected, abs=0.11)


JUNK = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(api.Use._fields), inner, max_size=6),
    max_leaves=20,
)


@given(JUNK, JUNK)
def test_a_line_of_nonsense_makes_no_time(span: Any, facts: Any) -> None:
    if isinstance(facts, dict):
        facts["span"] = span
    read = api.status_history.parse_line(json.dumps({"v": 1, "claim": [7, BEGAN], "looks": facts}).encode())
    if read is not None:
        for use in read.uses:
            assert 0 <= max(use.idle, use.absent, use.untold + use.used) <= use.looked + 1e-6
            assert use.looked <= read.span < 1e11
            assert use.memory >= 0


# The file


@pytest.fixture
def history(state_dir: Path) -> Path:
    (state_dir / "history").mkdir(parents=True)
    for path in (state_dir, state_dir / "history"):
        path.chmod(0o1777)
    return state_dir / "history"


class Clock:
    """The time of this test, which passes when it says so."""

    def __init__(self) -> None:
        self.now = float(round(time.time()))

    def look(self, seconds: float = MINUTE, *snapshot: api.HostSnapshot) -> api.HostStatus:
        """Look at the host after that time; at what the driver shows, if that is given."""
        self.now += seconds
        if snapshot:
            return api.status_of(*snapshot)
        return api.gather()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, history: Path) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock


def kept() -> dict[tuple[int, int], api.ClaimLooks]:
    with api.history.HistoryDir() as directory:
        return api.Looks(directory).claims


def one_use() -> api.Use:
    (claim,) = kept().values()
    (use,) = claim.uses
    return use


def lines(history: Path) -> list[dict[str, Any]]:
    """What the history was told of looks."""
    found = []
    for file in sorted(history.glob("*.jsonl")):
        told = [json.loads(line) for line in file.read_bytes().splitlines()]
        found += [line["looks"] for line in told if "looks" in line]
    return found


def test_looks_are_kept_and_told_until_the_claim_has_gone(dgx: Any, clock: Clock, history: Path) -> None:
    dgx.hold(0)
    for _ in range(5):
        clock.look()
    assert (one_use().looked, one_use().idle) == (5 * MINUTE, 5 * MINUTE)
    file = (history / "looks").stat()
    assert (stat.S_IMODE(file.st_mode), file.st_uid) == (0o644, os.geteuid())
    assert [told["span"] for told in lines(history)] == [60, 120, 240]
    dgx.let_go()
    clock.look()
    assert [told["span"] for told in lines(history)] == [60, 120, 240, 300]
    assert kept() == {}
    clock.look()
    assert len(lines(history)) == 4
    assert not [path for path in history.iterdir() if path.name.startswith(".")]


def test_a_host_without_claims_gets_no_file(clock: Clock, history: Path) -> None:
    clock.look()
    assert list(history.iterdir()) == []


def test_a_claim_that_is_seen_again_after_a_break_goes_on(dgx: Any, clock: Clock, history: Path) -> None:
    dgx.hold(0)
    clock.look()
    clock.look(DAY)
    clock.look()
    assert one_use().looked == 2 * MINUTE
    assert [told["span"] for told in lines(history)] == [60, 60 + DAY]


HOSTILE = {
    "truncate -s 1M F": "at most",
    "yes '[' | head -c 60000 > F": "nonsense",
    "echo nonsense > F": "nonsense",
    'echo \'{"claims": [{"claim": [7, 1e9], "gpus": {}, "told": 0, "looks": []}]}\' > F': "no object",
    'echo \'{"claims": [{"claim": [2147483648, 1e9], "gpus": [], "told": 0, "looks": {}}]}\' > F': "out of bounds",
    "echo '{\"claims\": 7}' > F": "nonsense",
    "touch F": "nonsense",
    "mkfifo F": "not a regular file",
    "ln -s /etc/passwd F": "",
    "echo '{}' > F; chmod 666 F": "others may write it",
    "echo '{}' > F; chown 12345 F": "it belongs to 12345",
}


@needs_root
@pytest.mark.parametrize("make", HOSTILE)
def test_a_hostile_file_is_told_and_made_anew(dgx: Any, clock: Clock, history: Path, make: str, run_here: Any) -> None:
    dgx.hold(0)
    subprocess.run(make.replace("F", "looks"), shell=True, check=True, cwd=history)
    done = run_here("history")
    assert (done.returncode, "looks is ignored" in done.stderr) == (0, True)
    sentence = next(one for one in clock.look().ignored if "/history/looks is ignored (" in one)
    assert HOSTILE[make] in sentence
    assert sentence.endswith("), and was replaced")
    assert one_use().looked == MINUTE
    assert [one for one in clock.look().ignored if "looks" in one] == []


@needs_root
def test_a_directory_in_its_place_is_told_at_each_look(dgx: Any, clock: Clock, history: Path) -> None:
    dgx.hold(0)
    (history / "looks").mkdir()
    for _ in range(2):
        (sentence,) = [one for one in clock.look().ignored if "looks" in one]
        assert sentence.endswith("(Is a directory), and cannot be replaced (Is a directory): remove it")
    assert [path.name for path in history.iterdir() if path.name.startswith(".looks")] == []
    assert lines(history)[-1]["span"] == 2 * MINUTE


@needs_root
def test_looks_of_others_add_nothing(dgx: Any, clock: Clock, history: Path, as_user: Any) -> None:
    """Neither to a file that is there, nor by making one. The owner of the directory is not an other."""

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        status = api.gather()
        say(f"{status.gpus[0].claim is not None} {[one for one in status.ignored if 'looks' in one]}")

    dgx.hold(0)
    clock.now += MINUTE
    assert as_user(look, uid=12345).hear() == "True []"
    assert not (history / "looks").exists()
    clock.look(0)
    clock.now += MINUTE
    assert as_user(look, uid=12345).hear() == "True []"
    assert one_use().looked == MINUTE
    os.chown(history, 12345, 12345)
    assert as_user(look, uid=12345).hear() == "True []"
    assert ((history / "looks").stat().st_uid, one_use().looked) == (12345, 2 * MINUTE)


def test_there_is_no_room_for_all_claims(history: Path) -> None:
    """The first ones are kept."""
    with api.history.HistoryDir() as directory:
        looks = api.Looks(directory)
        claims = [entry(pid, BEGAN, f"GPU-{'x' * 90}{pid}") for pid in range(1, 1001)]
        looks.add([(one, next(iter(one.gpus)), sight()) for one in claims], BEGAN + MINUTE)
        looks.write(directory)
    assert (history / "looks").stat().st_size <= 1 << 16
    assert [pid for pid, _ in kept()] == [*range(1, len(kept()) + 1)]
    assert len(kept()) > 200


def test_an_entry_that_says_that_it_is_of_the_same_process_changes_nothing(history: Path) -> None:
    mine, others = entry(7, BEGAN, "GPU-a"), entry(7, BEGAN, "GPU-b")
    with api.history.HistoryDir() as directory:
        looks = api.Looks(directory)
        looks.add([(mine, "GPU-a", sight()), (others, "GPU-b", sight())], BEGAN + MINUTE)
        looks.add([(others, "GPU-b", sight()), (mine, "GPU-a", sight())], BEGAN + 2 * MINUTE)
    (claim,) = looks.claims.values()
    assert (claim.gpus, claim.uses[0].looked) == (("GPU-a",), MINUTE)


# What is seen


class Shown:
    """What a driver shows of the first GPU of a host, which each test says."""

    def __init__(self, uuid: str) -> None:
        self.gpu = api.Gpu(0, uuid, "Model", memory_total=80 << 30, memory_used=1 << 20, utilization=0)

    def snapshot(self, *pids: int, memory: int = 5 << 30, **facts: Any) -> api.HostSnapshot:
        processes = tuple(api.GpuProcess(pid, memory_used=memory) for pid in pids)
        used = len(pids) * memory + (1 << 20)
        gpu = self.gpu._replace(processes=processes, memory_used=used, memory_free=(80 << 30) - used)
        return api.HostSnapshot((gpu._replace(**facts),), "test")


@pytest.fixture
def shown(dgx: Any, monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(dgx.uuids[0])


def test_a_process_of_the_claim_that_computes(dgx: Any, clock: Clock, shown: Shown) -> None:
    dgx.hold(0, pid=os.getpid())
    clock.look(MINUTE, shown.snapshot(os.getpid(), utilization=70))
    clock.look(MINUTE, shown.snapshot(os.getpid(), utilization=0))
    clock.look(MINUTE, shown.snapshot())
    use = one_use()
    assert (use.looked, use.idle, use.absent, use.used) == (180, 120, 60, 42)
    assert use.memory == (5 << 30) + (1 << 20)


@pytest.mark.parametrize(
    ("facts", "looked"),
    [
        ({"utilization": None, "processes": None}, 0),
        ({"utilization": None, "processes": (), "processes_private": True}, 0),
        ({"utilization": 0, "processes": None}, MINUTE),  # but no process is known to be missing
        ({"utilization": 50, "processes": ()}, MINUTE),  # hidden in a container
        ({"utilization": None, "processes": (), "memory_used": 5 << 30}, MINUTE),  # the same on a MIG instance
    ],
)
def test_processes_that_are_not_seen_are_not_missing(
    dgx: Any, clock: Clock, shown: Shown, facts: dict[str, Any], looked: float
) -> None:
    dgx.hold(0)
    clock.look(MINUTE, shown.snapshot(**facts))
    assert (one_use().looked, one_use().absent) == (looked, 0)


def test_of_a_share_its_processes_and_the_load_of_the_gpu(dgx: Any, clock: Clock, shown: Shown, child: Any) -> None:
    """Another share of the same user is on the same GPU; its process is not that of this one."""
    code = "import safe_gpu; safe_gpu.claim_gpus(1, placeholder_fn=safe_gpu.NoPlaceholder(), only=0, share='20GiB', "
    code += "affinity=None); say('held'); listen()"
    working, idle = [child(code, says="held") for _ in range(2)]
    clock.look(MINUTE, shown.snapshot(working.pid, utilization=60))
    uses = {pid: claim.uses[0] for (pid, _), claim in kept().items()}
    assert uses[working.pid].memory == 5 << 30
    assert (uses[idle.pid].memory, uses[idle.pid].absent == uses[idle.pid].looked > 0) == (0, True)
    assert [round(use.utilization or 0) for use in uses.values()] == [60, 60]


def test_claims_that_the_history_does_not_tell_are_not_looked_at(dgx: Any, clock: Clock) -> None:
    dgx.hold(0, inside="0" * 16)
    dgx.hold(1, since=None)
    dgx.hold(2, display=True)
    clock.look()
    assert kept() == {}


def test_an_entry_that_names_more_gpus_than_there_are_is_not_looked_at(dgx: Any, clock: Clock) -> None:
    claimed = PlayedClaim(dict.fromkeys([*dgx.uuids, "GPU-x"]), os.getpid(), os.geteuid())
    clock.look()
    assert kept() == {}
    claimed.release()
    claimed = PlayedClaim(dict.fromkeys([*dgx.uuids[1:], "GPU-x"]), os.getpid(), os.geteuid())
    clock.look()
    (claim,) = kept().values()
    assert [use.looked > 0 for use in claim.uses] == [True] * 7 + [False]
    claimed.release()


def test_amd_gpus_by_what_the_kernel_tells(dgx: Any, clock: Clock, shown: Shown) -> None:
    """A partition has no utilisation of its own, as a MIG instance has none."""
    dgx.hold(0)
    partition = shown.snapshot(vendor="amd", place="AMD-0000:01:00.0", partition=True, mode="CPX", utilization=None)
    clock.look(MINUTE, partition)
    assert (one_use().looked, one_use().untold, one_use().absent) == (MINUTE, MINUTE, MINUTE)
    assert one_use().utilization is None


# What people and programs see


def past(pid: int = 1, hours: float = 10.0, use: api.Use | None = None, **facts: Any) -> api.PastClaim:
    """A claim of one GPU that began on that Monday, and what looks have seen of it."""
    end = BEGAN + hours * HOUR
    facts = {"gpus": ("GPU-a",), "user": "anna", "host": "gpu1", "seen": end, "ended": end, **facts}
    looks = None
    if use is not None:
        looks = api.ClaimLooks(pid, BEGAN, hours * HOUR, (use,) * len(facts["gpus"]))
    return api.PastClaim(pid, BEGAN, looks=looks, **facts)


def used(hours: float, utilization: float, idle: float = 0.0, **facts: Any) -> api.Use:
    return api.Use(looked=hours * HOUR, used=hours * HOUR * utilization, idle=idle * HOUR, **facts)


def test_the_last_line_of_a_claim_counts_and_comes_before_its_own() -> None:
    early, late = [api.ClaimLooks(1, BEGAN, span, (api.Use(looked=span),)) for span in (60.0, 120.0)]
    (claim,) = api.merged([early, late, past(), early._replace(pid=2)])
    assert claim.looks == late
    (claim,) = api.merged([past(), late, early])
    assert claim.looks == early


def test_looks_are_kept_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones told stay, as of claims."""
    monkeypatch.setattr(api.status_history, "MOST_LOOKED_AT", 100)
    told = [api.ClaimLooks(pid, BEGAN, 60.0, (api.Use(looked=60.0),) * 8) for pid in range(1, 1001)]
    found = api.merged([*told, past(1), past(1000)])
    assert [claim.looks is not None for claim in found] == [False, True]


def test_a_part_of_the_time_and_of_a_gpu() -> None:
    claim = past(use=used(10, 0.5, idle=2), share=20, of=80)
    half = claim.use(BEGAN + 5 * HOUR, BEGAN + DAY)
    assert (half.looked / HOUR, half.idle / HOUR, half.utilization) == (1.25, 0.25, 50)
    assert claim.use(BEGAN + 10 * HOUR, BEGAN + DAY) == api.Use()
    assert past(use=LOOKED, gpus=("GPU-a", "GPU-b"))._replace(gpus=("GPU-a",)).use(0, BEGAN + DAY) == api.Use()


def test_the_sums_of_five_users() -> None:
    loads = {"anna": (0.9, 0), "ben": (0.6, 0), "carla": (0.35, 0), "dora": (0.3, 4), "emil": (0.1, 8)}
    claims = [past(pid, use=used(10, *load), user=user) for pid, (user, load) in enumerate(loads.items(), 1)]
    claims.append(past(9, user="emil"))  # at which nobody has looked
    for by in ("user", "job", "gpu", "week", "host", "day"):
        sums = api.gpu_hours_by(claims, by, BEGAN, BEGAN + DAY)
        assert sum(one.use.looked for one in sums) == pytest.approx(50 * HOUR)
        assert sum(one.use.idle for one in sums) == pytest.approx(12 * HOUR)
    found = {one.key: api.UseFacts.of(one.use) for one in api.gpu_hours_by(claims, "user", BEGAN, BEGAN + DAY)}
    assert {user: (facts.utilization, facts.gpu_hours_idle) for user, facts in found.items()} == {
        user: (pytest.approx(100 * load), idle) for user, (load, idle) in loads.items()
    }
    *_, host = api.report(claims, (), "gpu1", BEGAN, BEGAN + DAY)
    assert (host.gpu_hours_most, host.gpu_hours_looked, host.gpu_hours_idle, host.utilization) == (60, 50, 12, 45)
    text = "\n".join(api.table_of_report([host._replace(by="user")], 200))
    assert " USED   IDLE" in text
    assert "10.00 of 60.00 GPU-hours were not looked at; USED and IDLE are of the others." in text


@pytest.mark.parametrize(
    ("claim", "cells"),
    [
        (past(use=used(10, 0.5, idle=2)), ["50%", "2.00"]),
        (past(use=used(10, 0.5, idle=2), share=20, of=80), ["50%", "of", "GPU", "0.50"]),
        (past(use=api.Use(10 * HOUR, untold=10 * HOUR, memory=5 << 30)), ["5", "GiB", "0.00"]),
        (past(), []),
    ],
    ids=["whole GPU", "share", "MIG instance", "nobody has looked"],
)
def test_a_claim_in_the_table(claim: api.PastClaim, cells: list[str]) -> None:
    heading, row, *_ = api.status_history.table_of_claims([claim], BEGAN, BEGAN + DAY, 200)
    assert row.split()[-1 - len(cells) : -1] == cells or cells == []
    assert ("USED" in heading, "IDLE" in heading) == (cells != [], cells != [])


def test_a_report_without_looks_says_so() -> None:
    rows = list(api.report([past()], (), "gpu1", BEGAN, BEGAN + DAY))
    text = " ".join(api.table_of_report(rows, 60))
    assert "Nobody has looked at these GPUs" in text
    assert "USED" not in text
    assert (rows[0].gpu_hours_looked, rows[0].gpu_hours_idle, rows[0].utilization) == (0, None, None)


@pytest.fixture
def written(history: Path) -> None:
    """A history of two users, of whom the one without work came first."""
    now = time.time()
    told = []
    for pid, user, idle in ((1, "anna", 1.0), (2, "ben", 0.0), (3, api.user_name(os.geteuid()), 0.25)):
        since = now - 2 * HOUR + pid
        claim = {"v": 1, "claim": [pid, since], "user": user, "gpus": ["GPU-a"], "host": "gpu1"}
        seen = used(1, 1 - idle, idle=idle)
        told += [
            api.line_of(api.ClaimLooks(pid, since, HOUR, (seen,))),
            json.dumps(claim).encode() + b"\n",
            api.end_line(pid, since, since + HOUR, since + HOUR),
        ]
    assert api.history.append(told, now)


def test_who_held_gpus_without_use_comes_first(written: None, run_here: Any) -> None:
    latest = json.loads(run_here("history", "--json").stdout)["claims"]
    assert [one["pid"] for one in latest] == [3, 2, 1]
    document = json.loads(run_here("history", "--sort", "idle", "--json").stdout)["claims"]
    assert [one["pid"] for one in document] == [1, 3, 2]
    first = document[0]
    assert (first["gpu_hours_looked"], first["gpu_hours_idle"], first["utilization"]) == (1, 1, 0)
    assert (first["utilization_of"], first["memory_most"]) == ("claim", None)
    by_user = json.loads(run_here("history", "--by", "user", "--sort", "idle", "--json").stdout)["use"]
    assert [one["gpu_hours_idle"] for one in by_user] == [1, 0.25, 0]
    heading = run_here("history", "--csv").stdout.splitlines()[0]
    known = "share,of,waited,gpu_hours_least,gpu_hours_most,"
    assert heading.endswith(
        f"{known}gpu_hours_looked,gpu_hours_idle,gpu_hours_absent,utilization,memory_most,utilization_of"
    )
    assert (
        run_here("history", "--report", "month", "--csv")
        .stdout.splitlines()[0]
        .endswith("wait_95,gpu_hours_looked,gpu_hours_idle,gpu_hours_absent,utilization,memory_most")
    )


def test_only_my_claims(written: None, run_here: Any) -> None:
    (one,) = json.loads(run_here("history", "--mine", "--json").stdout)["claims"]
    assert (one["pid"], one["user"]) == (3, api.user_name(os.geteuid()))
    assert run_here("history", "--mine", "--user", "anna").returncode == 2
    for option in (("--mine",), ("--sort", "idle")):
        done = run_here("history", "--report", "month", *option)
        assert (done.returncode, f"--report and {option[0]} do not go together" in done.stderr) == (2, True)


def test_a_claim_that_runs_is_told_with_the_latest_look(
    dgx: Any, clock: Clock, run_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.procfs, "seconds_running", lambda pid: HOUR)  # by this clock it is
    dgx.hold(0)
    for _ in range(3):
        clock.look()
    (one,) = json.loads(run_here("history", "--json").stdout)["claims"]
    assert (one["running"], one["gpu_hours_looked"], one["gpu_hours_idle"]) == (True, 0.05, 0.05)


def test_the_metric(dgx: Any, clock: Clock, shown: Shown) -> None:
    dgx.hold(0, pid=os.getpid())
    for utilization in (90, 30, 0):
        status = clock.look(MINUTE, shown.snapshot(os.getpid(), utilization=utilization))
    (sample,) = [line for line in api.render_metrics(status).splitlines() if line.startswith("safe_gpu_claim_util")]
    assert sample.endswith(" 60.0"), "up to the look before"


def test_the_report_by_day() -> None:
    days = api.report_by_day([past(use=used(10, 0.5, idle=2)), past(2)], BEGAN, BEGAN + 2 * DAY)
    assert (days.idle, days.utilization) == ({"2026-11-16": 2.0}, {"2026-11-16": 50.0})


# Five users for a week


LOADS = {"anna": (0.9, 1.0), "ben": (0.6, 1.0), "carla": (0.35, 1.0), "dora": (0.5, 0.6), "emil": (0.2, 0.5)}
"""User -> the utilisation while a job works, and the part of each job in which it works, from its start."""

UNSEEN = (BEGAN + 3 * DAY, BEGAN + 4 * DAY)


class PlayedJob:
    """A job of a user on one GPU: it works for a part of its time, and the GPU then shows its load and nothing else."""

    def __init__(self, pid: int, user: str, since: float, length: float) -> None:
        load, works = LOADS[user]
        self.user = user
        self.end = since + length
        self.rests = since + works * length
        self.load = load
        self.entry = entry(pid, round(since, 3), f"GPU-{user}")

    def sight(self, now: float) -> api.Sight:
        if now >= self.rests:
            return sight(0, absent=True)
        swing = 0.1 * math.sin(now / 1000)
        return sight(round(100 * self.load * (1 + swing)))

    def lines(self) -> list[bytes]:
        """What the history tells of it."""
        since = self.entry.since
        said = {"v": 1, "claim": [self.entry.pid, since], "user": self.user, "gpus": list(self.entry.gpus)}
        return [json.dumps(said).encode() + b"\n", api.end_line(self.entry.pid, since, self.end, self.end)]


def test_five_users_two_of_whom_hold_without_use(history: Path) -> None:
    """USED is within two points, IDLE within a look for each claim, and a day without looks is told as that."""
    random = Random(1)
    jobs: dict[str, PlayedJob] = {}
    ended: list[PlayedJob] = []
    told: list[bytes] = []
    with api.history.HistoryDir() as directory:
        looks = api.Looks(directory)
    for minute in range(7 * 24 * 60):
        now = BEGAN + minute * MINUTE + random.uniform(0, 2)
        for user in LOADS:
            if user in jobs and jobs[user].end <= now:
                ended.append(jobs.pop(user))
                told += ended[-1].lines()
            if user not in jobs:
                length = random.lognormvariate(0, 0.7) * 5 * HOUR
                jobs[user] = PlayedJob(minute * 10 + len(jobs) + 1, user, now - random.uniform(0, 60), length)
        if UNSEEN[0] <= now < UNSEEN[1]:
            continue
        looks.add([(job.entry, f"GPU-{user}", job.sight(now)) for user, job in jobs.items()], now)
        gone = looks.ended(job.entry for job in jobs.values())
        due = looks.due()
        told += [api.line_of(claim) for claim in (*gone, *due)]
        looks.note_told(due)
    claims = api.merged(filter(None, map(api.status_history.parse_line, told)))
    assert len(claims) == len(ended)
    use = {one.key: one for one in api.gpu_hours_by(claims, "user", BEGAN, BEGAN + 7 * DAY)}
    for user, (load, _) in LOADS.items():
        own = [job for job in ended if job.user == user]
        seen = use[user].use
        held = sum(job.end - job.entry.since for job in own)
        unseen = sum(max(0.0, min(job.end, UNSEEN[1]) - max(job.entry.since, UNSEEN[0])) for job in own)
        idle = sum(job.end - job.rests for job in own)
        idle_unseen = sum(max(0.0, min(job.end, UNSEEN[1]) - max(job.rests, UNSEEN[0])) for job in own)
        assert use[user].most * HOUR - seen.looked == pytest.approx(unseen, abs=2 * MINUTE * len(own))
        assert seen.idle == pytest.approx(idle - idle_unseen, abs=MINUTE * len(own))
        worked = (held - idle - unseen + idle_unseen) / (held - unseen)
        assert seen.utilization == pytest.approx(100 * load * worked, abs=2)
