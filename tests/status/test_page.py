"""``status --html``: a page that says what status says, in which nobody's text is markup, in a file and a browser."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support import api, made_up
from support.claims import claim
from support.real import tool, unavailable

from safe_gpu import status as status_room

picture = tool("picture")
NOW = made_up.NOW
LONG = "python a_program_with_a_very_long_name_that_has_no_blank_in_it_at_all_and_goes_on_and_on.py"
HOSTILE = "<img src=x onerror=alert(1)>\"'&amp;</script>\x1b[2J\u202e\u2066\ud800 ]]>"


def host() -> dict[str, Any]:
    """The document of a host of eight GPUs, each in another state, and two waiters."""
    return json.loads(json.dumps(replace(made_up.scene(), windows=(made_up.COURSE,)).to_dict()))


def crowded() -> dict[str, Any]:
    """That of one with sixteen GPUs, forty waiters, and long names."""
    status = host()
    gpus = [json.loads(json.dumps(status["gpus"][n % 8])) | {"index": n, "label": str(n)} for n in range(16)]
    gpus[9]["claim"] |= {"user": "first.last-with-a-long-name@example.org", "command": LONG, "until": NOW - 300_000}
    waiters = (("emil", "slurm:10000000"), ("first.last-with-a-long-name@example.org", "slurm:10000001"))
    some = [
        one | {"user": user, "job": job, "turn": 1.0} for one, (user, job) in zip(status["queue"], waiters, strict=True)
    ]
    queue = [some[n % 2] | {"position": n + 1} for n in range(40)]
    queue[7] |= {"expected_start": None, "earliest_start": NOW + 100_000, "share": 20 << 30}
    return status | {"gpus": gpus, "queue": queue}


def page(hosts: Mapping[str, Any], *, now: float = NOW, every: float = 300.0, use: Any = None) -> str:
    return api.render_page(hosts, now=now, every=every, use={"gpu1": made_up.DAY} if use is None else use)


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


def test_what_status_shows_and_the_last_day() -> None:
    found = Checked(page({"gpu1": host()}))
    assert [*found.cells["GPUs"][:2], *found.cells["GPUs"][6:9]] == [
        ["GPU", "State", "Memory", "Util", "Temp", "User", "Job", "Command", "Since", "Until"],
        ["0", "claimed", "71/80G", "98%", "34C", "anna", "4711.3", "python train.py", "07:46", "11:46"],
        ["5", "shared", "42/80G", "88%", "34C", "", "", "2 claims, 16 GiB unclaimed", "", ""],
        ["5", "share", "20/24G", "", "", "carla", "4718", "python eval.py", "10:54", ""],
        ["5", "share", "22/40G", "", "", "dora", "4719", "simulate", "10:57", "11:57"],
    ]
    waiter = ["2", "anna", "4721", "1 GPU", "3m", "1h00m", "in 40m, at limit (4 of 4)"]
    assert found.cells["Waiting, first come first served"][2] == waiter
    assert "GPU 6: drained by root: its fan is to be replaced" in found.text
    assert "reserved by root for group course from Wed 2026-11-18 16:40 to 19:26: practical" in found.text
    assert "made Wed 2026-11-18 11:06 UTC , every 5 min stale" in found.text
    assert "The last day: 123 of 192 GPU-hours claimed" in found.text
    titles, emil, *_, dora, _ = found.cells["GPU-hours by user"]
    assert titles == ["User", "Claims", "GPU-hours", "Used", "Idle", "Mean wait"]
    assert emil == ["emil", "1", "52.00", "84%", "0.40", "1h00m"]
    assert dora[3] == "22 GiB", "of a MIG instance"
    assert "GPU-hours claimed" not in page({"gpu1": host()}, use={})


@pytest.mark.parametrize("group", ["COLUMNS_OF_GPU", "COLUMNS_OF_USER"])
def test_a_new_column_of_the_terminal_is_on_the_page(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    columns = getattr(api, group)
    new = api.GpuColumn("NEW", lambda row: "new-cell")
    with_v = api.GpuColumn("MORE", lambda row: "more", only_verbose=True)
    monkeypatch.setattr(f"safe_gpu.status.page.{group}", (*columns, new, with_v))
    titles, gpu, *_ = Checked(page({"gpu1": host()})).cells["GPUs"]
    assert gpu[titles.index("New")] == "new-cell"
    assert "More" not in titles


def test_every_text_of_others_is_escaped() -> None:
    """In each key of the document, and in the names of hosts: as text, or nowhere."""
    plain = json.loads(json.dumps(crowded()))
    text = page({HOSTILE: poisoned(plain), "gpu2": HOSTILE})
    found = Checked(text)
    assert "<img" not in text
    assert re.findall(r'(?:src|href|url)[=(]"?(?!#)', page({"gpu1": plain})) == [], "nothing is fetched"
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
    status["gpus"][7]["reason"] = "taken last until 14:32, since a claim failed there: process 3 (secret)"
    status["gpus"][7]["reason"] += "; taken last while it shows 97% utilisation"
    text = Checked(page({"gpu1": status})).text
    assert "secret" not in text
    for told in (
        "pid 3 python x.py",
        "GPU 2: drained by root: a fan",
        "GPU 7: taken last until 14:32",
        "taken last while it",
    ):
        assert told in text


def test_what_is_unusual_is_told() -> None:
    status = host() | {"warnings": ["the claims cannot be read"]}
    gpus = status["gpus"]
    gpus[1]["claim"]["removable_by"] = "mallory"
    gpus[4]["idle_for"] = 7200.0
    gpus[6] |= {"reason": "MIG mode is on: claim one of its instances", "utilization": None, "memory_used": None}
    status["queue"][1] |= {"limit": None, "expected_start": None, "turn": 1.0}
    found = Checked(page({"gpu1": status}))
    for told in ("mallory can remove", "GPU 4: no work for 2 h", "the claims cannot be read"):
        assert told in found.text
    assert found.cells["Waiting, by turns; all but the first may start later than shown"][2][-1] == "?"
    assert "gpu1: 1 of 7 GPUs free" in found.text
    assert found.text.count(" of 7 ") == 2, "in the title of the window and in that of the page"


def test_what_is_unusual_of_a_waiter_is_told() -> None:
    status = host()
    status["queue"][0]["note"] = "it is inside a claim, and waits for GPUs of that claim"
    status["queue"][1] |= {"stopped": True, "pid": 12}
    text = Checked(page({"gpu1": status})).text
    assert "#1: it is inside a claim, and waits for GPUs of that claim" in text
    assert "#2: process 12 is stopped (a suspended job?) and keeps its place" in text


def test_mig_instances_are_not_counted_as_gpus() -> None:
    """Some drivers give them the name of their GPU."""
    status = host()
    status["gpus"][6] |= {"reason": "MIG mode is on: claim one of its instances"}
    instance = status["gpus"][7]
    status["gpus"] += [instance | {"label": f"6:{number}", "uuid": f"MIG-{number}"} for number in (0, 1)]
    text = Checked(page({"gpu1": status})).text
    assert "gpu1: 3 of 9 GPUs and MIG instances free" in text
    assert "7 x NVIDIA A100-SXM4-80GB, 2 x NVIDIA A100-SXM4-80GB MIG instance" in text


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, 1e300, float("nan"), [None], {"gpus": [{}]}])
def test_an_answer_that_is_none_spoils_only_its_line(value: Any) -> None:
    for key in host():
        assert "gpu1" in Checked(page({"gpu1": host(), "other": host() | {key: value}})).text


def test_the_file(command: Any, tmp_path: Path) -> None:
    """Mode 0644 whatever the umask; the claim of a moment ago in it."""
    file = tmp_path / "gpus.html"
    with claim(2):
        done = command.run("status", "--html", "--output", file, "--interval", "2m", umask=0o077)
    assert (done.returncode, os.listdir(tmp_path), stat.S_IMODE(file.stat().st_mode)) == (0, ["gpus.html"], 0o644)
    found = Checked(file.read_text())
    assert "6 of 8 GPUs free" in found.text
    assert "every 2 min" in found.text
    assert [row[1] for row in found.cells["GPUs"][1:3]] == ["claimed", "claimed"]
    assert len(found.cells["GPU-hours by user"]) == 2


def test_it_is_printed_too_and_without_a_driver_says_so(tmp_path: Path, monkeypatch: Any, run_here: Any) -> None:
    assert "8 of 8 GPUs free" in Checked(run_here("status", "--html").stdout).text
    assert run_here("status", "--html", "--vendor", "amd").stdout.count("0 of 0 GPUs free") == 2
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_here("status", "--html", "--output", tmp_path / "gpus.html")
    assert done.returncode == 69
    assert "nvidia-smi" in Checked((tmp_path / "gpus.html").read_text()).text


def test_hosts_that_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Any) -> None:
    """Each has its line, or a reason for having no figures. The last day is that of the host that makes the page."""
    here = json.loads(run_here("status", "--json").stdout)
    found = {"gpu1": here, "web": here, "gpu2": crowded() | {"host": here["host"]}}
    answers = {name: api.read_answer(api.SshResult(0, json.dumps(one), "")) for name, one in found.items()}
    answers["gpu3"] = api.Answer(error="no route to host")
    monkeypatch.setattr(api.hosts, "statuses_of", lambda *_: answers)
    done = run_here("status", "--host", "any", "--sort", "free", "--html", "--output", tmp_path / "gpus.html")
    assert (done.returncode, done.stdout) == (1, "")
    page = Checked((tmp_path / "gpus.html").read_text())
    first, second, *none = page.cells["Hosts"][1:]
    assert first == ["gpu1", "8 of 8", models := "NVIDIA A100-SXM4-80GB", "", "", ""]
    assert second[:4] == ["gpu2", "2 of 16", models, "40"]
    assert [row[:3] for row in none] == [["web", "", "the same host as gpu1"], ["gpu3", "", "no route to host"]]
    assert page.text.count("GPU-hours claimed") == 1
    assert "The last day's use is that of gpu1, where the page is made." in page.text


@pytest.mark.skipif(not picture.PICTURES.exists(), reason="this is not a checkout: its pictures are not here")
@pytest.mark.parametrize("name", picture.PAGES)
def test_the_pictures_are_of_today(name: str) -> None:
    """``python tools/picture.py`` draws them anew."""
    text = picture.page_as_svg(*picture.PAGES[name])
    is_of_today = (picture.PICTURES / f"page-{name}.svg").read_text() == text
    assert is_of_today, "draw it anew with python tools/picture.py, which needs rich, and look at it"
    assert ElementTree.fromstring(text).tag.endswith("svg")


STYLE = Path(status_room.__file__).with_name("page.html").read_text()


@pytest.mark.parametrize(
    "column", [one for one in api.COLUMNS_OF_GPU if not one.only_verbose], ids=lambda one: one.title
)
def test_each_column_of_gpus_has_its_width_and_its_side(column: Any) -> None:
    """Each host has the same places then, whatever is in the cells."""
    name = column.title.lower()
    widths = re.findall(r"([^{}]*)\{width:", STYLE)
    assert any(re.search(rf"\.{name}\b", classes) for classes in widths), "write its width into page.html"
    if column.right and column.title not in ("GPU", "MEMORY"):
        [right] = re.findall(r"([^{}]*)\{text-align:right\}", STYLE)
        assert re.search(rf"\.{name}\b", right), "write it into the rule with text-align:right of page.html"


def test_the_page_says_what_telephones_leave_out() -> None:
    words = {"temp": "temperatures"}
    hidden = re.findall(r"([^{}]*)\{display:none\}", STYLE)
    classes = set(re.findall(r"\.([a-z]+)", " ".join(hidden)))
    assert classes == set(words), "name what telephones leave out on the page of status, and its word here"
    page_of_status = " ".join(Path(status_room.__file__).with_name("README.md").read_text().split())
    [told] = re.findall(r"seen without scrolling, and ([^.]*) are left out", page_of_status)
    assert [word for word in words.values() if word not in told] == []


# In a real browser: as wide as a telephone and as a desktop, by day and by night

CHROMIUM = "/usr/bin/chromium"
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WIDTHS = (360, 1440)
BETWEEN = (320, 600, 601, 900, 901, 1699, 1700)  # where the layout changes, and the least that WCAG 2 asks for

# What is wider than the window, also where it is cut off, but for tables in boxes that scroll; and the places of the
# columns of the tables.
TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter(one => !one.closest("table")
  && one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML)"""
