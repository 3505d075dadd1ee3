"""Pictures of ``safe-gpu status`` for the pages: the command in a terminal of 80 and of 120 columns, and the page that
it makes for browsers in a wide window and on a telephone, as SVG.

The hosts are made up, so that they show much in few lines; all else is what the command prints. Run it where ``rich``
is installed, which only draws:

    python tools/picture.py                 # writes all pictures in .github/pictures
    python tools/picture.py status --watch  # shows that host in this terminal
"""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import safe_gpu
from safe_gpu.cli import hosts as status
from safe_gpu.cli.commands import main as command
from safe_gpu.cli.hosts import Answer
from safe_gpu.drivers.presets import preset
from safe_gpu.gpus.devices import Holder
from safe_gpu.gpus.windows import Window
from safe_gpu.status import gather
from safe_gpu.status.facts import GpuStatus, HostStatus, WaiterStatus
from safe_gpu.status.history import PastClaim
from safe_gpu.status.page import figures_of, render_page
from safe_gpu.status.report import ReportRow, report

PICTURES = Path(__file__).parents[1] / ".github" / "pictures"
WIDTHS = (80, 120)
ALL_HOSTS = ("status", "--all-hosts", "--sort", "free")
PICTURE = {**{f"status-{width}": (width, ("status",)) for width in WIDTHS}, "hosts-100": (100, ALL_HOSTS)}
PAGES = {"wide": (1400, 540), "telephone": (360, 1450)}  # pixels
NOW, MINUTE, GIB = 1_795_000_000.0, 60.0, 1 << 30


def claim(pid: int, user: str, job: str | None, script: str, held: float, left: float | None = None) -> Holder:
    """A claim that has been held, and will be held, for so many minutes."""
    until = None if left is None else NOW + left * MINUTE
    return Holder(pid, user, job, script, NOW - held * MINUTE, until=until)


def scene() -> HostStatus:
    """Eight GPUs: a claim of four, one that is shared, one that is idle, one that is drained, one free; two wait."""
    anna = claim(20511, "anna", "sge:4711.3", "python train.py", 200, 40)
    ben = claim(48213, "ben", None, "jupyter-lab", 1500)
    carla = claim(50017, "carla", "sge:4718", "python eval.py", 12)._replace(share=24 * GIB, memory_used=20 * GIB)
    dora = claim(50102, "dora", "sge:4719", "./simulate", 9, 51)._replace(share=40 * GIB, memory_used=22 * GIB)
    rows = [
        (anna, 71, 98),
        (anna, 71, 97),
        (anna, 70, 99),
        (anna, 71, 96),
        (ben, 0.4, 0),
        (carla, 42, 88),
        (None, 0, 0),
    ]
    gpus = [
        GpuStatus(
            gpu._replace(memory_used=int(used * GIB), utilization=load),
            "claimed" if holder else "unusable",
            claim=holder,
        )
        for gpu, (holder, used, load) in zip(preset("dgx-a100").gpus, [*rows, (None, 0, 0)], strict=True)
    ]
    gpus[4] = replace(gpus[4], idle=True)
    gpus[5] = replace(gpus[5], claim=Holder.of_sharers([carla, dora]), share_free=16 * GIB)
    gpus[6] = replace(gpus[6], drained=True, reason="drained by root: its fan is to be replaced")
    gpus[7] = replace(gpus[7], state="free")
    waiters = (
        WaiterStatus(1, 51377, "emil", 4, NOW - 25 * MINUTE, hold_for=7200, expected_start=NOW + 2400, job="sge:4720"),
        WaiterStatus(2, 51890, "anna", 1, NOW - 3 * MINUTE, hold_for=3600, expected_start=NOW + 2400, job="sge:4721",
                     limit=(4, 4)),
    )  # fmt: skip
    return HostStatus("gpu1", "nvml", "550.54.15", "/tmp/safe-gpu", NOW, tuple(gpus), waiters)


def answers(*_: object) -> dict[str, Answer]:
    """Five hosts, of which one is down and one has a password."""
    gpu = {"state": "claimed", "state_shown": "", "shares": [], "claim": None, "reason": "", "uuid": ""}

    def known(name: str, queue: Sequence[object], *gpus: tuple[str, int, dict[str, object]]) -> Answer:
        found = [gpu | {"index": 3, "name": model} | facts for model, number, facts in gpus for _ in range(number)]
        status = {"host": name, "state_dir": "", "gpus": found, "queue": queue}
        return Answer(status, figures_of(status, NOW))

    def held(user: str) -> dict[str, object]:
        return {"claim": {"user": user}}

    halves = {"shares": [{"user": user, "share": 1} for user in ("carla", "dora")], "memory_total": 2}
    lost = {"state": "unusable", "reason": "the driver cannot reach it: it is lost"}
    waiting = [{"since": NOW - 1500, "user": "emil"}, {"since": NOW - 180, "user": "anna"}]
    free, a100, h100 = {"state": "free"}, "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
    password = "a password is asked for, or your key is refused (ben@gpu5: Permission denied (publickey).)"
    return {
        "gpu1": known("1", waiting, (a100, 4, held("anna")), (a100, 1, held("ben")), (a100, 1, halves), (a100, 1, {}),
                      (a100, 1, free)),
        "gpu2": known("2", [], (h100, 2, held("emil")), (h100, 1, lost), (h100, 5, free)),
        "gpu3": Answer(error="ssh: connect to host gpu3 port 22: Connection timed out"),
        "gpu4": known("4", [], ("NVIDIA L4", 4, free), ("NVIDIA T4", 2, free)),
        "gpu5": Answer(error=password),
    }  # fmt: skip


