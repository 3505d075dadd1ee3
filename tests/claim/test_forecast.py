"""What a waiter is told of its start: the words by a table, the facts from real holders and waiters."""

import json
import re
import subprocess
import time
from typing import Any

import pytest

from safe_gpu.claim.report import Forecast

NOW = time.mktime((2026, 11, 21, 13, 0, 0, 0, 0, -1))
MINUTE = 60.0
SOON = NOW + 80 * MINUTE
AT = "starts about"

TOLD = {
    "nothing is known": (Forecast(), ""),
    "all ends are known": (Forecast(SOON, SOON), f"{AT} 14:20"),
    "the earliest": (Forecast(None, SOON), "probably not before 14:20"),
    "the earliest has passed": (Forecast(None, NOW), ""),
    "tomorrow": (Forecast(NOW + 86400, None), f"{AT} Sun 13:00"),
    "next week": (Forecast(NOW + 8 * 86400, None), f"{AT} 2026-11-29"),
    "others may come first": (Forecast(SOON, SOON, may_move=True), "starts 14:20 or later"),
    "any moment": (Forecast(NOW, NOW), ""),
}


@pytest.mark.parametrize(("expected", "start"), TOLD.values(), ids=TOLD.keys())
def test_the_words(expected: Forecast, start: str) -> None:
    assert expected.text(NOW) == start


def test_a_waiter_is_told_when_it_can_start(child: Any, command: Any) -> None:
    claim = "safe_gpu.claim_gpus(7, safe_gpu.NoPlaceholder(), affinity=None, hold_for=7200)"
    assert child(f"import safe_gpu\n{claim}\nsay('got'); listen()").hear() == "got"
    large = command.start("run", "-n", 8, "--for", "1h", "--", "true", stderr=subprocess.PIPE)
    clock = r"(?:\w{3} )?\d\d:\d\d"
    assert re.search(rf"waiting 0:0\d for 8 GPUs \(1 free\), starts about {clock}; GPU 0-6: ", large.stderr.readline())
    small = command.start("wait", "-n", 8, "--for", "30m", stderr=subprocess.PIPE)
    assert re.search(rf"for 8 GPUs \(1 free\), #2 in the queue, starts about {clock}; behind ", small.stderr.readline())
    queue = json.loads(command.run("status", "--json").stdout)["queue"]
    assert queue[0]["expected_start"] == pytest.approx(time.time() + 7200, abs=600)
    assert queue[1]["expected_start"] == pytest.approx(queue[0]["expected_start"] + 3600, abs=1)
    assert re.search(r"#.* PLANNED +STARTS\n.* 1h00m +in 1h\d\dm\n.* 30m +in 2h\d\dm\n", command.run("status").stdout)


def test_the_head_is_told_who_passed_it(ground: Any, child: Any) -> None:
    ground.hold(*range(7), until=time.time() + 7200)
    large = child(
        "import logging, sys, time, safe_gpu\n"
        "from safe_gpu.claim import report as news\n"
        "news._REPORT_INTERVAL = news._WARNING_DELAY = 0.2\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.INFO, format='%(message)s')\n"
        "safe_gpu.claim_gpus(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=60)\n"
    )
    while "waiting for 8 GPUs" not in large.hear():
        pass
    claim = "safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, hold_for=600)"
    child(f"import safe_gpu; {claim}; say('has'); listen()", "has")
    while not re.search(r"; passed by 1 claim; GPU ", large.hear()):
        pass


def test_run_mentions_for_once_where_it_may_help(ground: Any, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ground.hold(*range(8))
    first = command.start("run", "--", "true", stderr=subprocess.PIPE)
    assert "for 1 GPU" in first.stderr.readline()
    second = command.start("run", "--", "true", stderr=subprocess.PIPE)
    assert "behind" in second.stderr.readline()
    assert "--for 30m" in second.stderr.readline()
    third = command.start("run", "--for", "1h", "--", "true", stderr=subprocess.PIPE)
    assert "behind" in third.stderr.readline()
    monkeypatch.setenv("SAFE_GPU_FOR", "1h")
    fourth = command.start("run", "--", "true", stderr=subprocess.PIPE)
    assert "behind" in fourth.stderr.readline()
    ground.let_go()
    for one in (first, second, third, fourth):
        assert "--for" not in one.communicate(timeout=60)[1]
