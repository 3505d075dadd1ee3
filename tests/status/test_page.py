"""``status --html``: a page that says what status says, in which nobody's text is markup; the file that is written."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.page_scene import HOSTILE, crowded, host, page, picture

from safe_gpu.cli import hosts as of_hosts
from safe_gpu.cli.commands import main
from safe_gpu.cli.hosts import Answer, Said, read_answer


class Checked:
    """A page, which is also well-formed XML. ``cells`` are the rows of the tables, by caption."""

    def __init__(self, text: str) -> None:
        self.root = ElementTree.fromstring(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.root.itertext()))
        self.cells = {
            one.findtext("caption", ""): [["".join(cell.itertext()) for cell in row] for row in one.iter("tr")]
            for one in self.root.iter("table")
        }


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


def test_what_status_shows() -> None:
    found = Checked(page({"gpu1": host()}))
    assert [*found.cells["GPUs"][:2], *found.cells["GPUs"][5:]] == [
        ["GPU", "State", "Memory", "Util", "Temp", "User", "Job", "Command", "Since", "Until"],
        ["0", "claimed", "71/80G", "98%", "34C", "anna", "4711.3", "python train.py", "07:46", "11:46"],
        ["4", "idle", "0.4/80G", "0%", "34C", "ben", "pid 48213", "jupyter-lab", "Tue 10:06", ""],
        ["5", "shared", "42/80G", "88%", "34C", "", "", "2 claims, 16 GiB unclaimed", "", ""],
        ["5", "share", "20/24G", "", "", "carla", "4718", "python eval.py", "10:54", ""],
        ["5", "share", "22/40G", "", "", "dora", "4719", "simulate", "10:57", "11:57"],
        ["6", "drained", "0/80G", "0%", "34C", "", "", "", "", ""],
        ["7", "free", "0/80G", "0%", "34C", "", "", "", "", ""],
    ]
    assert found.cells["Waiting, first come first served"] == [
        ["#", "User", "Job", "Wants", "Waited", "Planned", "Starts"],
        ["1", "emil", "4720", "4 GPUs", "25m", "2h00m", "in 40m"],
        ["2", "anna", "4721", "1 GPU", "3m", "1h00m", "in 40m, at limit (4 of 4)"],
    ]
    assert "GPU 6: drained by root: its fan is to be replaced" in found.text
    assert "reserved by root for group course from Wed 2026-11-18 16:40 to 19:26: practical" in found.text
    assert "made Wed 2026-11-18 11:06 UTC , every 5 min stale" in found.text
    assert "gpu1: 1 of 8 GPUs free" in found.text


def test_the_last_day() -> None:
    found = Checked(page({"gpu1": host()}))
    assert "The last day: 123 of 192 GPU-hours claimed" in found.text
    assert found.cells["GPU-hours by user"][:3] == [
        ["User", "Claims", "GPU-hours", "Mean wait"],
        ["emil", "1", "52.00", "1h00m"],
        ["ben", "1", "24.00", ""],
    ]
    assert "GPU-hours claimed" not in page({"gpu1": host()}, use={})


def test_every_text_of_others_is_escaped() -> None:
    """In each key of the document, and in the names of hosts: as text, or nowhere."""
    plain = json.loads(json.dumps(crowded()))
    text = page({HOSTILE: poisoned(plain), "gpu2": HOSTILE})
    found = Checked(text)
    assert "<img" not in text
    assert "<img src=x onerror=alert(1)>" in found.text
    assert not {c for c in text if not c.isprintable() and c != "\n"}
    assert not [name for one in found.root.iter() for name in one.attrib if name.startswith("on")]
    assert "alert" not in text[text.index("<script ") :]


def poisoned(document: Any) -> Any:
    """The same, with every text that others can write replaced."""
    if isinstance(document, dict):
        kept = ("state", "kind", "uuid", "label", "vendor")
        return {key: value if key in kept else poisoned(value) for key, value in document.items()}
    if isinstance(document, list):
        return [poisoned(one) for one in document]
    return HOSTILE if isinstance(document, str) else document


def test_arguments_of_commands_stay_away() -> None:
    """Whoever reads the page need not have an account on the host."""
    status = host()
    process = {"pid": 3, "user": "eva", "command": "/opt/python x.py --password secret", "kind": "compute"}
    busy = {"state": "busy", "state_shown": "busy", "processes": [process | {"memory_used": None}], "claim": None}
    status["gpus"][0] |= busy | {"reason": "process 3 (eva, /opt/python x.py --password secret) uses 1 GiB"}
    status["gpus"][1]["claim"]["command"] = "python train.py --token secret"
    status["gpus"][2]["reason"] = "claimed by process 1 (anna, x; secret); drained by root: a fan; inside it secret"
    status["gpus"][7]["reason"] = "taken last until 14:32, since a claim failed on it: process 3 (secret)"
    text = Checked(page({"gpu1": status})).text
    assert "secret" not in text
    for told in ("pid 3 python x.py", "GPU 2: drained by root: a fan"):
        assert told in text
    assert "GPU 7: taken last until 14:32" in text


def test_what_is_unusual_is_told() -> None:
    status = host() | {"warnings": ["the claims cannot be read"]}
    gpus = status["gpus"]
    gpus[1]["claim"]["removable_by"] = "mallory"
    gpus[4]["idle_for"] = 7200.0
    gpus[5]["shares"][0]["memory_used"] = 30 << 30
    gpus[6] |= {"reason": "MIG mode is on: claim one of its instances", "utilization": None, "memory_used": None}
    status["queue"][1] |= {"limit": None, "expected_start": None, "turn": 1.0}
    found = Checked(page({"gpu1": status}))
    for told in ("mallory can remove", "GPU 4: no work for 2 h", "uses more than its share: 30 GiB of 24 GiB",
                 "the claims cannot be read"):  # fmt: skip
        assert told in found.text
    assert found.cells["Waiting, by turns; all but the first may start later than shown"][2][-1] == "?"
    assert "gpu1: 1 of 7 GPUs free" in found.text


def test_several_hosts() -> None:
    """Each has its line; one that does not answer, or not so, has the reason there."""
    hosts = {"gpu1": host(), "gpu2": crowded(), "gpu3": "did not answer within 10 s", "gpu4": host() | {"gpus": 7}}
    found = Checked(page(hosts))
    models = "NVIDIA A100-SXM4-80GB"
    one, many, *none = found.cells["Hosts"][1:]
    assert one == ["gpu1", "1 of 8", models, "2", "25m", "anna 4, ben 1, dora 0.5, carla 0.3"]
    assert many[:5] == ["gpu2", "2 of 16", models, "40", "25m"]
    assert none[0] == ["gpu3", "", "did not answer within 10 s", "", "", ""]
    assert none[1][2].startswith("its answer cannot be read: TypeError")
    assert "4 hosts: 3 of 24 GPUs free" in found.text
    assert "The last day's use is that of gpu1" in found.text


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1e300, float("nan"), [None], {"gpus": [{}]}])
def test_an_answer_that_is_none_spoils_only_its_line(value: Any) -> None:
    for key in host():
        assert "gpu1" in Checked(page({"gpu1": host(), "other": host() | {key: value}})).text


def test_nothing_is_fetched() -> None:
    assert re.findall(r'(?:src|href|url)[=(]"?(?!#)', page({"gpu1": host()})) == []


def test_the_file(command: Any, tmp_path: Path) -> None:
    """Mode 0644 whatever the umask; the claim of a moment ago in it."""
    file = tmp_path / "gpus.html"
    job = command.start("run", "-n", 2, "--", "sh", "-c", "echo up; read x", stdin=-1)
    assert job.stdout.readline() == "up\n"
    before = os.umask(0o077)
    try:
        assert main(["status", "--html", "--output", str(file), "--interval", "2m"]) == 0
    finally:
        os.umask(before)
    assert (os.listdir(tmp_path), stat.S_IMODE(file.stat().st_mode)) == (["gpus.html"], 0o644)
    found = Checked(file.read_text())
    assert "6 of 8 GPUs free" in found.text
    assert "every 2 min" in found.text
    assert [row[1] for row in found.cells["GPUs"][1:3]] == ["claimed", "claimed"]
    assert len(found.cells["GPU-hours by user"]) == 2
    job.communicate("\n", timeout=60)


def test_without_a_driver_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = ask("status", "--html", "--output", tmp_path / "gpus.html")
    assert done.returncode == 69
    assert "nvidia-smi" in Checked((tmp_path / "gpus.html").read_text()).text


def test_hosts_that_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    """The last day is known of the one that is this one; a second name of a host has no figures of its own."""
    here = json.loads(ask("status", "--json").stdout)
    found = {"gpu1": here, "web": here, "gpu2": crowded() | {"host": here["host"]}}
    answers = {name: read_answer(Said(0, json.dumps(one), "")) for name, one in found.items()}
    monkeypatch.setattr(of_hosts, "answers_of", lambda *_: answers | {"gpu3": Answer(error="no route to host")})
    done = ask("status", "--host", "any", "--sort", "free", "--html", "--output", tmp_path / "gpus.html")
    assert (done.returncode, done.stdout) == (1, "")
    page = Checked((tmp_path / "gpus.html").read_text())
    rows = [row[:3] for row in page.cells["Hosts"][1:]]
    models = "NVIDIA A100-SXM4-80GB"
    assert rows[:2] == [["gpu1", "8 of 8", models], ["gpu2", "2 of 16", models]]
    assert rows[2:] == [["web", "", "the same host as gpu1"], ["gpu3", "", "no route to host"]]
    assert page.text.count("GPU-hours claimed") == 1
    assert "The last day's use is that of gpu1, where the page is made." in page.text


def test_it_is_printed_too(ask: Any) -> None:
    assert "8 of 8 GPUs free" in Checked(ask("status", "--html").stdout).text
    assert ask("status", "--html", "--vendor", "amd").stdout.count("0 of 0 GPUs free") == 2


@pytest.mark.skipif(not picture.PICTURES.exists(), reason="this is not a checkout: its pictures are not here")
@pytest.mark.parametrize("name", picture.PAGES)
def test_the_pictures_are_of_today(name: str) -> None:
    """``python tools/picture.py`` draws them anew."""
    text = picture.page_as_svg(*picture.PAGES[name])
    assert (picture.PICTURES / f"page-{name}.svg").read_text() == text
    assert ElementTree.fromstring(text).tag.endswith("svg")