PLACES = """() => [...document.querySelectorAll("table.gpus")].map(
  one => [...one.querySelectorAll("thead th")].map(title => title.getBoundingClientRect().left))"""

Opened = Callable[..., Any]


@pytest.fixture
def said() -> list[str]:
    """The words on the browser's console."""
    return []


@pytest.fixture
def opened(tmp_path: Path, said: list[str]) -> Iterator[Opened]:
    """Open a page in a window; a word on the browser's console fails the test."""
    if not Path(CHROMIUM).exists() or not importlib.util.find_spec("playwright"):
        unavailable("needs chromium and playwright")
    playwright: Any = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)

        def show(text: str, width: int = 1440, scheme: str = "light", script: bool = True) -> Any:
            file = tmp_path / "gpus.html"
            file.write_text(text)
            size = {"width": width, "height": 800}
            context = browser.new_context(viewport=size, color_scheme=scheme, java_script_enabled=script)
            window = context.new_page()
            for event in ("console", "pageerror", "dialog"):
                window.on(event, lambda what: said.append(getattr(what, "text", None) or str(what)))
            window.on("request", lambda what: said.extend([what.url] if what.url != file.as_uri() else []))
            window.goto(file.as_uri())
            return window

        yield show
        browser.close()
    assert said == []


@pytest.mark.parametrize(("scheme", "color"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(opened: Opened, width: int, scheme: str, color: str) -> None:
    """Sixteen GPUs and forty waiters, one host and several; the page itself does not scroll to the side."""
    for more in ({}, {"gpu2": host(), "gpu3": "did not answer within 10 s"}):
        window = opened(page({"gpu1": crowded(), **more}), width, scheme)
        for size in (width, *BETWEEN):
            window.set_viewport_size({"width": size, "height": 800})
            assert window.evaluate("document.documentElement.scrollWidth") == size
            assert window.evaluate(TOO_WIDE) == []
        assert window.evaluate("getComputedStyle(document.body).backgroundColor") == color


@pytest.mark.parametrize("width", [360, 390, 1280, 1440, 1920])
def test_columns_stay_in_their_places(opened: Opened, width: int) -> None:
    """On hosts that show other things, and on one where all is free."""
    free = host()
    free["gpus"] = [free["gpus"][7] | {"temperature": None}] * 8
    (first, *others) = opened(page({"gpu1": crowded(), "gpu2": host(), "gpu3": free}), width).evaluate(PLACES)
    assert first != []
    assert others == [first, first]


# States whose words come closer to the next column than its padding.
TOO_NEAR = """() => [...document.querySelectorAll(".gpus b")].filter(one =>
  one.getBoundingClientRect().right > one.closest("td").getBoundingClientRect().right - 8).map(one => one.outerHTML)"""


@pytest.mark.parametrize("width", [390, 1280])
def test_states_keep_away_from_the_bars_of_memory(opened: Opened, width: int) -> None:
    status = host()
    status["gpus"][7] |= {"state": "unusable", "state_shown": "unusable"}
    assert opened(page({"gpu1": status}), width).evaluate(TOO_NEAR) == []


# Words in the cells of users that are broken within, and those that cannot be seen whole without scrolling.
BROKEN = """() => [...document.querySelectorAll("td.user, td.job, .use th.user")].flatMap(
  one => [...one.childNodes]).filter(one => {
  const word = document.createRange();
  word.selectNodeContents(one);
  return word.getClientRects().length > 1;
}).map(one => one.textContent)"""
OUT_OF_SIGHT = """() => [...document.querySelectorAll(".gpus b, .gpus td.user, .queue td.user")].filter(one => {
  const text = document.createRange();
  text.selectNodeContents(one);
  return text.getBoundingClientRect().right > one.closest(".scroll").getBoundingClientRect().right;
}).map(one => one.textContent)"""


@pytest.mark.parametrize("width", [390, 1280, 1440, 1700, 1920])
def test_users_and_states_are_seen_whole_without_scrolling(opened: Opened, width: int) -> None:
    """A long name is broken after its punctuation."""
    status = crowded()
    status["gpus"][1]["claim"]["user"] = status["queue"][0]["user"] = "anna.mustermann"
    day = [made_up.DAY[0]._replace(key="first.last-with-a-long-name@example.org"), *made_up.DAY[1:]]
    window = opened(page({"gpu1": status}, use={"gpu1": day}), width)
    assert window.evaluate(BROKEN) == [], "the other columns leave too little room: see page.html"
    assert window.evaluate(OUT_OF_SIGHT) == [], "hide a column at max-width:600px, or make it narrower, in page.html"
    assert gpus_of(window).get_by_role("cell", name="anna.mustermann", exact=True).bounding_box()["height"] < 40


def test_a_table_scrolls_on_a_telephone_and_its_rows_keep_their_heads(opened: Opened) -> None:
    window = opened(page({"gpu1": host()}), 390)
    box = window.get_by_role("group", name="GPUs", exact=True)
    last = gpus_of(window).get_by_role("columnheader", name="Until")
    head = gpus_of(window).get_by_role("rowheader", name="7", exact=True)
    left = head.bounding_box()["x"]
    assert last.bounding_box()["x"] > 390
    box.focus()  # so it scrolls with the keys too
    box.evaluate("one => one.scrollTo(one.scrollWidth, 0)")
    assert last.bounding_box()["x"] < 390
    assert head.bounding_box()["x"] == left
    desktop = opened(page({"gpu1": host()}), 1280)
    fits = "[...document.querySelectorAll('.scroll')].every(one => one.scrollWidth == one.clientWidth)"
    assert desktop.evaluate(fits)


def gpus_of(window: Any) -> Any:
    return window.get_by_role("table", name="GPUs", exact=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_heard(opened: Opened, width: int) -> None:
    """Tables are tables, on a telephone too, and have names."""
    window = opened(page({"gpu1": host(), "gpu2": "down"}), width)
    gpus = gpus_of(window)
    assert gpus.get_by_role("rowheader", name="7", exact=True).count() == 1
    assert gpus.get_by_role("columnheader", name="State").count() == 1
    assert gpus.get_by_role("cell", name=re.compile(r"\bclaimed$")).count() == 4
    assert window.get_by_role("region", name="gpu2").inner_text().split() == ["gpu2", "down"]
    assert window.get_by_role("status").count() == 1
    assert window.title() == "2 hosts: 1 of 8 GPUs free"


def test_hostile_names_are_text(opened: Opened) -> None:
    status = host()
    status["gpus"][0]["claim"]["user"] = status["queue"][0]["user"] = HOSTILE
    window = opened(page({HOSTILE: status}))
    assert window.locator("img, iframe, form, object").count() == 0
    assert window.locator("script").count() == 1
    assert "<img src=x onerror=alert(1)>" in gpus_of(window).get_by_role("row").nth(1).inner_text()


def test_markup_that_slipped_in_could_run_nothing(opened: Opened, said: list[str]) -> None:
    """The second door: the page's own policy lets nothing run but its own script."""
    slipped = "<img src=data:, onerror='document.title=1'><script>document.title = 2</script><p id=in>in</p>"
    window = opened(page({"gpu1": host()}).replace("<main>", f"<main>{slipped}"))
    assert window.locator("#in").count() == 1
    assert window.title() == "gpu1: 1 of 8 GPUs free"
    assert any("script-src" in one for one in said)
    said.clear()


@pytest.mark.parametrize("script", [True, False])
@pytest.mark.parametrize("age", [1, 1000])
def test_it_says_when_it_is_stale(opened: Opened, script: bool, age: float) -> None:
    """Older than three times its interval by the reader's clock; without a script, open for as long."""
    fresh = opened(page({"gpu1": host()}, now=time.time() - age), script=script)
    assert fresh.locator(".stale").is_visible() == (script and age == 1000)
    opened(page({"gpu1": host()}, now=NOW, every=0.1), script=script).locator(".stale").wait_for(state="visible")


def test_it_is_loaded_anew(opened: Opened, tmp_path: Path) -> None:
    window = opened(page({"old": host()}, every=0.2))
    (tmp_path / "gpus.html").write_text(page({"new": host()}))
    window.get_by_role("heading", name="new: 1 of 8 GPUs free").wait_for()


def test_a_table_that_was_scrolled_stays_in_its_place(opened: Opened, tmp_path: Path) -> None:
    window = opened(page({"old": host()}, every=1), 390)
    window.get_by_role("group", name="GPUs", exact=True).evaluate("one => one.scrollTo(100, 0)")
    (tmp_path / "gpus.html").write_text(page({"new": host()}))
    window.get_by_role("heading", name="new: 1 of 8 GPUs free").wait_for()
    assert window.get_by_role("group", name="GPUs", exact=True).evaluate("one => one.scrollLeft") == 100
