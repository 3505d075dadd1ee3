"""The table of ``status`` from made-up facts, on terminals and in pictures; idle times, and when waiters can start."""

import itertools
import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api, made_up
from support.real import tool
from support.state import write_for_all
from support.terminals import open_terminal

picture = tool("picture")
texts = st.text(max_size=40)
ages = st.none() | st.floats(0, 2e9)
pids, names, amounts = st.integers(1, 1 << 22), st.none() | texts, st.none() | st.integers(0, 1 << 38)
holders = (st.none() | pids, names, names, st.none() | st.text(max_size=200), ages)
claims = st.none() | st.builds(api.Holder, *holders, stopped=st.booleans(), note=texts, until=ages, sharers=st.just(()))
loads = {"memory_total": amounts, "memory_used": amounts, "utilization": st.none() | st.integers(0, 100)}
gpus = st.builds(lambda index, name, **load: api.Gpu(index, "GPU-1", name, **load), st.integers(0, 31), texts, **loads)
processes = st.lists(st.builds(api.ProcessStatus, pids, names, names, st.just("compute"), amounts), max_size=2)
facts = {"idle": st.booleans(), "reason": texts, "claim": claims, "inside": claims, "processes": processes.map(tuple)}
states = st.sampled_from("free claimed busy display unusable".split())
waits = (st.booleans(), texts, st.none() | st.floats(1, 1e6), ages, st.none(), amounts, names)
waiters = st.builds(
    api.WaiterStatus, st.integers(1, 999), st.none() | pids, names, st.none() | st.integers(1, 64), ages, *waits
)
hosts = st.builds(
    api.HostStatus,
    *map(st.just, ("gpu01.example.org", "nvml", "550.54.15", "/tmp/safe-gpu", 1.8e9)),
    gpus=st.lists(st.builds(api.GpuStatus, gpus, states, **facts), max_size=4).map(tuple),
    queue=st.lists(waiters, max_size=3).map(tuple),
    warnings=st.lists(texts, max_size=1).map(tuple),
)
ANSI = re.compile(r"\x1b\[[0-9]+m")


def host(taken_at: float, *gpus: api.GpuStatus, queue: tuple[api.WaiterStatus, ...] = ()) -> api.HostStatus:
    return api.HostStatus("h", "nvml", "1", "/d", taken_at, gpus, queue)


def shown(status: api.HostStatus, width: int = 80, **options: bool) -> list[str]:
    """The lines of the table, without colour."""
    return api.render(status, width=width, color=False, **options).split("\n")


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


@settings(max_examples=15)
@given(hosts, st.sampled_from([40, 80, 100, 200]))
def test_no_line_is_too_wide_and_nothing_plays_tricks(status: api.HostStatus, width: int) -> None:
    text = api.render(status, width=width, color=False)
    lines = text.split("\n")
    assert max(map(api.display_width, lines)) <= width
    for line in lines:
        assert line.isprintable()
    colored = api.render(status, width=width, color=True)
    assert "\x1b[" in colored
    assert ANSI.sub("", colored) == text


def test_a_crowd_of_waiters_is_cut() -> None:
    crowd = tuple(api.WaiterStatus(place, place + 10, "anna", 1, None, note="odd") for place in range(1, 1501))
    status = host(12_001.0, queue=crowd)
    lines = shown(status)
    assert lines[-1] == "... and 1400 more"
    assert sum("anna" in line for line in lines) == 100
    plain = replace(status, queue=tuple(replace(one, note="", job=f"sge:7.{one.position}") for one in crowd))
    assert words(shown(plain))[-1].startswith("1-1500 anna 1500 x 1 GPU")
    assert any(line.startswith("  1  anna") for line in shown(plain, verbose=True)), "numbers stand on the right"
    assert [line for line in words(shown(plain, verbose=True)) if line.startswith("3 anna 7.3 1 GPU")]
    assert [one["position"] for one in status.to_dict()["queue"]] == list(range(1, 1001))


