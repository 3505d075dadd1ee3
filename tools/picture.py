"""Pictures of ``safe-gpu status`` for the pages: the command in a terminal of 80 and of 120 columns, and the page that
it makes for browsers in a wide window and on a telephone, as SVG.

The hosts are made up, in ``picture.json``, so that they show much in few lines; all else is what the command prints.
Run it where ``rich`` is installed, which only draws:

    python tools/picture.py                 # writes all pictures in .github/pictures
    python tools/picture.py status --watch  # shows that host in this terminal
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from safe_gpu.cli import hosts as status
from safe_gpu.cli.commands import main as command
from safe_gpu.drivers.presets import preset
from safe_gpu.gpus.devices import Holder
from safe_gpu.gpus.windows import Window
from safe_gpu.status import gather
from safe_gpu.status.facts import GpuStatus, HostStatus, WaiterStatus
from safe_gpu.status.page import figures_of, render_page
from safe_gpu.status.report import ReportRow

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / ".github" / "pictures"
ALL_HOSTS = ("status", "--all-hosts", "--sort", "free")
PICTURE = {"status-80": (80, ("status",)), "status-120": (120, ("status",)), "hosts-100": (100, ALL_HOSTS)}
PAGES = {"wide": (1400, 540), "telephone": (360, 1450)}  # pixels
MADE_UP = json.loads(Path(__file__).with_name("picture.json").read_text())
NOW = float(MADE_UP["now"])
COURSE = Window(**MADE_UP["course"])
DAY = [ReportRow(*row) for row in MADE_UP["day"]]


def scene() -> HostStatus:
    """Eight GPUs: a claim of four, one that is shared, one that is idle, one that is drained, one free; two wait."""
    gpus = []
    for gpu, made_up in zip(preset("dgx-a100").gpus, MADE_UP["gpus"], strict=True):
        holders = [Holder(**MADE_UP["claims"][user]) for user in made_up["claims"]]
        claim = Holder.of_sharers(holders) if len(holders) > 1 else next(iter(holders), None)
        gpus.append(GpuStatus(gpu._replace(**made_up["gpu"]), claim=claim, **made_up["status"]))
    waiters = [WaiterStatus(**waiter) for waiter in MADE_UP["queue"]]
    return HostStatus("gpu1", "nvml", "550.54.15", "/tmp/safe-gpu", NOW, (*gpus,), (*waiters,))


def answer(host: str) -> status.Answer:
    """What a host answers: one like that above, another one, or none."""
    made_up, document = MADE_UP["hosts"][host], scene().to_dict()
    if "error" in made_up:
        return status.Answer(error=made_up["error"])
    if "gpus" in made_up:
        gpus = [document["gpus"][-1] | gpu for gpu in made_up["gpus"] for _ in range(gpu["number"])]
        document |= {"host": host, "queue": [], "gpus": gpus}
    return status.Answer(document, figures_of(document, NOW))


def page_as_svg(width: int, height: int) -> str:
    """The page for browsers in a window of that size: what is within its ``body``, with the style that is meant there.

    Times are in UTC, as ``main`` and the test set it.
    """
    text = render_page({"gpu1": replace(scene(), windows=(COURSE,)).to_dict()}, now=NOW, every=300.0, use={"gpu1": DAY})
    (css,), (body,) = (re.findall(f"<{tag}>\n?(.*)</{tag}>", text, re.DOTALL) for tag in ("style", "body"))
    css = re.sub(r"\(min-width:(\d+)px\)", lambda found: " all" if width >= int(found[1]) else " not all", css)
    css = re.sub(r"\(max-width:(\d+)px\)", lambda found: " all" if width <= int(found[1]) else " not all", css)
    css = re.sub(r"animation:[^;}]*", "", css)
    content = re.sub(r"<script .*?</script>", "", body, flags=re.DOTALL).strip()
    content = content.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{css}\nsvg:root{{background:var(--paper)}}</style>\n"
        f'<foreignObject width="{width}" height="{height}"><body xmlns="http://www.w3.org/1999/xhtml">\n{content}\n'
        "</body></foreignObject></svg>\n"
    )


def screen(columns: int, words: Sequence[str] = ("status",), **environment: str) -> str:
    """What ``safe-gpu status`` writes to a terminal that wide."""
    sys.path.append(str(ROOT / "tests"))
    from support.terminals import Terminal

    terminal = Terminal(columns, 40)
    environment = {**os.environ, "COLUMNS": "", "NO_COLOR": "", "TERM": "xterm-256color", **environment}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    with subprocess.Popen([sys.executable, __file__, *words], env=environment, **streams):
        terminal.read_to_the_end()
    terminal.close()
    return terminal.raw.replace("\r\n", "\n")


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
        gather.gather = scene  # type: ignore[assignment]
        status.answers_of = lambda *_: {host: answer(host) for host in MADE_UP["hosts"]}
        os.environ["SAFE_GPU_HOSTS"] = "gpu1"
        sys.exit(command(sys.argv[1:]))
    os.environ["TZ"] = "UTC"
    time.tzset()
    for name, size in PAGES.items():
        (PICTURES / f"page-{name}.svg").write_text(page_as_svg(*size))
    for name, (width, words) in PICTURE.items():
        (PICTURES / f"{name}.svg").write_text(svg(screen(width, words), width, words))
