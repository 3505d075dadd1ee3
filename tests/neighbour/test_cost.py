"""What a neighbour can make others cost: a command no time beyond its deadline and little memory, a claim little under
host.lock, the history bounded memory. Whatever lies there hides no claim, and is a claim of nobody else."""

import csv
import io
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.costs import CASES, Case, Cost, Crowd, measuring
from support.processes import PACKAGE_ROOT
from support.real import long
from support.state import write_for_all

NEIGHBOUR, VICTIM, THIRD = 4711, 4712, 4713
MOST = 64  # MiB beyond a bare interpreter
LONGEST = 300_000  # characters of output

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")

TIMEOUT = 0.1
# Seconds beyond the deadline, for slow machines. A file lease blocks every open for 45, and a FIFO for ever.
SLACK = 20.0

LATE, UNUSABLE = 75, 73  # exit codes

CLAIM = ("run", "-n", 1, "--timeout", TIMEOUT, "--", "true")
COMMANDS: dict[tuple[object, ...], tuple[int, ...]] = {
    ("run", "-n", 8, "--timeout", TIMEOUT, "--", "true"): (LATE, UNUSABLE),
    ("wait", "-n", 8, "--timeout", TIMEOUT): (LATE, UNUSABLE),
    ("status", "--json"): (0,),
    ("doctor",): (0, 1),
}


@pytest.fixture
def used(state_dir: Path, dgx: Any) -> Path:
    """A state directory where each GPU was claimed once."""
    claim(8).release_gpus()
    return state_dir


@pytest.fixture
def check(cost: Callable[..., Any], used: Path, dgx: Any) -> Callable[..., None]:
    """Run every command, or one that is to end with one of these codes, while GPU 0 is claimed."""
    dgx.hold(0)

    def run(commands: dict[tuple[object, ...], tuple[int, ...]] = COMMANDS) -> None:
        for command, codes in commands.items():
            taken = cost(*command)
            assert taken.code in codes, f"{command}: {taken}"
            assert "Traceback" not in taken.err + taken.out, f"{command}: {taken}"
            assert taken.seconds < TIMEOUT + SLACK, f"{command}: {taken}"
            assert taken.mebibytes < MOST, f"{command}: {taken}"
            assert len(taken.out) + len(taken.err) < LONGEST, f"{command}: {taken}"

    return run


KINDS = {
    "lease": "touch {0}",
    "FIFO": "mkfifo {0}",
    "terabyte": "truncate -s 1T {0}; chmod 666 {0}",
    "link": "ln -s {1} {0}",
}


@pytest.mark.parametrize("kind", ["lease", *(pytest.param(kind, marks=long) for kind in [*KINDS][1:])])
@pytest.mark.parametrize("where", ["host.lock", "others"])
def test_what_is_no_plain_file_is_not_opened(
    used: Path, dgx: Any, check: Any, file_lease: Any, where: str, kind: str
) -> None:
    precious = used.with_name("precious")
    precious.write_text("precious")
    (used / "faults").mkdir()
    (used / "faults").chmod(0o1777)
    entry = f"1.{'0' * 16}"
    others = [used / name for name in (f"claims/{entry}", f"faults/{dgx.uuids[2]}.4711", f"queue/{entry}")]
    others += (used / "history").glob("*.jsonl")
    for path in [used / "host.lock"] if where == "host.lock" else others:
        path.unlink(missing_ok=True)
        subprocess.run(KINDS[kind].format(path, precious), shell=True, check=True)
        if kind == "lease":
            file_lease(path, NEIGHBOUR)
    check()
    check({CLAIM: (UNUSABLE,) if where == "host.lock" and kind != "terabyte" else (0,)})
    assert precious.read_text() == "precious"


@long
def test_a_process_with_a_command_line_of_one_gib(
    used: Path, dgx: Any, entry_of: Any, check: Any, huge_process: int
) -> None:
    """It is in a claim, in a ticket and on a GPU."""
    dgx.hold(2, pid=huge_process)
    dgx.occupy(1, pid=huge_process)
    entry_of(NEIGHBOUR, {"pid": huge_process, "nb_gpus": 8, "gpus": dgx.uuids[5:6]}, part="queue")
    check({**COMMANDS, ("affinity", "--of", huge_process): (0, 1)})