UUIDS = [gpu.uuid for gpu in preset("dgx-a100").gpus]
COURSE = Window(NOW + 20_000, NOW + 30_000, tuple(UUIDS[:2]), "group:course", "practical course", "root")


def day() -> list[ReportRow]:
    """What that host was claimed for in the day before."""

    def past(user: str, gpus: list[str], ago: float, hours: float | None, waited: float) -> PastClaim:
        since = NOW - ago * 60 * MINUTE
        end = None if hours is None else since + hours * 60 * MINUTE
        return PastClaim(
            7, since, user=user, gpus=tuple(gpus), seen=end or NOW, ended=end, running=end is None, waited=waited
        )

    runs = [past("anna", UUIDS[:4], 3.3, None, 1500), past("ben", UUIDS[4:5], 25, None, 5)]
    runs += [past("carla", UUIDS[5:6], 20, 12, 300), past("dora", UUIDS[6:], 15, 7, 40)]
    runs += [past("emil", UUIDS[:4], 22, 13, 3600), past("anna", UUIDS[:2], 8, 4, 600)]
    return [row for row in report(runs, (), "", NOW - 24 * 60 * MINUTE, NOW) if row.by == "user"]


def page_as_svg(width: int, height: int) -> str:
    """The page for browsers in a window of that size: what is within its ``body``, with the style that is meant there.

    Times are in UTC, as ``main`` and the test set it.
    """
    status = replace(scene(), windows=(COURSE,)).to_dict()
    text = render_page({"gpu1": status}, now=NOW, every=300.0, use={"gpu1": day()})
    style, body = (re.search(f"<{tag}>\n?(.*)</{tag}>", text, re.DOTALL) for tag in ("style", "body"))
    assert style is not None
    assert body is not None
    css = re.sub(r"\(min-width:(\d+)px\)", lambda m: " all" if width >= int(m[1]) else " not all", style[1])
    css = re.sub(r"\(max-width:(\d+)px\)", lambda m: " all" if width <= int(m[1]) else " not all", css)
    css = re.sub(r"animation:[^;}]*", "", css)
    content = re.sub(r"<script .*?</script>", "", body[1], flags=re.DOTALL).strip()
    content = content.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{css}\nsvg:root{{background:var(--paper)}}</style>\n"
        f'<foreignObject width="{width}" height="{height}"><body xmlns="http://www.w3.org/1999/xhtml">\n{content}\n'
        "</body></foreignObject></svg>\n"
    )


def show(*arguments: str) -> int:
    """Run a command of safe-gpu on those hosts, and return its exit code."""
    gather.gather = scene  # type: ignore[assignment]
    status.answers_of = answers
    os.environ["SAFE_GPU_HOSTS"] = "gpu1"
    return command(arguments)


def screen(columns: int, words: Sequence[str] = ("status",), **environment: str) -> str:
    """What ``safe-gpu status`` writes to a terminal that wide."""
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
            package = str(Path(safe_gpu.__file__).parents[1])
            os.execve(
                sys.executable,
                [sys.executable, __file__, *words],
                {**kept, "PYTHONPATH": package, "TERM": "xterm-256color", **environment},
            )
        finally:
            os._exit(127)  # never as a second process of the caller
    text = b""
    try:
        while piece := os.read(terminal, 65536):
            text += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    os.waitpid(pid, 0)
    return text.decode().replace("\r\n", "\n")


def svg(text: str, columns: int, words: Sequence[str]) -> str:
    """The text of a terminal as a picture, without the fonts that rich would have a reader's browser fetch."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(file=io.StringIO(), record=True, width=columns, force_terminal=True, color_system="standard")
    console.print(Text.from_ansi(f"$ safe-gpu {' '.join(words)}\n{text}"))
    form = re.sub(r" *@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="", code_format=form, unique_id="status")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(show(*sys.argv[1:]))
    PICTURES.mkdir(parents=True, exist_ok=True)
    os.environ["TZ"] = "UTC"
    time.tzset()
    for name, (width, height) in PAGES.items():
        (PICTURES / f"page-{name}.svg").write_text(page_as_svg(width, height))
    for name, (width, words) in PICTURE.items():
        (PICTURES / f"{name}.svg").write_text(svg(screen(width, words), width, words))
