"""The files of the history: whole lines, bounded, and never in the way of a claim; and what entries add to them."""

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.coordination import history
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import Entries, Entry, make_entry
from safe_gpu.host import procfs
from safe_gpu.host.held import Held
from safe_gpu.status.history import ClaimEnd, PastClaim, _line, claims_between

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


def test_a_full_file_is_followed_by_the_next_part_up_to_a_bound(written: Path) -> None:
    for name in history.file_names("2026-11"):
        assert history.append([LINE], NOW)
        assert (written / name).read_bytes().endswith(LINE)
        os.truncate(written / name, history.LARGEST)
    assert not history.append([LINE], NOW)
    assert sum(file.stat().st_size for file in written.iterdir()) == history.PARTS * history.LARGEST


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


@pytest.mark.parametrize("hostile", ["link", "file", "no room"])
def test_a_directory_that_cannot_be_used_loses_the_line_at_once(
    state_dir: Path, hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    if hostile == "link":
        (state_dir / history.NAME).symlink_to(tmp_path)
    elif hostile == "file":
        (state_dir / history.NAME).touch()
    else:
        genuine = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: genuine(fd, data[:3]))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert not history.append([LINE], NOW)
    assert not list(tmp_path.glob("*.jsonl"))


@given(pid=st.integers(1, (1 << 31) - 1), times=st.lists(TIMES, min_size=3, max_size=3).map(sorted))
def test_an_end_is_read_as_it_was_written(pid: int, times: list[float]) -> None:
    for end in (ClaimEnd(pid, *times), ClaimEnd(pid, times[0], times[1], times[1])):
        assert _line(history.end_line(*end)) == end


# Entries


@pytest.fixture
def claims(state_dir: Path) -> Iterator[Directory]:
    with Directory(str(state_dir), "claims") as directory:
        yield directory


@pytest.fixture
def hold(claims: Directory) -> Iterator[Callable[..., Held]]:
    """Make an entry; its claim dies when what is returned is released."""
    made: list[Held] = []

    def hold(**said: Any) -> Held:
        facts = {"pid": os.getpid(), "since": time.time() - 60, "gpus": {"GPU-a": None}, **said}
        made.append(make_entry(claims, len(made) + 1, facts, by_children=True)[1])
        return made[-1]

    yield hold
    for held in made:
        held.release()


def dead(directory: Directory) -> list[Entry]:
    entries = Entries(directory)
    assert entries.look() == []
    return list(entries.dead())


def past() -> list[PastClaim]:
    found, warnings = claims_between(0, time.time() + 1)
    assert warnings == []
    return found


def test_a_line_changes_nothing_of_a_claim_that_runs(hold: Any) -> None:
    """Anybody may have written the line. Whose the claim is says the owner of the entry."""
    said = {"pid": os.getpid(), "since": time.time() - 60, "gpus": {"GPU-a": 20 << 30}, "waited": 2.5}
    said |= {"labels": ["3"], "of": 80 << 30, "host": "gpu1", "job": "sge:1", "command": "python train.py"}
    hold(**said)
    line = history.claim_line({**said, "labels": ["4"], "waited": 9.0}, uid=4711)
    assert history.append([line, history.end_line(said["pid"], said["since"], NOW, NOW)], time.time())
    (one,) = past()
    assert (one.labels, one.of, one.share, one.waited, one.part) == (("3",), 80 << 30, 20 << 30, 2.5, 0.25)
    assert (one.running, one.ended, one.uid) == (True, None, os.geteuid())
    assert (one.host, one.job, one.command) == ("gpu1", "sge:1", "python train.py")


def test_a_claim_that_died_ended_after_it_was_seen_and_before_it_was_found(hold: Any, claims: Directory) -> None:
    since = round(time.time() - 60, 3)
    hold(since=since, gpus={"GPU-a": None, "AMD/b": None}).release()
    (one,) = past()
    assert (one.running, one.seen, one.since) == (False, since, since)
    assert since < (one.ended or 0) < time.time() + 1
    assert history.append([LINE], NOW)
    with history.HistoryDir() as directory:
        history.mark_seen(directory, "AMD/b")
    os.utime(Path(claims.path).parent / "history" / "AMD_b.seen", (since + 30, since + 30))
    assert past()[0].seen == pytest.approx(since + 30, abs=2e-3)
    os.utime(Path(claims.path).parent / "history" / "AMD_b.seen", (9e9, 9e9))
    (one,) = past()
    assert one.seen == pytest.approx(one.ended, abs=1e-2)
    assert not one.knows_its_end