def test_memory_of_which_there_is_none_has_an_empty_bar() -> None:
    gpu = api.GpuStatus(api.Gpu(0, "GPU-0", memory_total=0, memory_used=0, utilization=0), "free")
    assert "0 free 0/0G 0%" in words(shown(host(100.0, gpu)))


def test_what_gpus_have_in_common_stands_once() -> None:
    """Claims, and notes on several GPUs; a claim that is not known is not taken for the one before it."""
    claim = api.Holder(7, "anna", None, "train", 1.0, stopped=True, until=2.0)
    unknown = api.Holder(note="odd")
    drained = api.GpuStatus(api.Gpu(0, "GPU-0"), "unusable", reason="drained by root: dust", drained=True)
    held = [(0, claim), (1, claim), (2, unknown), (3, unknown), (4, claim)]
    gpus = [api.GpuStatus(api.Gpu(number, "GPU-x"), "claimed", claim=one) for number, one in held]
    gpus += [replace(drained, gpu=api.Gpu(number, "GPU-x")) for number in (5, 6, 7)]
    lines = words(shown(host(62.0, *gpus)))
    assert lines[0] == "h: 0 of 8 GPUs free, 3 drained (nvml 1)"
    assert lines[4:] == [
        "0 claimed - - anna pid 7 1m -1m train",
        "1 claimed - - anna pid 7 1m -1m train",
        "2 claimed - - ? pid ? ? ?",
        "3 claimed - - ? pid ? ? ?",
        "4 claimed - - anna pid 7 1m -1m train",
        *("5 drained - -", "6 drained - -", "7 drained - -", ""),
        "GPU 0,1,4: process 7 is stopped (a suspended job?) and keeps the GPU",
        "GPU 2,3: odd",
        "GPU 5-7: drained by root: dust",
    ]


LONG_NAME = "annabell.with-a-name-that-is-longer-than-any-column@example.org"

WARM = api.Gpu(0, "GPU-0", memory_total=80 << 30, memory_used=42 << 30, utilization=7, temperature=61)


def test_every_row_of_a_claim_has_its_user() -> None:
    """A name of any length is whole where another program reads it, and nothing is missing beside it."""
    long = LONG_NAME
    claim = api.Holder(7, long, None, "python train.py", 1.0, until=90.0)
    gpus = [api.GpuStatus(WARM._replace(index=number), "claimed", claim=claim) for number in range(2)]
    waiter = api.WaiterStatus(1, 8, long, 1, 1.0, hold_for=60.0)
    for width in (80, 120):
        lines = words(shown(host(62.0, *gpus, queue=(waiter,)), width, piped=True))
        assert sum(f" {long} pid 7 1m 28s python train.py" in line for line in lines) == 2
        assert f"1 {long} pid 8 1 GPU 1m 1m" in lines
    assert long not in "".join(shown(host(62.0, *gpus, queue=(waiter,)), 80))


def test_a_command_keeps_its_words_in_what_is_piped() -> None:
    claim = api.Holder(20511, "anna", None, "python finetune_a_large_model.py", 1.0, until=90000.0)
    status = host(62.0, api.GpuStatus(WARM, "claimed", claim=claim))
    assert claim.command not in "".join(shown(status, 80))
    assert claim.command in "".join(shown(status, 80, piped=True))


def test_processes_of_a_mig_instance_are_shown_once() -> None:
    """The driver lists them on the GPU too."""
    process = api.ProcessStatus(9, "ben", "python", "compute", 1 << 30)
    other = api.ProcessStatus(10, "ben", "watch", "graphics", 1 << 20)
    parent = api.GpuStatus(api.Gpu(0, "GPU-0", mig_enabled=True), "unusable", processes=(process, other))
    instance = api.Gpu(0, "MIG-0", mig_parent="GPU-0", mig_instance=0)
    lines = words(shown(host(62.0, parent, api.GpuStatus(instance, "free", processes=(process,))), verbose=True))
    assert [line.split()[0] for line in lines[4:8]] == ["0", "graphics", "0:0", "compute"]


