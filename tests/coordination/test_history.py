"""The files of the history: whole lines, bounded, and never in the way of a claim."""

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu import NoPlaceholder, claim_gpus
from safe_gpu.coordination import history
from safe_gpu.coordination.leases.claim_end import LONGEST, ClaimEnd, end_of_dead_claim
from safe_gpu.coordination.leases.record import LeaseRecord
from safe_gpu.status.history import claims_between

NOW = 1_795_000_000.0  # in November 2026
FILE = "2026-11.jsonl"
LINE = b'{"v": 1}\n'

TIMES = st.floats(1, 9e10).map(lambda when: round(when, 3))


@pytest.fixture
def written(state_dir: Path) -> Path:
    """The directory of a history with one line."""
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    assert history.append([LINE], NOW)
    return state_dir / history.NAME


def test_a_file_for_each_month_that_everybody_may_write(written: Path) -> None:
    assert history.append([LINE, LINE], NOW)
    assert history.append([LINE], NOW + 31 * 86400)
    assert {file.name: file.read_bytes() for file in written.iterdir()} == {FILE: 3 * LINE, "2026-12.jsonl": LINE}
    assert stat.S_IMODE(written.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(file.stat().st_mode) for file in written.iterdir()} == {0o666}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
def test_links_of_others_stay_wherever_they_lead(written: Path) -> None:
    link = written / "2020-01.jsonl"
    link.symlink_to(written / FILE)
    os.chown(link, 4711, 4711, follow_symlinks=False)
    assert history.append([LINE], NOW + 31 * 86400)
    assert link.is_symlink()


def test_a_full_file_is_followed_by_the_next_part_up_to_a_bound(written: Path) -> None:
    for name in history.file_names("2026-11"):
        assert history.append([LINE], NOW)
        assert (written / name).read_bytes().endswith(LINE)
        os.truncate(written / name, history.LARGEST)
    assert not history.append([LINE], NOW)
    assert sum(file.stat().st_size for file in written.iterdir()) == history.PARTS * history.LARGEST


def test_old_months_are_removed(written: Path) -> None:
    months = [
        f"{year}-{month:02}" for year in (2024, 2025, 2026) for month in range(1, 13) if (year, month) < (2026, 11)
    ]
    for name in [f"{month}.jsonl" for month in months] + ["2024-01.1.jsonl", "9999-01.jsonl", "notes"]:
        (written / name).touch()
    assert history.append([LINE], NOW + 31 * 86400)  # a new file, December's
    left = sorted(file.name[:7] for file in written.iterdir())
    assert left == sorted([*months[-22:], "2026-11", "2026-12", "9999-01", "notes"])


@pytest.mark.parametrize("hostile", ["fifo", "link", "hard link", "directory", "huge"])
def test_a_hostile_file_is_passed(written: Path, hostile: str, tmp_path: Path) -> None:
    file, precious = written / FILE, written.parent / "precious"
    precious.write_bytes(b"precious")
    if hostile == "huge":
        os.truncate(file, 1 << 40)
    else:
        file.unlink()
        {"fifo": os.mkfifo, "directory": os.mkdir}.get(hostile, lambda path: None)(file)
        {"link": os.symlink, "hard link": os.link}.get(hostile, lambda *paths: None)(precious, file)
    assert history.append([LINE], NOW)
    assert (written / "2026-11.1.jsonl").read_bytes() == LINE
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("hostile", ["link", "file", "closed"])
def test_a_hostile_directory_loses_the_line_at_once(state_dir: Path, hostile: str, as_user: Any, monkeypatch) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    place, elsewhere = state_dir / history.NAME, state_dir / "elsewhere"
    if hostile == "link":
        elsewhere.mkdir()
        place.symlink_to(elsewhere)
    elif hostile == "file":
        place.touch()
    else:
        place.mkdir(0o700)

    def work(say: Any, listen: Any) -> None:
        import time

        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        say([history.append([LINE], NOW), slept])

    assert as_user(work, uid=4711).hear() == "[False, []]"
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


def test_no_room_loses_the_line(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = os.write

    def full(fd: int, data: bytes) -> int:
        return genuine(fd, data[:3])

    monkeypatch.setattr(os, "write", full)
    assert not history.append([LINE], NOW)


@given(pid=st.integers(1, (1 << 31) - 1), times=st.lists(TIMES, min_size=3, max_size=3).map(sorted))
def test_an_ending_is_a_short_line_that_is_no_record(pid: int, times: list[float]) -> None:
    for ending in (ClaimEnd(pid, *times), ClaimEnd(pid, times[0], times[1], times[1])):
        line = ending.encode()
        assert ClaimEnd.decode(line) == ending
        assert len(line) <= LONGEST
        assert LeaseRecord.decode(line) is None


def test_a_record_is_always_longer_than_an_ending() -> None:
    assert len(LeaseRecord(1, None, 0, "", "", None, None, (), 0.0, "").encode()) > LONGEST


@pytest.mark.parametrize(
    ("since", "changed", "expected"),
    [
        (10.0, 20.0, (20.0, 30.0)),
        (10.0, 5.0, (10.0, 30.0)),
        (10.0, 99.0, (30.0, 30.0)),
        (31.0, 31.0, None),
        (0.0, 1.0, None),
    ],
)
def test_a_dead_claim_ended_between_last_seen_and_found_free(
    since: float, changed: float, expected: tuple[float, float] | None
) -> None:
    ending = end_of_dead_claim(7, since, changed, 30.0)
    assert (ending and (ending.seen, ending.ended)) == expected


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_jumps_does_not_change_how_long_a_claim_lasted(ground, monkeypatch, jump: float) -> None:
    clock = time.time
    began = time.monotonic()
    with claim_gpus(1, NoPlaceholder(), affinity=None):
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
    lasted = time.monotonic() - began
    end = ClaimEnd.decode((ground.directory / "leases" / f"{ground.uuids[0]}.lock").read_bytes())
    assert end is not None
    assert 0 <= end.ended - end.since <= lasted


def test_a_dead_claim_has_lasted_no_longer_than_its_process(ground, child, monkeypatch) -> None:
    """The clock jumps ahead before anybody finds out that it died."""
    began = time.monotonic()
    died = child("import safe_gpu; safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None); say(1); listen()")
    died.hear()
    died.kill()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 86400.0)
    with claim_gpus(8, NoPlaceholder(), affinity=None):
        pass
    lasted = time.monotonic() - began
    (past, _) = claims_between(0, 1e12)[0]
    assert (past.ended or 0) - past.since <= lasted + 1