def test_who_removes_a_dead_claim_tells_the_history_once(hold: Any, claims: Directory) -> None:
    said = {"since": round(time.time() - 60, 3), "gpus": {"GPU-a": 20 << 30}, "job": "sge:1"}
    own = history.claim_line({"pid": os.getpid(), **said, "labels": ["0"], "of": 80 << 30}, uid=os.geteuid())
    hold(**said).release()
    assert history.append([own], time.time())
    before = past()
    entries = Entries(claims)
    entries.look()
    removed = entries.remove_dead()
    assert os.listdir(claims.fd) == []
    assert history.append(history.lines_of_dead(removed, time.time()), time.time())
    (one,) = past()
    assert (one.labels, one.of, one.job, one.seen) == (("0",), 80 << 30, "sge:1", said["since"])
    assert (before[0].ended or 0) <= (one.ended or 0) < time.time() + 1
    assert entries.remove_dead() == []


def test_a_claim_that_died_before_it_wrote_its_line_has_one(hold: Any, claims: Directory) -> None:
    hold(command="python train.py --password 1234").release()
    lines = list(history.lines_of_dead(dead(claims), time.time()))
    first, end = map(json.loads, lines)
    assert first["command"] == "python train.py"
    assert first["claim"] == end["claim"]
    assert history.append(lines, time.time())
    assert [one.pid for one in past()] == [os.getpid()]


@pytest.mark.parametrize("said", [{"start": 1 << 60}, {"start": 0}, {"start": 7, "pidns": 1}])
def test_a_process_of_elsewhere_or_of_before_a_reboot_bounds_nothing(hold: Any, claims: Directory, said: Any) -> None:
    since = time.time()
    hold(since=since, **{"pidns": procfs.pid_namespace(), **said}).release()
    _, end = map(json.loads, history.lines_of_dead(dead(claims), since + 365 * 86400))
    assert end["ended"][1] == pytest.approx(since + 365 * 86400, abs=1e-2)


@pytest.mark.parametrize(
    "said",
    [{"inside": "t"}, {"display": True}, {"nb_gpus": 1, "gpus": ["GPU-a"]}, {"gpus": {}}, {"since": None}, {"pid": 0}],
)
def test_claims_inside_others_on_a_display_and_waiters_have_no_line(hold: Any, claims: Directory, said: Any) -> None:
    held = hold(**said)
    assert past() == []
    held.release()
    assert past() == []
    assert list(history.lines_of_dead(dead(claims), time.time())) == []


def test_an_entry_of_nonsense_costs_no_other(hold: Any, claims: Directory) -> None:
    for number, content in enumerate((b"", b"[", b'{"v": 1, "gpus": {"\\u0000": null}, "pid": 7, "since": 5}'), 50):
        (Path(claims.path) / f"{number}.00000000000000aa").write_bytes(content)
        (Path(claims.path) / f"{number}.00000000000000aa").chmod(0o644)
    os.mkfifo(Path(claims.path) / "60.00000000000000aa")
    hold()
    assert [one.running for one in past()] == [False, True]


def test_dead_claims_of_a_neighbour_are_read_to_a_bound(claims: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_gpu.status.history.LARGEST", 2000)
    told = {"v": 1, "gpus": {"GPU-a": None}, "pid": 7}
    for number in range(100):
        entry = Path(claims.path) / f"{number}.00000000000000aa"
        entry.write_text(json.dumps({**told, "since": 1000.0 + number}))
        entry.chmod(0o644)
    found, (warning,) = claims_between(0, time.time())
    assert 0 < len(found) < 100
    assert "more claims than can be kept" in warning
