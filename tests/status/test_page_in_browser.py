"""The page of ``status --html`` in a real browser: as wide as a telephone and as a desk, by day and by night."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.page_scene import HOSTILE, NOW, crowded, host, page
from support.real import unavailable

CHROMIUM = "/usr/bin/chromium"
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WIDTHS, SCHEMES = (360, 1440), ("light", "dark")
BETWEEN = (320, 600, 601, 900, 901, 1399, 1400)  # where the layout changes, and the least that WCAG 2 asks for

# What is wider than the window, also where it is cut off. The titles that a telephone does not show are 1 pixel wide.
TOO_WIDE = """() => [...document.querySelectorAll("body *")].filter(one => !one.closest("thead")
  && one.getBoundingClientRect().right > innerWidth + 0.5).map(one => one.outerHTML)"""

Opened = Callable[..., Any]


@pytest.fixture
def said() -> list[str]:
    """The words on the browser's console."""
    return []


@pytest.fixture
def opened(tmp_path: Path, said: list[str]) -> Iterator[Opened]:
    """Open a page in a window; a word on the browser's console fails the test."""
    if not Path(CHROMIUM).exists():
        unavailable("needs chromium")
    try:
        playwright: Any = importlib.import_module("playwright.sync_api")
    except ImportError:
        unavailable("needs playwright")
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


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(opened: Opened, width: int, scheme: str) -> None:
    """Sixteen GPUs and forty waiters, one host and several; nothing to scroll to the side for."""
    several = {"gpu1": crowded(), "gpu2": host(), "gpu3": "did not answer within 10 s"}
    for text in (page({"gpu1": crowded()}), page(several)):
        window = opened(text, width, scheme)
        for size in (width, *BETWEEN):
            window.set_viewport_size({"width": size, "height": 800})
            assert window.evaluate("document.documentElement.scrollWidth") == size
            assert window.evaluate(TOO_WIDE) == []
        paper = window.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]


@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_heard(opened: Opened, width: int) -> None:
    """Tables are tables by their roles, on a telephone too, and have names."""
    window = opened(page({"gpu1": host(), "gpu2": "down"}), width)
    gpus = window.get_by_role("table", name="GPUs", exact=True)
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
    shown = window.get_by_role("table", name="GPUs", exact=True).get_by_role("row").nth(1).inner_text()
    assert "<img src=x onerror=alert(1)>" in shown


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
    """Older than thrice its interval by the reader's clock. Without a script it stands there that long first."""
    fresh = opened(page({"gpu1": host()}, now=time.time() - age), script=script)
    assert fresh.locator(".stale").is_visible() == (script and age == 1000)
    opened(page({"gpu1": host()}, now=NOW, every=0.1), script=script).locator(".stale").wait_for(state="visible")


def test_it_is_loaded_anew(opened: Opened, tmp_path: Path) -> None:
    window = opened(page({"old": host()}, every=0.2))
    (tmp_path / "gpus.html").write_text(page({"new": host()}))
    window.get_by_role("heading", name="new: 1 of 8 GPUs free").wait_for()
