"""What is written of claims beside entries: the history."""

import json
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import api

NOW = 1_795_000_000.0  # in November 2026
FILE = "2026-11.jsonl"
LINE = b'{"v": 1}\n'


@pytest.fixture
def written(state_dir: Path) -> Path:
    """The directory of a history with one line."""
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    assert api.history.append([LINE], NOW)
    return state_dir / api.history.NAME


def test_a_file_for_each_month_that_everybody_may_write(written: Path) -> None:
    assert api.history.append([LINE, LINE], NOW)
    assert api.history.append([LINE], NOW + 31 * 86400)
    assert {file.name: file.read_bytes() for file in written.iterdir()} == {FILE: 3 * LINE, "2026-12.jsonl": LINE}
    assert stat.S_IMODE(written.stat().st_mode) == 0o1777
    assert {stat.S_IMODE(file.stat().st_mode) for file in written.iterdir()} == {0o666}


def test_a_full_file_is_followed_by_the_next_part_up_to_a_bound(written: Path) -> None:
    for name in api.history.file_names("2026-11"):
        assert api.history.append([LINE], NOW)
        assert (written / name).read_bytes().endswith(LINE)
        os.truncate(written / name, api.history.LARGEST)
    assert not api.history.append([LINE], NOW)
    assert sum(file.stat().st_size for file in written.iterdir()) == api.history.PARTS * api.history.LARGEST


HOSTILE = ["truncate -s 1T F; chmod 666 F", "mkfifo F", "mkdir F", "ln -s ../precious F", "ln ../precious F"]


@pytest.mark.parametrize("make", HOSTILE)
def test_a_hostile_file_is_passed(written: Path, make: str) -> None:
    precious = written.parent / "precious"
    precious.write_bytes(b"precious")
    (written / FILE).unlink()
    subprocess.run(make.replace("F", FILE), shell=True, check=True, cwd=written)
    assert api.history.append([LINE], NOW)
    assert (written / "2026-11.1.jsonl").read_bytes() == LINE
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("hostile", ["link", "no room"])
def test_a_directory_that_cannot_be_used_loses_the_line_at_once(
    written: Path, hostile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (written / FILE).unlink()
    if hostile == "link":
        written.rmdir()
        written.symlink_to(tmp_path)
    else:
        genuine = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: genuine(fd, data[:3]))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits"))
    assert not api.history.append([LINE], NOW)
    assert not list(tmp_path.glob("*.jsonl"))


# Entries


@pytest.fixture
def claims(state_dir: Path) -> Iterator[api.Directory]:
    with api.Directory(str(state_dir), "claims") as directory:
        yield directory


@pytest.fixture
def hold(claims: api.Directory) -> Iterator[Callable[..., api.Held]]:
    """Make an entry; its claim dies when what is returned is released."""
    made: list[api.Held] = []

    def hold(**said: Any) -> api.Held:
        facts = {"pid": os.getpid(), "since": time.time() - 60, "gpus": {"GPU-a": None}, **said}
        made.append(api.make_entry(claims, len(made) + 1, facts, by_children=True)[1])
        return made[-1]

    yield hold
    for held in made:
        held.release()


def dead(directory: api.Directory) -> list[api.Entry]:
    entries = api.Entries(directory)
    assert entries.look() == []
    return list(entries.dead())


def past() -> list[api.PastClaim]:
    found, warnings = api.claims_between(0, time.time() + 1)
    assert warnings == []
    return found


def test_a_line_changes_nothing_of_a_claim_that_runs(hold: Any) -> None:
    """Anybody may have written the line. Whose the claim is says the owner of the entry."""
    said = {"pid": os.getpid(), "since": time.time() - 60, "gpus": {"GPU-a": 20 << 30}, "waited": 2.5}
    said |= {"labels": ["3"], "of": 80 << 30, "host": "gpu1", "job": "sge:1", "command": "python train.py"}
    hold(**said)
    line = api.history.claim_line({**said, "labels": ["4"], "waited": 9.0}, uid=4711)
    assert api.history.append([line, api.history.end_line(said["pid"], said["since"], NOW, NOW)], time.time())
    (one,) = past()
    assert (one.labels, one.of, one.share, one.waited, one.part) == (("3",), 80 << 30, 20 << 30, 2.5, 0.25)
    assert (one.running, one.ended, one.uid) == (True, None, os.geteuid())
    assert (one.host, one.job, one.command) == ("gpu1", "sge:1", "python train.py")


