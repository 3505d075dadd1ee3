"""The table of ``status`` from made-up facts: what stands in which column and note; on terminals; and its pictures."""

import os
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.real import tool
from support.terminals import open_terminal

from safe_gpu.gpus.devices import Gpu, Holder
from safe_gpu.status.facts import GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from safe_gpu.status.render import render
from safe_gpu.wording.text import display_width

picture = tool("picture")
texts = st.text(max_size=40)
ages = st.none() | st.floats(0, 2e9)
pids, names, amounts = st.integers(1, 1 << 22), st.none() | texts, st.none() | st.integers(0, 1 << 38)
holders = (st.none() | pids, names, names, st.none() | st.text(max_size=200), ages)
claims = st.none() | st.builds(Holder, *holders, stopped=st.booleans(), note=texts, until=ages, sharers=st.just(()))
loads = {"memory_total": amounts, "memory_used": amounts, "utilization": st.none() | st.integers(0, 100)}
gpus = st.builds(lambda index, name, **load: Gpu(index, "GPU-1", name, **load), st.integers(0, 31), texts, **loads)
processes = st.lists(st.builds(ProcessStatus, pids, names, names, st.just("compute"), amounts), max_size=2)
facts = {"idle": st.booleans(), "reason": texts, "claim": claims, "inside": claims, "processes": processes.map(tuple)}
states = st.sampled_from("free claimed busy display unusable".split())
waits = (st.booleans(), texts, st.none() | st.floats(1, 1e6), ages, st.none(), amounts, names)
waiters = st.builds(
    WaiterStatus, st.integers(1, 999), st.none() | pids, names, st.none() | st.integers(1, 64), ages, *waits
)
hosts = st.builds(
    HostStatus,
    *map(st.just, ("gpu01.example.org", "nvml", "550.54.15", "/tmp/safe-gpu", 1.8e9)),
    gpus=st.lists(st.builds(GpuStatus, gpus, states, **facts), max_size=4).map(tuple),
    queue=st.lists(waiters, max_size=3).map(tuple),
    warnings=st.lists(texts, max_size=1).map(tuple),
)
ANSI = re.compile(r"\x1b\[[0-9]+m")


def host(taken_at: float, *gpus: GpuStatus, queue: tuple[WaiterStatus, ...] = ()) -> HostStatus:
    return HostStatus("h", "nvml", "1", "/d", taken_at, gpus, queue)


def shown(status: HostStatus, width: int = 80, **options: bool) -> list[str]:
    """The lines of the table, without colour."""
    return render(status, width=width, color=False, **options).split("\n")


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


@settings(max_examples=30)
@given(hosts, st.sampled_from([40, 80, 100, 200]))
def test_no_line_is_too_wide_and_nothing_plays_tricks(status: HostStatus, width: int) -> None:
    text = render(status, width=width, color=False)
    lines = text.split("\n")
    assert max(map(display_width, lines)) <= width
    for line in lines:
        assert line.isprintable()
    colored = render(status, width=width, color=True)
    assert "\x1b[" in colored
    assert ANSI.sub("", colored) == text


def test_a_crowd_of_waiters_is_cut() -> None:
    crowd = tuple(WaiterStatus(place, place + 10, "anna", 1, None, note="odd") for place in range(1, 1501))
    status = host(12_001.0, queue=crowd)
    lines = shown(status)
    assert lines[-1] == "... and 1400 more"
    assert sum("anna" in line for line in lines) == 100
    plain = replace(status, queue=tuple(replace(one, note="", job=f"sge:7.{one.position}") for one in crowd))
    assert words(shown(plain))[-1].startswith("1-1500 anna 1500 x 1 GPU")
    assert [line for line in words(shown(plain, verbose=True)) if line.startswith("3 anna 7.3 1 GPU")]
    assert [one["position"] for one in status.to_dict()["queue"]] == list(range(1, 1001))
    assert "more" not in "".join(shown(replace(status, queue=crowd[:100])))


def test_what_gpus_have_in_common_stands_once() -> None:
    """Claims, and notes on several GPUs; a claim that is not known is not taken for the one before it."""
    claim = Holder(7, "anna", None, "train", 1.0, stopped=True, until=2.0)
    unknown = Holder(note="odd")
    drained = GpuStatus(Gpu(0, "GPU-0"), "unusable", reason="drained by root: dust", drained=True)
    held = [(0, claim), (1, claim), (2, unknown), (3, unknown), (4, claim)]
    gpus = [GpuStatus(Gpu(number, "GPU-x"), "claimed", claim=one) for number, one in held]
    gpus += [replace(drained, gpu=Gpu(number, "GPU-x")) for number in (5, 6, 7)]
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