def test_names_are_whole_in_what_is_piped(state_dir: Path, run_here: Any) -> None:
    """The history, its sums and its report, and a table of hosts; on a terminal they have their columns."""
    directory = state_dir / "history"
    directory.mkdir(parents=True)
    for path in (state_dir, directory):
        path.chmod(0o1777)
    since = time.time() - 60
    facts = {"v": 1, "claim": [7, since], "user": LONG_NAME, "gpus": ["GPU-a"], "command": "train", "waited": 1.0}
    lines = [facts, {"v": 1, "claim": [7, since], "ended": since + 30}]
    month = time.strftime("%Y-%m", time.gmtime(since))
    write_for_all(directory / f"{month}.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    for words in ([], ["--by", "user"], ["--report", "week"]):
        assert LONG_NAME in run_here("history", *words).stdout, words
    claims, _ = api.claims_between(since - 1, time.time())
    on_a_terminal = api.status_history.table_of_claims(claims, since - 1, time.time(), 80)
    assert max(map(len, on_a_terminal)) <= 80
    assert LONG_NAME not in "".join(on_a_terminal)

    name = "a-host-" * 10
    one = made_up.scene().to_dict()
    for gpu in one["gpus"]:
        if gpu["claim"]:
            gpu["claim"]["user"] = LONG_NAME
    answers = {name: api.Answer(one, api.figures_of(one, time.time()))}
    piped = api.render_hosts(answers, width=80, color=False, piped=True)
    assert re.search(f"^{name} .* {LONG_NAME} 5", piped, re.MULTILINE)
    assert max(map(len, api.render_hosts(answers, width=80, color=False).split("\n"))) <= 80


@pytest.mark.parametrize(
    ("script", "width", "bar", "command"),
    [
        ("train.py", 80, "██░░ ", " python train.py"),
        ("train_now.py", 80, "", " python train_now.py"),
        ("train_the_model.py", 80, "", " python train_the_mod.."),
        ("train_the_model.py", 100, "█████░░░░░ ", " python train_the_model.py"),
        ("train_the_model_again_now.py", 100, "██░░ ", " python train_the_model_again_now.py"),
    ],
)
def test_the_bar_gives_way_to_the_command(script: str, width: int, bar: str, command: str) -> None:
    """Before its words are cut; what it runs says more than the third way to write how full the memory is."""
    claim = api.Holder(48213, "anna", None, f"python {script}", 1.0, until=12_000.0)
    lines = shown(host(12_001.0, api.GpuStatus(WARM, "claimed", claim=claim)), width)
    assert lines[4].startswith(f"  0  claimed  {bar}42/80G")
    assert lines[4].endswith(command)


def test_verbose_lists_the_processes_on_each_gpu() -> None:
    claim = api.Holder(7, "anna", "sge:8", "train", 1.0)
    processes = (
        api.ProcessStatus(7, "anna", "/usr/bin/python train.py", "compute", 20 << 30),
        api.ProcessStatus(4242, "b\x1b[2Jn\r", "./x\ny \x1b]0;z\x07", "graphics", 22 << 30),
        api.ProcessStatus(9, None, None, "mps", None),
    )
    gpus = [
        api.GpuStatus(WARM, "claimed", claim=claim, processes=processes),
        api.GpuStatus(api.Gpu(2, "GPU-2"), "free"),
    ]
    plain, verbose = (words(shown(host(62.0, *gpus), 100, verbose=one))[4:] for one in (False, True))
    assert verbose == [
        "0 claimed █████░░░░░ 42/80G 7% 61C anna 8 1m train",
        "graphics ██▌░░░░░░░ 22/80G b [2Jn pid 4242 x y ]0;z",
        "compute ██▌░░░░░░░ 20/80G anna pid 7 python train.py",
        "mps ?/80G ? pid 9 (cannot be seen here)",
        "2 free - -",
    ]
    assert plain == [verbose[0], verbose[-1]]


def test_json_has_the_state_of_the_table() -> None:
    held = api.GpuStatus(api.Gpu(0, "GPU-0"), "claimed", claim=api.Holder(1, since=1.0))
    states = {
        "claimed": held,
        "idle": replace(held, idle=True),
        "shared": replace(held, claim=api.Holder.of_sharers([held.claim])),
        "at risk": replace(held, claim=api.Holder(1, since=1.0, removable_by="eve")),
        "drained": api.GpuStatus(held.gpu, "unusable", drained=True),
        "unusable": api.GpuStatus(held.gpu, "unusable"),
        "free": api.GpuStatus(held.gpu, "free"),
    }
    status = host(100.0, *states.values())
    assert [one["state_shown"] for one in status.to_dict()["gpus"]] == [*states]
    table = "\n".join(shown(status))
    assert [state for state in states if f"\n  0  {state} " not in table] == []


def test_each_sharer_has_its_row_and_its_notes() -> None:
    gib = 1 << 30
    first = api.Holder(7, "anna", "sge:8", "train", 1.0, share=20 * gib, memory_used=30 * gib)
    second = api.Holder(9, "ben", None, "infer", 90.0, share=40 * gib, memory_used=gib, until=95.0)
    gpu = api.Gpu(0, "GPU-0", memory_total=80 * gib, memory_used=31 * gib, utilization=5)
    one = api.GpuStatus(gpu, "claimed", claim=api.Holder.of_sharers((first, second)), share_free=10 * gib, idle=True)
    status = host(100.0, one)
    assert words(shown(status))[4:] == [
        "0 shared █▌░░ 31/80G 5% 2 claims, 10 GiB unclaimed",
        "share ████ 30/20G anna 8 1m train",
        "share ░░░░ 1.0/40G ben pid 9 10s -5s infer",
        "",
        "GPU 0: process 7: uses more than its share: 30 GiB of 20 GiB",
    ]
    assert "0 idle" in words(shown(replace(status, taken_at=150.0)))[4]
    other = replace(
        one, gpu=gpu._replace(index=1), claim=api.Holder.of_sharers([first])
    )  # the same claim on another GPU
    assert sum("anna 8 1m train" in line for line in words(shown(host(100.0, one, other)))) == 2


def test_a_narrow_queue_leaves_out_the_least_important() -> None:
    waiter = api.WaiterStatus(1, 7, "averylonguser", 12, 5.0, hold_for=90.0, job="sge:1234567.890", share=1 << 34)
    waiter = replace(waiter, limit=(10, 12), expected_start=3600.0)
    narrow, usual = (shown(host(10.0, queue=(waiter,)), width)[-2:] for width in (72, 80))
    assert usual == [
        "#  USER      JOB/PID      WANTS              WAITED  STARTS",
        "1  averyl..  1234567.890  16 GiB of 12 GPUs      5s  in 59m, at limit (10 of 12)",
    ]
    assert "GPUs  in 59m, at limit (10 of 12)" in narrow[1]


# Title -> what stands below it. The bar of memory is 10 columns wide.
CELLS = {
    "GPU": "0",
    "STATE": "claimed",
    "MEMORY": "█████░░░░░ 42/80G",
    "UTIL": "95%",
    "TEMP": "61C",
    "FAN": "30%",
    "POWER": "60/400W",
    "USER": "anna",
    "JOB/PID": "8",
    "HELD": "1m",
    "LEFT": "33s",
    "COMMAND": "train",
    "NEW": "new-cell",
}
RIGHT = {column.title for column in (*api.COLUMNS_OF_GPU, *api.COLUMNS_OF_USER) if column.right} - {"MEMORY"}


def all_titles() -> list[str]:
    return [column.title for column in (*api.COLUMNS_OF_GPU, *api.COLUMNS_OF_USER)]


def test_each_column_has_its_cell() -> None:
    """One whose text is never put into a row is empty in all, and so never shown."""
    missing = set(all_titles()) - set(CELLS)
    assert missing == set(), "write into CELLS of this file what they show of the GPU of the test below"
    assert set(CELLS) - set(all_titles()) == {"NEW"}, "give it a GpuColumn"


def test_titles_are_single_words() -> None:
    """Columns are told apart by their titles."""
    titles = all_titles()
    assert [title for title in titles if titles.count(title) > 1] == []
    assert [title for title in titles if not re.fullmatch("[A-Z/]+", title)] == [], "one word of capital letters"


def test_columns_are_left_out_one_by_one() -> None:
    at_all_widths = {"GPU", "STATE", "MEMORY", "UTIL", "USER"}
    ranks = {column.title: column.left_out for column in (*api.COLUMNS_OF_GPU, *api.COLUMNS_OF_USER)}
    without = {title for title, rank in ranks.items() if rank is None}
    assert without == at_all_widths, "give each other column a rank `left_out`"
    given = [rank for rank in ranks.values() if rank is not None]
    of_two = [title for title, rank in ranks.items() if given.count(rank) > 1]
    assert of_two == [], "each has a rank of its own: move the others in safe_gpu/status/table.py"


def test_numbers_stand_on_the_right() -> None:
    numbers = [column for column in api.COLUMNS_OF_GPU if CELLS.get(column.title, "")[:1].isdigit()]
    assert [column.title for column in numbers if not column.right] == [], "set `right=True`"


def test_a_number_that_is_0_is_known() -> None:
    numbers = {field for field, hint in get_type_hints(api.Gpu).items() if hint == int | None}
    zero = WARM._replace(**dict.fromkeys(numbers - {"memory_total", "mig_instance", "power_limit"}, 0), power_limit=400)
    titles, row = shown(host(62.0, api.GpuStatus(zero, "free")), 200, verbose=True)[3:5]
    assert "-" not in row.split(), titles
    of_numbers = [column.title for column in api.COLUMNS_OF_GPU if re.search("[0-9]", CELLS[column.title])]
    assert [title for title in of_numbers if title not in titles.split()] == [], "0 is a value: only None is not known"


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("group", ["COLUMNS_OF_GPU", "COLUMNS_OF_USER"])
def test_a_column_can_be_put_anywhere(monkeypatch: pytest.MonkeyPatch, group: str, right: bool) -> None:
    """Each title stands over its own cells, which keep their colours, wherever another column is put."""
    claim = api.Holder(7, "anna", "sge:8", "train", 1.0, until=95.0)
    gpu = WARM._replace(utilization=95, fan=30, power=60, power_limit=400)
    status = host(62.0, api.GpuStatus(gpu, "claimed", claim=claim))
    right_titles = RIGHT | ({"NEW"} if right else set())
    new = api.GpuColumn("NEW", lambda row: "new-cell", right=right)
    columns = getattr(api, group)
    for place in range(len(columns) + 1):
        monkeypatch.setattr(f"safe_gpu.status.table.{group}", (*columns[:place], new, *columns[place:]))
        titles, row = shown(status, 200, verbose=True)[3:5]
        missing = set(CELLS) - set(titles.split())
        assert missing == set(), "not shown: its text in _gpu_row of safe_gpu/status/rows.py, or its value in this GPU"
        for title, cell in CELLS.items():
            begin = titles.index(title)
            if title in right_titles:
                begin += len(title) - len(cell)
            assert row[begin:].startswith(cell), f"{title} with NEW at {place}:\n{titles}\n{row}"
        painted = api.render(status, width=200, color=True)
        for cell in ("\x1b[36mclaimed\x1b[0m", "\x1b[36m█████\x1b[0m\x1b[2m░░░░░\x1b[0m 42/80G", "\x1b[1m 95%\x1b[0m"):
            assert cell in painted


def test_a_text_replaces_the_cells_about_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new column beside USER is replaced, one beside POWER is not."""
    one = api.GpuStatus(WARM, "claimed", claim=api.Holder.of_sharers([api.Holder(7, "anna", since=1.0)]))
    new = api.GpuColumn("NEW", lambda row: "new-cell")
    monkeypatch.setattr("safe_gpu.status.table.COLUMNS_OF_USER", (new, *api.COLUMNS_OF_USER))
    titles, row, _ = shown(host(62.0, one), 200)[3:6]
    assert row.index("1 claim") == titles.index("NEW")
    monkeypatch.setattr("safe_gpu.status.table.COLUMNS_OF_USER", api.COLUMNS_OF_USER)
    monkeypatch.setattr("safe_gpu.status.table.COLUMNS_OF_GPU", (*api.COLUMNS_OF_GPU, new))
    titles, row, _ = shown(host(62.0, one), 200)[3:6]
    assert row.index("new-cell") == titles.index("NEW")
    assert row.index("1 claim") == titles.index("USER")


# On terminals, with and without colour, and in pictures


@pytest.fixture
def in_a_terminal() -> None:
    """Skip where none can be made."""
    for fd in open_terminal():
        os.close(fd)


@pytest.mark.parametrize("width", [40, 120])
def test_nothing_is_wider_than_the_terminal(in_a_terminal: None, width: int) -> None:
    colored = made_up.screen(width)
    plain = made_up.screen(width, NO_COLOR="1")
    assert ANSI.sub("", colored) == plain
    assert "\x1b[36m█" in colored or width == 40
    assert "\x1b" not in plain
    assert made_up.screen(width, TERM="dumb") == plain
    assert max(map(api.display_width, plain.splitlines())) <= width
    assert "█" in plain or width == 40
    ascii_only = made_up.screen(width, NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert ascii_only == plain.translate(str.maketrans("█▌░", "##-"))


def text_of(path: Path) -> str:
    """The text of a picture, each piece in its column of its line."""
    lines: dict[float, str] = {}
    for piece in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"):
        line = lines.get(height := float(piece.attrib["y"]), "")
        column = round(float(piece.attrib["x"]) / 12.2)
        lines[height] = line.ljust(column) + (piece.text or "").replace("\xa0", " ")
    return "\n".join(lines[height].rstrip() for height in sorted(lines))


@pytest.mark.skipif(not picture.PICTURES.exists(), reason="this is not a checkout: its pictures are not here")
@pytest.mark.parametrize("name", picture.TERMINALS)
def test_the_pictures_are_of_today(in_a_terminal: None, name: str) -> None:
    """``python tools/picture.py`` draws them anew."""
    width, words = picture.TERMINALS[name]
    expected = f"$ safe-gpu {' '.join(words)}\n{made_up.screen(width, words, NO_COLOR='1')}"
    is_of_today = text_of(picture.PICTURES / f"{name}.svg").rstrip() == expected.rstrip()
    assert is_of_today, "draw it anew with python tools/picture.py, which needs rich, and look at it"


# How long a claimed GPU has shown no work

SINCE = time.time() - 1000.0
BUSY = api.GpuStatus(api.Gpu(0, "GPU-a", utilization=50), "claimed", claim=api.Holder(7, "anna", since=SINCE, uid=4711))
STILL = replace(BUSY, gpu=api.Gpu(0, "GPU-a", utilization=0))
NOBODY = replace(BUSY, idle=True)
UNKNOWN = replace(BUSY, gpu=api.Gpu(0, "GPU-a"))


@pytest.fixture
def marks(state_dir: Path) -> Path:
    (state_dir / "history").mkdir(parents=True)
    for path in (state_dir, state_dir / "history"):
        path.chmod(0o1777)
    return state_dir / "history"


def idle(one: api.GpuStatus, later: float = 0.0) -> float | None:
    """How long a GPU has shown no work, that many seconds from now."""
    return api.with_idle_times([one], time.time() + later)[0].idle_for


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=60)


def test_it_counts_from_the_first_look_without_work(marks: Path) -> None:
    assert idle(STILL) == 0
    looks = [(NOBODY, 100), (STILL, 300), (BUSY, 310), (STILL, 0), (STILL, 200), (UNKNOWN, 210)]
    assert [idle(one, later) for one, later in looks] == [about(100), about(300), 0, 0, about(200), 0]
    assert idle(STILL, 220) == 0
    os.utime(marks / "GPU-a.idle", (SINCE - 1, SINCE - 1))
    assert [idle(STILL, 50), idle(STILL, 70)] == [0, about(70)], "another claim begins anew"
    os.utime(marks / "GPU-a.idle", (9e9, 9e9))
    assert idle(STILL) == 0, "a mark from the future makes no negative time"


def test_a_gpu_that_is_held_is_marked_at_each_look(marks: Path) -> None:
    assert idle(replace(STILL, claim=None)) is None
    assert list(marks.iterdir()) == []
    idle(BUSY)
    os.utime(marks / "GPU-a.seen", (SINCE, SINCE))
    before = time.time() - 1
    idle(replace(BUSY, claim=api.Holder.of_sharers([BUSY.claim, BUSY.claim])))
    assert (marks / "GPU-a.seen").stat().st_mtime > before
    assert {path.stat().st_mode & 0o7777 for path in marks.iterdir()} == {0o666}


@pytest.mark.parametrize("kind", ["fifo", "link", "closed"])
def test_a_mark_that_cannot_be_written_is_none(marks: Path, kind: str) -> None:
    precious = marks.parent / "precious"
    write_for_all(precious, "x")
    os.utime(precious, (SINCE, SINCE))
    for name in ("GPU-a.idle", "GPU-a.seen"):
        if kind == "fifo":
            os.mkfifo(marks / name)
        elif kind == "link":
            (marks / name).symlink_to(precious)
        else:
            (marks / name).touch(0o600)
    assert [idle(STILL), idle(STILL, 100)] == [0, 0]
    assert (precious.read_text(), precious.stat().st_mtime) == ("x", pytest.approx(SINCE, abs=1e-3))


# The expected starts of the queue

NOW = 1000.0
TOKEN = "0123456789abcdef"  # of the claims inside which others claim

numbers = itertools.count(1)


def gpu(index: int, state: str = "claimed", until: float | None = None) -> api.GpuStatus:
    claim = api.Holder(1, since=1.0, until=until) if state == "claimed" else None
    return api.GpuStatus(api.Gpu(index, f"GPU-{index}"), state, claim=claim)


def ticket(nb_gpus: int, hold_for: float | None = None, inside: str = "", **more: Any) -> api.Entry:
    number = next(numbers)
    said = {"v": 1, "nb_gpus": nb_gpus, "gpus": ["GPU-0", "GPU-1"], "hold_for": hold_for, "inside": inside, **more}
    return api.Entry.read(f"{number}.{'0' * 16}", 0, (1, number), json.dumps(said).encode())


NEWER = ticket(1, wish="of a later version")
LEASED = [gpu(0, until=1100.0), gpu(1, until=1300.0)]


@pytest.mark.parametrize(
    ("tickets", "gpus", "expected"),
    [
        pytest.param([ticket(2, 60), ticket(1)], LEASED, [1300.0, 1360.0], id="one after the other"),
        pytest.param([ticket(2), ticket(1, 60)], LEASED, [1300.0, 1100.0], id="passes"),
        pytest.param([ticket(2)], [gpu(0, until=1100.0), gpu(1)], [None], id="a holder did not say"),
        pytest.param([ticket(1)], [gpu(0, until=900.0), gpu(1)], [NOW], id="overdue"),
        pytest.param([ticket(2), ticket(1)], [gpu(0, "busy"), gpu(1, until=1100.0)], [None, 1100.0], id="a stranger"),
        pytest.param([NEWER, ticket(1)], LEASED, [None, None], id="one that nobody understands"),
        pytest.param([ticket(2, inside=TOKEN), ticket(2)], LEASED, [None, 1300.0], id="inside a claim"),
    ],
)
def test_when_waiters_can_expect_to_start(tickets: Any, gpus: Any, expected: Any) -> None:
    assert [start for start, _ in api.expected_starts(tickets, gpus, NOW)] == expected


@pytest.mark.parametrize(
    ("ticket", "gpus", "expected"),
    [
        pytest.param(ticket(1, 60), [gpu(0, "free"), gpu(1, "free")], NOW, id="ends in time"),
        pytest.param(ticket(1, 200), [gpu(0, "free"), gpu(1)], 2000.0, id="after the window"),
    ],
)
def test_a_window_puts_a_start_off(ticket: Any, gpus: Any, expected: float) -> None:
    windows = [api.Window(1100.0, 2000.0, ("GPU-0",), "user:4711", "", "root")]
    anna, ben = ticket._replace(uid=4711), ticket._replace(uid=4712)
    api.look_up_admitted_users(windows, [4711, 4712])
    assert [start for start, _ in api.expected_starts([ben], gpus, NOW, windows=windows)] == [expected]
    assert api.expected_starts([anna], gpus, NOW, windows=windows) == api.expected_starts([anna], gpus, NOW)


def test_before_when_a_waiter_probably_does_not_start() -> None:
    assert api.expected_starts([ticket(2), ticket(1)], LEASED, NOW) == [(1300.0, 1300.0), (None, 1300.0)]


@pytest.mark.parametrize(
    ("most", "share", "expected"),
    [
        (2, None, (2.0, 2, 1100.0)),  # until one of the two ends
        (2, 1 << 30, None),  # two halves
        (1, 1 << 30, (1.0, 1, 1300.0)),
    ],
)
def test_who_is_at_a_limit_and_until_when(most: int, share: int | None, expected: Any) -> None:
    gpus = [
        replace(one, gpu=one.gpu._replace(memory_total=3 << 30), claim=one.claim._replace(uid=4711, share=share))
        for one in LEASED
    ]
    asked = ticket(1)._replace(uid=4711)
    found = api.at_limits([asked, ticket(1)], gpus, {4711: api.Limits(max_gpus=most)}, NOW)
    assert found == ({} if expected is None else {asked.name: expected})


def test_power_and_fan_are_shown_with_the_processes_where_they_fit() -> None:
    gpus = tuple(
        api.GpuStatus(WARM._replace(index=fan, fan=fan, power=60 + fan, power_limit=400), "free") for fan in (0, 9)
    )
    status = api.HostStatus("h", "nvml", "1", "/d", 3001.0, gpus)

    def shown(**options: object) -> list[list[str]]:
        return [line.split() for line in api.render(status, color=False, **options).split("\n")[3:6]]  # type: ignore[arg-type]

    titles, first, second = shown(width=80, verbose=True)
    assert titles == ["GPU", "STATE", "MEMORY", "UTIL", "TEMP", "FAN", "POWER"]
    assert (first[-2:], second[-2:]) == (["0%", "60/400W"], ["9%", "69/400W"])
    assert shown(width=40, verbose=True)[0][-2:] == ["TEMP", "POWER"]
    assert {"FAN", "POWER"}.isdisjoint(shown(width=120)[0] + shown(width=30, verbose=True)[0])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")
@pytest.mark.parametrize(
    ("text", "mode", "most"),
    [("max_gpus = 4", 0o644, 4), ("max_gpus = 4", 0o666, None), ("max_gpus = 4\nmax_hold = x", 0o644, None)],
)
def test_a_file_that_does_not_count_limits_nobody(dgx: Any, rules: Any, text: str, mode: int, most: Any) -> None:
    dgx.hold(0, uid=4711)
    rules(f"[default]\n{text}").chmod(mode)
    status = api.gather()
    assert (status.max_gpus.get("4711"), status.gpus[0].state) == (most, "claimed")
