"""Hosts that are made up, in ``made_up.json``, to show much in few lines; all else is what the command prints.

python tests/support/made_up.py status --watch  # shows one of them in this terminal
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from safe_gpu.cli import hosts
from safe_gpu.cli.commands import main
from safe_gpu.drivers.simulated import find_preset
from safe_gpu.gpus.devices import Holder
from safe_gpu.gpus.windows import Window
from safe_gpu.status import gather
from safe_gpu.status.document import figures_of
from safe_gpu.status.facts import GpuStatus, HostStatus, WaiterStatus
from safe_gpu.status.report import ReportRow

MADE_UP = json.loads(Path(__file__).with_suffix(".json").read_text())
NOW = float(MADE_UP["now"])
COURSE = Window(**MADE_UP["course"])
DAY = [ReportRow(*row) for row in MADE_UP["day"]]


def scene() -> HostStatus:
    """Eight GPUs: a claim of four, one that is shared, one that is idle, one that is drained, one free; two wait."""
    gpus = []
    for gpu, made_up in zip(find_preset("dgx-a100").gpus, MADE_UP["gpus"], strict=True):
        holders = [Holder(**MADE_UP["claims"][user]) for user in made_up["claims"]]
        claim = Holder.of_sharers(holders) if len(holders) > 1 else next(iter(holders), None)
        gpus.append(GpuStatus(gpu._replace(**made_up["gpu"]), claim=claim, **made_up["status"]))
    waiters = [WaiterStatus(**waiter) for waiter in MADE_UP["queue"]]
    return HostStatus("gpu1", "nvml", "550.54.15", "/tmp/safe-gpu", NOW, (*gpus,), (*waiters,))


def answer(host: str) -> hosts.Answer:
    """What a host answers: one like that above, another one, or none."""
    made_up, document = MADE_UP["hosts"][host], scene().to_dict()
    if "error" in made_up:
        return hosts.Answer(error=made_up["error"])
    if "gpus" in made_up:
        gpus = [document["gpus"][-1] | gpu for gpu in made_up["gpus"] for _ in range(gpu["number"])]
        document |= {"host": host, "queue": [], "gpus": gpus}
    return hosts.Answer(document, figures_of(document, NOW))


def screen(columns: int, words: Sequence[str] = ("status",), **environment: str) -> str:
    """What ``safe-gpu status`` writes to a terminal that wide."""
    from .terminals import Terminal

    terminal = Terminal(columns, 40)
    environment = {**os.environ, "COLUMNS": "", "NO_COLOR": "", "TERM": "xterm-256color", **environment}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.slave)
    with subprocess.Popen([sys.executable, __file__, *words], env=environment, **streams):
        terminal.read_to_the_end()
    terminal.close()
    return terminal.raw.replace("\r\n", "\n")


if __name__ == "__main__":
    gather.gather = lambda patience: scene()  # type: ignore[assignment]
    hosts.statuses_of = lambda *_: {host: answer(host) for host in MADE_UP["hosts"]}
    os.environ["SAFE_GPU_HOSTS"] = "gpu1"
    sys.exit(main(sys.argv[1:]))