def test_a_claim_that_died_ended_after_it_was_seen_and_before_it_was_found(hold: Any, claims: api.Directory) -> None:
    since = round(time.time() - 60, 3)
    hold(since=since, gpus={"GPU-a": None, "AMD/b": None}).release()
    (one,) = past()
    assert (one.running, one.seen, one.since) == (False, since, since)
    assert since < (one.ended or 0) < time.time() + 1
    assert api.history.append([LINE], NOW)
    with api.history.HistoryDir() as directory:
        api.history.mark_seen(directory, "AMD/b")
    seen = Path(claims.path).parent / "history" / "AMD_b.seen"
    os.utime(seen, (since + 30, since + 30))
    assert past()[0].seen == pytest.approx(since + 30, abs=2e-3)
    os.utime(seen, (9e9, 9e9))
    (one,) = past()
    assert one.seen == pytest.approx(one.ended, abs=1e-2)
    assert not one.knows_its_end


def test_who_removes_a_dead_claim_tells_the_history_once(hold: Any, claims: api.Directory) -> None:
    said = {"since": round(time.time() - 60, 3), "gpus": {"GPU-a": 20 << 30}, "job": "sge:1"}
    own = api.history.claim_line({"pid": os.getpid(), **said, "labels": ["0"], "of": 80 << 30}, uid=os.geteuid())
    hold(**said).release()
    assert api.history.append([own], time.time())
    before = past()
    api.gather()
    assert os.listdir(claims.fd) == []
    (one,) = past()
    assert (one.labels, one.of, one.job, one.seen) == (("0",), 80 << 30, "sge:1", said["since"])
    assert (before[0].ended or 0) <= (one.ended or 0) < time.time() + 1
    api.gather()
    assert past() == [one]
    hold(command="python train.py --password 1234").release()  # before it wrote its line
    first, end = map(json.loads, api.history.lines_of_dead(dead(claims), time.time()))
    assert first["command"] == "python train.py"
    assert first["claim"] == end["claim"]


@pytest.mark.parametrize("said", [{"start": 1 << 60}, {"start": 0}, {"start": 7, "pidns": 1}])
def test_a_process_of_elsewhere_or_of_before_a_reboot_bounds_nothing(
    hold: Any, claims: api.Directory, said: Any
) -> None:
    since = time.time()
    hold(since=since, **{"pidns": api.procfs.pid_namespace(), **said}).release()
    _, end = map(json.loads, api.history.lines_of_dead(dead(claims), since + 365 * 86400))
    assert end["ended"][1] == pytest.approx(since + 365 * 86400, abs=1e-2)


@pytest.mark.parametrize("said", [{"inside": "t"}, {"display": True}, {"nb_gpus": 1, "gpus": ["GPU-a"]}, {"pid": 0}])
def test_claims_inside_others_on_a_display_and_waiters_have_no_line(
    hold: Any, claims: api.Directory, said: Any
) -> None:
    held = hold(**said)
    assert past() == []
    held.release()
    assert past() == []
    assert list(api.history.lines_of_dead(dead(claims), time.time())) == []


def test_an_entry_of_nonsense_costs_no_other(hold: Any, claims: api.Directory) -> None:
    for number, content in enumerate((b"[", b'{"v": 1, "gpus": {"\\u0000": null}, "pid": 7, "since": 5}'), 50):
        dead_entry(claims, number, content)
    os.mkfifo(Path(claims.path) / "60.00000000000000aa")
    hold()
    assert [one.running for one in past()] == [True]


def test_dead_claims_of_a_neighbour_are_read_to_a_bound(claims: api.Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_gpu.status.history.LARGEST", 2000)
    for number in range(100):
        dead_entry(claims, number, b'{"v": 1, "gpus": {"GPU-a": null}, "pid": 7, "since": %d.0}' % (1000 + number))
    found, (warning,) = api.claims_between(0, time.time())
    assert 0 < len(found) < 100
    assert "more claims than can be kept" in warning


def dead_entry(claims: api.Directory, number: int, content: bytes) -> None:
    path = Path(claims.path) / f"{number}.00000000000000aa"
    path.write_bytes(content)
    path.chmod(0o644)
