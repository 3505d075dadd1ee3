"""What another user wrote is shown as one printable line of bounded length, by each command, to root and to a third
user: what stands in entries, tickets, notes and the history, names of files, arguments of processes."""

import io
import json
import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.hostile import TRICK, assert_plain, assert_shown_safely
from support.real import long
from support.state import write_for_all

NEIGHBOUR, THIRD = 4711, 4712
LONG = TRICK * 8
NAME = "MIG-" + "evil " * 19  # of a device, which must be printable
LONGEST_LINE = 2000  # characters

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")

WANTED = "-n 8 --timeout 0.1"
COMMANDS = [
    "status",
    "status -v",
    "status --prometheus",
    "status --html --output page.html",
    "history",
    "history --csv",
    "history --idle",
    "history --report week",
    *(f"history --by {by}" for by in ("user", "gpu", "job", "host", "day")),
    "doctor",
    "doctor -v",
    "policy",
    "policy --all",
    "affinity",
    f"run {WANTED} -- true",
    f"run {WANTED} --share 20GiB -- true",
    "run --only 1 --timeout 0 -- true",
    f"wait {WANTED}",
    "drain --wait --timeout 0",
    "drain 0-3 --until +1h --reason x",
    "resume",
    "setup --dry-run --state-dir {state_dir}",
    "setup --dry-run --state-dir {state_dir}-2",
    "setup --dry-run --remove --state-dir {state_dir}",
]
DOCUMENTS = ["status --json", "history --json", "history --by job --json", "doctor --json", "policy --all --json"]


@pytest.fixture
def shown(as_user: Callable[..., Any], open_tmp: Path, state_dir: Path) -> Callable[..., str]:
    """``shown(THIRD, "status")``: what a command prints for a user, on stdout and on stderr."""
    work_dir = open_tmp / "work"
    work_dir.mkdir()
    work_dir.chmod(0o1777)

    def run(uid: int, command: str) -> str:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            os.chdir(work_dir)
            out = io.BytesIO()
            with io.TextIOWrapper(out, "utf-8", newline="\n", write_through=True) as text:
                with redirect_stdout(text), redirect_stderr(text):
                    api.main(command.format(state_dir=state_dir).split())
                for page in work_dir.glob("page.html"):
                    text.write(page.read_text())
                    page.unlink()
                say(out.getvalue().decode())

        return str(as_user(work, uid=uid).hear())

    return run


def assert_one_line_each(text: str, longest: int = LONGEST_LINE) -> None:
    assert_shown_safely(text, most=100_000)
    assert max(map(len, text.split("\n"))) <= longest


def write_names(state_dir: Path) -> None:
    """Files of a neighbour whose names are text."""
    for part in ("", "claims", "queue", "faults", "history"):
        for text in (TRICK, f"{'9' * 18}.{TRICK}", LONG[:200]):
            file = state_dir / part / text.replace("/", "")
            write_for_all(file, LONG)
            os.chown(file, NEIGHBOUR, NEIGHBOUR)


def write_notes(state_dir: Path, uuids: list[str]) -> None:
    for number, uid in ((5, 0), (6, NEIGHBOUR)):
        note = state_dir / "faults" / f"{uuids[number]}.{uid}"
        note.write_text(json.dumps({"when": time.time(), "error": LONG}))
        os.chown(note, uid, uid)


def write_history(state_dir: Path, uuids: list[str]) -> None:
    texts = dict.fromkeys(("user", "host", "job", "command"), LONG)
    now, lines = time.time(), []
    for number, gpus in enumerate([uuids[:1], [LONG], [TRICK] * 256]):
        said = {"v": 1, "claim": [number + 1, now - 3600], "uid": NEIGHBOUR, **texts}
        lines.append({**said, "gpus": gpus, "labels": [LONG] * len(gpus), "until": now})
    write_for_all(
        state_dir / "history" / time.strftime("%Y-%m.jsonl", time.gmtime()),
        "".join(f"{json.dumps(line)}\n" for line in lines),
    )