WARM = Gpu(0, "GPU-0", memory_total=80 << 30, memory_used=42 << 30, utilization=7, temperature=61)


def test_power_and_fan_are_shown_with_the_processes_where_they_fit() -> None:
    gpus = tuple(
        GpuStatus(WARM._replace(index=fan, fan=fan, power=60 + fan, power_limit=400), "free") for fan in (0, 9)
    )
    status = HostStatus("h", "nvml", "1", "/d", 3001.0, gpus)

    def shown(**options: object) -> list[list[str]]:
        return [line.split() for line in render(status, color=False, **options).split("\n")[3:6]]  # type: ignore[arg-type]

    titles, first, second = shown(width=80, verbose=True)
    assert titles == ["GPU", "STATE", "MEMORY", "UTIL", "TEMP", "FAN", "POWER"]
    assert (first[-2:], second[-2:]) == (["0%", "60/400W"], ["9%", "69/400W"])
    assert shown(width=40, verbose=True)[0][-2:] == ["TEMP", "POWER"]
    assert {"FAN", "POWER"}.isdisjoint(shown(width=120)[0] + shown(width=30, verbose=True)[0])


def test_every_row_of_a_claim_has_its_user() -> None:
    """A name of any length is whole where another program reads it."""
    long = "annabell.with-a-long-name"[:24]
    claim = Holder(7, long, None, "train", 1.0)
    gpus = [GpuStatus(Gpu(number, f"GPU-{number}"), "claimed", claim=claim) for number in range(2)]
    assert sum(long in line for line in shown(host(62.0, *gpus), piped=True)) == 2


def test_verbose_lists_the_processes_on_each_gpu() -> None:
    claim = Holder(7, "anna", "sge:8", "train", 1.0)
    processes = (
        ProcessStatus(7, "anna", "/usr/bin/python train.py", "compute", 20 << 30),
        ProcessStatus(4242, "b\x1b[2Jn\r", "./x\ny \x1b]0;z\x07", "graphics", 22 << 30),
        ProcessStatus(9, None, None, "mps", None),
    )
    gpus = [GpuStatus(WARM, "claimed", claim=claim, processes=processes), GpuStatus(Gpu(2, "GPU-2"), "free")]
    plain, verbose = (words(shown(host(62.0, *gpus), 100, verbose=one))[4:] for one in (False, True))
    assert verbose == [
        "0 claimed █████░░░░░ 42/80G 7% 61C anna 8 1m train",
        "graphics ██▌░░░░░░░ 22/80G b [2Jn pid 4242 x y ]0;z",
        "compute ██▌░░░░░░░ 20/80G anna pid 7 python train.py",
        "mps ?/80G ? pid 9 (cannot be seen here)",
        "2 free - -",
    ]
    assert plain == [verbose[0], verbose[-1]]


def test_of_an_unknown_holder_the_process_on_the_gpu_is_shown() -> None:
    """The GPU is claimed through another state directory, whose processes this user cannot ask."""
    gpu = Gpu(0, "GPU-0", utilization=97)
    claim = Holder(elsewhere=True)
    running = ProcessStatus(7, "anna", "/usr/bin/train -x", "compute", 5)
    one = GpuStatus(gpu, "claimed", claim=claim, processes=(running,), reason="claimed elsewhere; more")
    lines = words(shown(host(100.0, one)))[4:]
    assert lines == ["0 claimed - 97% anna pid 7 ? train -x", "", "GPU 0: claimed elsewhere"]
    assert replace(one, processes=(), idle=True).shown_state(100.0) == "claimed", "since when is not known"


def test_json_has_the_state_of_the_table() -> None:
    held = GpuStatus(Gpu(0, "GPU-0"), "claimed", claim=Holder(1, since=1.0))
    states = {
        "claimed": held,
        "idle": replace(held, idle=True),
        "shared": replace(held, claim=Holder.of_sharers([held.claim])),
        "at risk": replace(held, claim=Holder(1, since=1.0, removable_by="eve")),
        "drained": GpuStatus(held.gpu, "unusable", drained=True),
        "unusable": GpuStatus(held.gpu, "unusable"),
        "free": GpuStatus(held.gpu, "free"),
    }
    status = host(100.0, *states.values())
    assert [one["state_shown"] for one in status.to_dict()["gpus"]] == [*states]
    table = "\n".join(shown(status))
    assert [state for state in states if f"\n  0  {state} " not in table] == []


