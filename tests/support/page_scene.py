"""Hosts that are made up, for the page of ``status --html``: one with a bit of all, a crowded one; hostile texts."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.status.page import render_page
from safe_gpu.status.report import ReportRow

TOOL = Path(__file__).parents[2] / "tools" / "picture.py"
if not TOOL.exists():
    pytest.skip("this is not a checkout: there is no tools/ here", allow_module_level=True)
specification: Any = importlib.util.spec_from_file_location("picture", TOOL)
picture: Any = importlib.util.module_from_spec(specification)
specification.loader.exec_module(picture)

NOW = picture.NOW
DAY: Sequence[ReportRow] = picture.DAY
LONG = "python a_program_with_a_very_long_name_that_has_no_blank_in_it_at_all_and_goes_on_and_on.py"
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;</script>\x1b[2J\u202e\u2066\ud800 ]]>"


def host() -> dict[str, Any]:
    """The document of a host of eight GPUs, each in another state, and two waiters."""
    status = replace(picture.scene(), windows=(picture.COURSE,)).to_dict()
    document: dict[str, Any] = json.loads(json.dumps(status))
    return document


def crowded() -> dict[str, Any]:
    """That of one with sixteen GPUs, forty waiters, and long names."""
    status = host()
    gpus = [json.loads(json.dumps(status["gpus"][n % 8])) | {"index": n, "label": str(n)} for n in range(16)]
    gpus[9]["claim"] |= {"user": "first.last-with-a-long-name@example.org", "command": LONG, "until": NOW - 300_000}
    users = ("emil", "anna", "longer.name", "first.last-with-a-long-name@example.org")
    queue = [
        status["queue"][n % 2]
        | {"position": n + 1, "user": users[n % 4], "job": f"slurm:{10_000_000 + n}", "turn": 1.0}
        for n in range(40)
    ]
    queue[7] |= {"expected_start": None, "earliest_start": NOW + 100_000, "share": 20 << 30}
    return status | {"gpus": gpus, "queue": queue}


def page(hosts: Mapping[str, Any], *, now: float = NOW, every: float = 300.0, use: Any = None) -> str:
    return render_page(hosts, now=now, every=every, use={"gpu1": DAY} if use is None else use)