@pytest.fixture
def written(state_dir: Path, dgx: Any, child: Any, entry_of: Any, as_user: Any) -> Path:
    """The state directory of a host on which a neighbour has written all that it can."""
    api.setup.make(str(state_dir))
    uuids = dgx.uuids
    run = f"os.execl('/bin/sh', {TRICK!r}, '-c', 'echo held; read x', {TRICK!r}, {LONG!r})"
    his = child(f"import os; os.setresuid({NEIGHBOUR}, {NEIGHBOUR}, {NEIGHBOUR}); {run}", says="held")
    here = {"pid": his.pid, "start": api.procfs.start_time(his.pid), "pidns": api.procfs.pid_namespace()}
    texts = {**dict.fromkeys(("host", "job", "command", "user"), LONG), "since": time.time() - 9, LONG: LONG}
    claims = [
        {"gpus": {uuids[0]: None, TRICK: None, LONG: None}, **here},
        {"gpus": {uuids[1]: None}, "token": TRICK, "inside": TRICK, "pid": 1, "pidns": 7},
        {"gpus": {uuids[2]: 5 << 30}, "parts": {TRICK: 0}, "modes": {uuids[2]: TRICK}, "labels": [LONG]},
        {"gpus": {NAME: None}, "pieces": {uuids[3]: [NAME, TRICK]}, "modes": {uuids[3]: TRICK}},
        {"gpus": {NAME: None}, "pieces": {uuids[3]: [NAME]}, "modes": {uuids[3]: LONG}, **here},
        {"gpus": {f"{number} {NAME}"[:100]: None for number in range(200)}},
        {"gpus": LONG},
        {LONG: LONG},
    ]
    for said in claims:
        assert entry_of(NEIGHBOUR, {**texts, **said}).exists()
    ticket = {"gpus": [*uuids, TRICK], "nb_gpus": 1, **texts}
    for said in ({"near": LONG}, {"turn": LONG}, {"share": LONG, TRICK: TRICK}, {**here, "hold_for": 60.0}):
        assert entry_of(NEIGHBOUR, {**ticket, **said}, part="queue").exists()
    dead = state_dir / "claims" / f"9.{'9' * 16}"
    dead.write_text(json.dumps({"v": 1, "gpus": {uuids[4]: None}, "pid": 1, **texts}))
    os.chown(dead, NEIGHBOUR, NEIGHBOUR)
    write_names(state_dir)
    write_notes(state_dir, uuids)
    write_history(state_dir, uuids)
    reason = LONG.replace("\n", "") * 9
    closed = [f"{uuids[number]} - - - {reason}" for number in range(8)]
    closed += [f"{TRICK} - - - {LONG}", f"{uuids[0]} 1 4e9 group:{LONG} {LONG}", LONG]
    (state_dir / "closed").write_text("\n".join(closed))
    os.chown(state_dir / "closed", NEIGHBOUR, NEIGHBOUR)
    dgx.occupy(7, pid=his.pid)
    return state_dir


@pytest.mark.parametrize(
    ("owner", "uid"),
    [(NEIGHBOUR, 0), *(pytest.param(*pair, marks=long) for pair in [(0, THIRD), (0, 0), (NEIGHBOUR, THIRD)])],
)
def test_every_command(written: Path, shown: Callable[..., str], uid: int, owner: int, rules: Any) -> None:
    """Also where the state directory is the neighbour's, who may drain GPUs then."""
    rules("[default]\nmax_gpus = 8")
    os.chown(written, owner, owner)
    told = ""
    for command in COMMANDS:
        text = shown(uid, command)
        assert text, command
        assert_one_line_each(text, 30_000 if "--html" in command else LONGEST_LINE)
        if "evil" in text:
            told += f"{command.split()[0]} "
    assert {*told.split()} >= {"status", "history", "run", "wait", "doctor", "setup"}
    for command in DOCUMENTS:
        assert_plain(json.loads(shown(uid, command)))


def test_what_setup_leaves(open_tmp: Path, state_dir: Path, shown: Callable[..., str]) -> None:
    api.setup.make(str(state_dir))
    write_names(state_dir)
    for number in range(200):
        (state_dir / "history" / f"{number:03}{TRICK}".replace("/", "")).touch()
    text = shown(0, "setup --dry-run --remove --state-dir {state_dir}")
    assert_one_line_each(text)
    lines = text.splitlines()
    assert "evil" in text
    assert sum(line.startswith("left, ") for line in lines) == 101
    assert any(line.endswith(" more") for line in lines)


def test_a_simulated_gpu_that_is_broken(dgx: Any) -> None:
    bad = dgx.state_dir / "simulated" / "dgx-a100" / f"{dgx.uuids[0]}.bad"
    dgx.occupy(7)
    bad.write_text(LONG)
    with pytest.raises(api.PlaceholderError) as refused:
        dgx.occupy(0)
    assert "evil" in str(refused.value)
    assert_one_line_each(str(refused.value))