# Many names, strange ones, linked ones


MANY = 60_000
# Seconds of processor time under host.lock: twice what is promised, since others may use the caches of the processor.
LONGEST_LOCKED = 0.12


def fill(directory: Path, contents: list[bytes], number: int) -> None:
    """Make that many dead entries of a neighbour. Most are names of a few files, which takes less time."""
    fd = os.open(directory, os.O_RDONLY)
    names = [f"{place}.{place:016x}" for place in range(1, number + 1)]
    for name, content in zip(names, contents, strict=False):
        (directory / name).write_bytes(content)
        os.chown(directory / name, NEIGHBOUR, NEIGHBOUR)
        (directory / name).chmod(0o644)
    for place, name in enumerate(names[len(contents) :]):
        os.link(names[place % len(contents)], name, src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)


def watch_locked(patch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """What looks take while host.lock is held: seconds of processor time, and files that are opened."""
    taken: list[tuple[float, int]] = []
    opened: list[object] = []
    locked, open_to_read = api.Host.locked, api.entries.open_to_read

    @contextmanager
    def timed(host: api.Host, *arguments: Any) -> Iterator[None]:
        with locked(host, *arguments):
            opened.clear()
            began = time.thread_time()
            try:
                yield
            finally:
                taken.append((time.thread_time() - began, len(opened)))

    patch.setattr(api.Host, "locked", timed)
    patch.setattr(api.entries, "open_to_read", lambda *about: opened.append(about) or open_to_read(*about))
    return taken


def said(part: str, uuids: list[str]) -> bytes:
    what: dict[str, Any] = {"gpus": dict.fromkeys(uuids)} if part == "claims" else {"gpus": uuids, "nb_gpus": 1}
    return json.dumps({"v": 1, "pid": 1, **what}).encode()


@long
@needs_root
@pytest.mark.parametrize("part", ["claims", "queue"])
def test_many_names_cost_little_under_host_lock(used: Path, dgx: Any, as_user: Any, part: str) -> None:
    """Dead entries for all GPUs, and nonsense. They are read before, and only their names are listed under it."""
    fill(used / part, [said(part, dgx.uuids), b"{", b"x" * 60_000], MANY)

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            found = watch_locked(patch)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for _ in range(3):
                claim(8).release_gpus()
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        say(json.dumps([len(found), min(found)[0], max(opened for _, opened in found), grown / 1024]))

    looks, seconds, opened, grown = json.loads(as_user(look, uid=VICTIM).hear())
    assert looks >= 3
    assert opened <= 2
    assert seconds < LONGEST_LOCKED
    assert grown < 64, "MiB"


@pytest.fixture
def make(used: Path) -> Iterator[Callable[..., tuple[Path, api.Held]]]:
    """Living entries that say what is given, of a neighbour."""
    if os.geteuid():
        pytest.skip("needs root, to give files away")
    with ExitStack() as made:

        def entry(part: str, number: int, uid: int = NEIGHBOUR, **what: Any) -> tuple[Path, api.Held]:
            with api.Directory(str(used), part) as directory:
                name, held = api.make_entry(directory, number, what, by_children=False)
            os.fchown(held.fd, uid, uid)
            made.callback(held.release)
            return used / part / name, held

        yield entry


def test_no_living_claim_is_left_out_however_many_a_user_has_and_few_are_asked_again(
    used: Path, dgx: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under host.lock whoever lived a moment before is taken to live."""
    monkeypatch.setattr("safe_gpu.claim.attempt.MOST_RECHECKED", 5)
    monkeypatch.setattr(api.Entries, "may_be_many", True)
    for number in range(1, 201):
        make("claims", number, gpus={dgx.uuids[0]: None})
    make("claims", 300, VICTIM, gpus={dgx.uuids[1]: None})
    taken = watch_locked(monkeypatch)
    with claim() as owner:
        assert owner.devices_taken == [2]
    assert [opened for _, opened in taken] == [5]


def test_what_another_user_left_is_not_touched(used: Path, dgx: Any, make: Any, as_user: Any) -> None:
    paths = []
    for part in ("claims", "queue"):
        path, held = make(part, 1, **json.loads(said(part, dgx.uuids)))
        held.release()
        paths.append((path, path.stat()))

    assert as_user(lambda say, listen: say(claim(8).release_gpus()), uid=VICTIM).hear() == "None"
    for path, status in paths:
        now = path.stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    claim().release_gpus()
    assert not any(path.exists() for path, _ in paths), "root removes them"


# What one user makes


MILLISECONDS, LOCKED, MEBIBYTES = 300, 60, 100  # of 60,000 names at most
NOISE = 1.5  # beyond what a loop shows at the same time
TRIES = 3  # beside other processes some measurements are too high


def is_little(case: Case, cost: Cost) -> bool:
    scale = case.names / 60_000 * cost.slowness * NOISE
    return (
        cost.end == "done"
        and cost.milliseconds < MILLISECONDS * scale
        and cost.locked < LOCKED * scale
        and cost.mebibytes < MEBIBYTES
    )


@needs_root
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[long] if case.takes_long else []) for case in CASES]
)
def test_what_one_user_makes_costs_others_little(case: Case) -> None:
    costs: list[Cost] = []
    with measuring(case) as cost_to:
        while len(costs) < TRIES and not (costs and is_little(case, costs[-1])):
            costs.append(cost_to(PACKAGE_ROOT))
    assert is_little(case, costs[-1]), costs


@long
@needs_root
@pytest.mark.parametrize("act", ["come before those that count", "those that count go"])
def test_what_comes_and_goes_costs_a_waiter_little(state_dir: Path, act: str) -> None:
    """Of a user who has more than counts already."""
    crowd = Crowd(state_dir)
    for number in range(20_000):
        crowd.file(f"claims/{10**6 + number}.{'0' * 16}")
    with api.Directory(str(state_dir), "claims") as directory:
        entries = api.Entries(directory)
        began = time.process_time()
        entries.look()
        first = time.process_time() - began
        for number in range(api.listing.MOST_FILES):
            if act == "those that count go":
                os.unlink(f"{10**6 + number}.{'0' * 16}", dir_fd=directory.fd)
            else:
                crowd.file(f"claims/{number}.{'0' * 16}")
        began = time.process_time()
        entries.look()
        assert time.process_time() - began < 3 * first


def unreadable_file(crowd: Crowd) -> None:
    crowd.file(f"claims/1.{'0' * 16}", b"{}", mode=0o600, lives=True)
    crowd.file(f"queue/1.{'0' * 16}", b"{}", mode=0o600)


def large_file(crowd: Crowd) -> None:
    crowd.file(f"claims/1.{'0' * 16}", b"x" * (17 << 10), lives=True)


def dead_names(crowd: Crowd, number: int = 4097) -> None:
    for part in ("claims", "queue"):
        crowd.names(part, number, lambda number: f"{number}.{'0' * 16}", crowd.file)


def living_names(crowd: Crowd) -> None:
    for number in range(4097):
        crowd.file(f"claims/{number}.{'0' * 16}", b'{"gpus": {}}', lives=True)


def very_many_names(crowd: Crowd) -> None:
    dead_names(crowd, 65_537)


@pytest.mark.parametrize(
    "make", [unreadable_file, large_file, dead_names, living_names, pytest.param(very_many_names, marks=long)]
)
def test_no_file_of_one_user_refuses_the_claims_of_another(state_dir: Path, dgx: Any, claim_as: Any, make: Any) -> None:
    crowd = Crowd(state_dir)
    make(crowd)
    holder = claim_as(VICTIM, 8)
    assert holder.hear() == "[0, 1, 2, 3, 4, 5, 6, 7]"
    assert [one.uid for one in api.living_claims() if one.gpus] == [VICTIM]
    holder.tell()
    crowd.close()


def why_refused(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    try:
        claim(1, timeout=60).release_gpus()
        say("granted")
    except api.StateDirError as err:
        say(err)


@needs_root
@pytest.mark.parametrize("part", ["claims", "queue"])
@pytest.mark.parametrize("when", ["before", "under host.lock"])
def test_who_has_as_many_files_as_count_is_refused_and_told_why(
    used: Path, dgx: Any, make: Any, as_user: Any, monkeypatch: pytest.MonkeyPatch, part: str, when: str
) -> None:
    """Nobody would see a further claim of his. Others claim, and he does when some of his have ended."""
    monkeypatch.setattr(api.listing, "MOST_FILES", 3)
    if when != "before":
        monkeypatch.setattr(api.Entries, "make_room", lambda entries: None)  # other processes of his come meanwhile
        if part == "queue":
            dgx.hold(*range(8))
    said = {"gpus": ["made-up"], "nb_gpus": 1} if part == "queue" else {"gpus": {"made-up": None}}
    made = [make(part, number, **said)[1] for number in range(1, 4)]
    told = as_user(why_refused, uid=NEIGHBOUR).hear()
    assert f"{used}/{part} has as many files of yours as count (2048, 4 MiB): end or remove some" in told
    made[0].release()
    if when == "before":
        assert as_user(why_refused, uid=VICTIM).hear() == "granted"
        assert as_user(why_refused, uid=NEIGHBOUR).hear() == "granted"


# The history, which all users write


MOST_OF_HISTORY = 256  # MiB beyond an empty history
PART = 8  # of which these tests take one, of the bounds too: full files take long to write
SMALL = f"""
from safe_gpu.coordination import history
history.LARGEST //= {PART}
from safe_gpu.status import history as claims
for bound in ("MOST", "MOST_LATER"):
    setattr(claims, bound, getattr(claims, bound) // {PART})
"""


def one_claim(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    claim().release_gpus()
    say("released")


def test_each_user_appends_to_the_same_file_and_one_that_its_owner_closes_is_passed(state_dir: Path, as_user) -> None:
    for uid in (NEIGHBOUR, VICTIM):
        assert as_user(one_claim, uid=uid, umask=0o077).hear() == "released"
    (file,) = (state_dir / api.history.NAME).iterdir()

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claims, warnings = api.claims_between(0, time.time() + 1)
        say(f"{[(one.uid, one.ended is not None) for one in claims]} {warnings}")

    assert as_user(look, uid=NEIGHBOUR).hear() == f"{[(NEIGHBOUR, True), (VICTIM, True)]} []"
    os.chmod(file, 0o600)
    assert as_user(one_claim, uid=THIRD).hear() == "released"
    claims, warnings = api.claims_between(0, time.time() + 1)
    assert [one.uid for one in claims] == [THIRD]  # root reads no closed file in a directory of another user
    assert "has mode 0600 in place of 0666" in warnings[0]


NOW = 1_795_000_000.0  # in November 2026


@needs_root
def test_names_of_months_that_never_were_remove_nothing(state_dir: Path) -> None:
    """Root, and the owner of the directory, may unlink everybody's files, but do so with their own only."""
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    directory = state_dir / api.history.NAME
    assert api.history.append([b"{}\n"], NOW - 31 * 86400)
    odd = ["2026-0a.jsonl", "2026-0:.jsonl", "2020-13.jsonl", "2020-00.jsonl", "2020-01.4.jsonl", "2020-01.jsonl.old"]
    others = ["2020-01.jsonl", "2026-08.1.jsonl"]
    kept = ["2024-12.jsonl", "2026-10.jsonl", "2026-12.jsonl", "9999-12.jsonl"]
    for name in [*odd, *others, *kept, "2024-11.3.jsonl", "2020-02.jsonl"]:
        (directory / name).touch()
    for name in others:
        os.chown(directory / name, NEIGHBOUR, NEIGHBOUR)
    directory.chmod(0o755)  # perhaps somebody's own directory
    assert api.history.append([b"{}\n"], NOW)
    (directory / "2026-11.jsonl").unlink()
    assert (directory / "2020-02.jsonl").exists()
    directory.chmod(0o1777)
    assert api.history.append([b"{}\n"], NOW)
    assert sorted(os.listdir(directory)) == sorted([*odd, *others, *kept, "2026-11.jsonl"])


# What a neighbour writes


@pytest.fixture
def directory(state_dir: Path) -> Path:
    """The directory of the history of a host that has been used."""
    for path in (state_dir, state_dir / "claims", state_dir / api.history.NAME):
        path.mkdir()
        path.chmod(0o1777)
    return state_dir / api.history.NAME


def line(number: int, **facts: object) -> bytes:
    """A claim, with as few bytes as that takes."""
    told = {"claim": [number % 1_000_000 + 1, int(time.time()) - 60 - number // 1_000_000], **facts}
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


WIDE = "\U0001f600"  # makes each character of a text take four bytes


def long_fields(number: int) -> bytes:
    lengths = {"user": 64, "host": 64, "job": 100, "command": 200}
    texts = {key: f"{number}{WIDE}".ljust(length, "x") for key, length in lengths.items()}
    return line(number, **texts, gpus=[f"{number}{WIDE}".ljust(100, "g")], labels=[f"{number}{WIDE}"])


def many_gpus(number: int) -> bytes:
    gpus = [f"{1024 * number + gpu:x}" for gpu in range(1024)]
    return line(number, gpus=gpus, labels=gpus)


def one_gpu_each(number: int) -> bytes:
    return line(number, gpus=["a"], user=f"{number}", waited=1e9)


@pytest.mark.parametrize(
    ("files", "write_line", "arguments"),
    [
        pytest.param(2, lambda number: line(number, ended=int(time.time())), (), id="ends", marks=long),
        pytest.param(2, long_fields, ("--json",), id="long fields", marks=long),
        pytest.param(2, many_gpus, ("--by", "gpu"), id="GPUs"),
        pytest.param(1, one_gpu_each, ("--report", "year"), id="waits", marks=long),
    ],
)
def test_full_files_take_little_memory(directory: Path, cost: Any, files: int, write_line: Any, arguments: Any) -> None:
    def lines(first: int) -> Iterator[bytes]:
        size, number = 0, first
        while size < api.history.LARGEST // PART:
            yield (data := write_line(number))
            size, number = size + len(data), number + 1

    empty = cost("history", *arguments, before=SMALL)
    for part, name in enumerate(api.history.file_names(api.history.month_of(time.time()))[:files]):
        write_for_all(directory / name, b"".join(lines(part * 400_000 // PART)))
    taken = cost("history", *arguments, before=SMALL)
    assert taken.code == 0
    assert taken.err.count("\n") <= 1
    assert taken.mebibytes - empty.mebibytes < MOST_OF_HISTORY / PART + 2  # the allocator rounds


def test_the_future_is_not_read_and_a_file_of_empty_lines_is_left_soon(directory: Path, monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    read: list[bytes] = []
    genuine = api.status_history.parse_line
    monkeypatch.setattr(api.status_history, "parse_line", lambda line: read.append(line) or genuine(line))
    now = line(1, gpus=["a"])
    write_for_all(directory / "2026-11.jsonl", now)
    for name in ("2026-12.jsonl", "2027-01.2.jsonl", "9999-01.jsonl"):
        write_for_all(directory / name, line(2, gpus=["a"]))
    claims, warnings = api.claims_between(0, NOW)
    assert ([one.pid for one in claims], warnings) == ([2], [])
    assert read == [now]
    write_for_all(directory / "2026-11.jsonl", b"\n" * api.history.LARGEST)
    api.claims_between(0, NOW)
    assert len(read) == 1 + api.history.LARGEST // 64


def test_a_spreadsheet_runs_no_cell(directory: Path, run_here: Any) -> None:
    text = '=HYPERLINK("http://x","y")'
    facts = {"user": text, "host": text, "job": text, "command": text, "gpus": [text], "labels": [text]}
    write_for_all(directory / api.history.file_names(api.history.month_of(time.time()))[0], line(1, **facts))
    for arguments in ((), ("--by", "user"), ("--by", "gpu"), ("--by", "job"), ("--report", "month")):
        done = run_here("history", "--csv", *arguments)
        row = next(csv.DictReader(io.StringIO(done.stdout)))
        assert row.get("uid", "-1") == "-1"
        texts = [cell for key, cell in row.items() if key != "uid" and cell.strip("0123456789.")]
        assert not [cell for cell in texts if cell[0] in "=+-@"]


def test_a_hostile_directory_of_claims_costs_what_runs_now(directory: Path) -> None:
    write_for_all(directory / api.history.file_names(api.history.month_of(time.time()))[0], line(1, gpus=["a"]))
    claims = directory.parent / "claims"
    claims.rmdir()
    claims.symlink_to("/etc")
    (one,), (warning,) = api.claims_between(0, time.time() + 1)
    assert one.pid == 2
    assert "which claims hold GPUs now is not known" in warning