def test_each_sharer_has_its_row_and_its_notes() -> None:
    gib = 1 << 30
    first = Holder(7, "anna", "sge:8", "train", 1.0, share=20 * gib, memory_used=30 * gib)
    second = Holder(9, "ben", None, "infer", 90.0, share=40 * gib, memory_used=gib, until=95.0)
    gpu = Gpu(0, "GPU-0", memory_total=80 * gib, memory_used=31 * gib, utilization=5)
    one = GpuStatus(gpu, "claimed", claim=Holder.of_sharers((first, second)), share_free=10 * gib, idle=True)
    status = host(100.0, one)
    assert words(shown(status))[4:] == [
        "0 shared █▌░░ 31/80G 5% 2 claims, 10 GiB unclaimed",
        "share ████ 30/20G anna 8 1m train",
        "share ░░░░ 1.0/40G ben pid 9 10s -5s infer",
        "",
        "GPU 0: process 7: uses more than its share: 30 GiB of 20 GiB",
    ]
    assert "0 idle" in words(shown(replace(status, taken_at=150.0)))[4]
    other = replace(one, gpu=gpu._replace(index=1), claim=Holder.of_sharers([first]))  # the same claim on another GPU
    assert sum("anna 8 1m train" in line for line in words(shown(host(100.0, one, other)))) == 2


def test_a_narrow_queue_leaves_out_the_least_important() -> None:
    waiter = WaiterStatus(1, 7, "averylonguser", 12, 5.0, hold_for=90.0, job="sge:1234567.890", share=1 << 34)
    waiter = replace(waiter, limit=(10, 12), expected_start=3600.0)
    narrow, usual, wide = (shown(host(10.0, queue=(waiter,)), width)[-2:] for width in (72, 80, 120))
    assert usual == [
        "#  USER      JOB/PID      WANTS              WAITED  STARTS",
        "1  averyl..  1234567.890  16 GiB of 12 GPUs      5s  in 59m, at limit (10 of 12)",
    ]
    assert "GPUs  in 59m, at limit (10 of 12)" in narrow[1]
    assert wide[0].split() == "# USER JOB/PID WANTS WAITED PLANNED STARTS".split()


# On terminals, with and without colour, and in pictures


@pytest.fixture
def in_a_terminal() -> None:
    """Skip where none can be made."""
    for fd in open_terminal():
        os.close(fd)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_wider_than_the_terminal(in_a_terminal: None, width: int) -> None:
    colored = picture.screen(width)
    plain = picture.screen(width, NO_COLOR="1")
    assert ANSI.sub("", colored) == plain
    assert "\x1b[36m█" in colored or width == 40
    assert "\x1b" not in plain
    assert picture.screen(width, TERM="dumb") == plain
    assert max(map(display_width, plain.splitlines())) <= width
    assert "█" in plain or width == 40
    ascii_only = picture.screen(width, NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert ascii_only == plain.translate(str.maketrans("█▌░", "##-"))


@pytest.mark.parametrize(("width", "last"), [(50, "JOB/PID"), (60, "LEFT"), (72, "COMMAND"), (100, "COMMAND")])
def test_a_column_is_whole_or_left_out(in_a_terminal: None, width: int, last: str) -> None:
    plain = picture.screen(width, NO_COLOR="1")
    assert f" {last}\n  0 " in plain
    assert (" TEMP  USER " in plain, "█" in plain) == (width == 100, width == 100)
    assert "\x1b[35mdrained" in picture.screen(width)
    assert "\x1b[1m 98%" in picture.screen(width)


def text_of(path: Path) -> str:
    """The text of a picture, each piece in its column of its line."""
    lines: dict[float, str] = {}
    for piece in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text"):
        line = lines.get(height := float(piece.attrib["y"]), "")
        column = round(float(piece.attrib["x"]) / 12.2)
        lines[height] = line.ljust(column) + (piece.text or "").replace("\xa0", " ")
    return "\n".join(lines[height].rstrip() for height in sorted(lines))


@pytest.mark.skipif(not picture.PICTURES.exists(), reason="this is not a checkout: its pictures are not here")
@pytest.mark.parametrize("name", picture.PICTURE)
def test_the_pictures_are_of_today(in_a_terminal: None, name: str) -> None:
    """``python tools/picture.py`` draws them anew."""
    width, words = picture.PICTURE[name]
    expected = f"$ safe-gpu {' '.join(words)}\n{picture.screen(width, words, NO_COLOR='1')}"
    assert text_of(picture.PICTURES / f"{name}.svg").rstrip() == expected.rstrip()
