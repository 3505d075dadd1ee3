"""Pictures of ``safe-gpu status`` for the pages, as SVG in ``.github/pictures``: made-up hosts in terminals of some
widths, and the page for browsers in a wide window and on a telephone. ``rich`` draws the terminals."""

import io
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support.made_up import COURSE, DAY, NOW, scene, screen  # noqa: E402

from safe_gpu.status.page import render_page  # noqa: E402

PICTURES = ROOT / ".github" / "pictures"
ALL_HOSTS = ("status", "--all-hosts", "--sort", "free")
TERMINALS = {"status-80": (80, ("status",)), "status-120": (120, ("status",)), "hosts-100": (100, ALL_HOSTS)}
PAGES = {"wide": (1700, 540), "telephone": (390, 1020)}  # pixels


def page_as_svg(width: int, height: int) -> str:
    """The page for browsers in a window of that size, which decides what the style's conditions are replaced by."""
    text = render_page({"gpu1": replace(scene(), windows=(COURSE,)).to_dict()}, now=NOW, every=300.0, use={"gpu1": DAY})
    (css,), (body,) = (re.findall(f"<{tag}>\n?(.*)</{tag}>", text, re.DOTALL) for tag in ("style", "body"))
    css = re.sub(r"\(min-width:(\d+)px\)", lambda found: " all" if width >= int(found[1]) else " not all", css)
    css = re.sub(r"\(max-width:(\d+)px\)", lambda found: " all" if width <= int(found[1]) else " not all", css)
    css = re.sub(r"animation:[^;}]*", "", css)
    content = re.sub(r"<script .*?</script>", "", body, flags=re.DOTALL).strip()
    xmlns, size = 'xmlns="http://www.w3.org/2000/svg"', f'width="{width}" height="{height}"'
    return (
        f'<svg {xmlns} viewBox="0 0 {width} {height}" {size}>'
        f"<style>{css}\nsvg:root{{background:var(--paper)}}</style>\n"
        f'<foreignObject {size}><body xmlns="http://www.w3.org/1999/xhtml">\n'
        f"{content.replace('<svg ', f'<svg {xmlns} ')}\n</body></foreignObject></svg>\n"
    )


def terminal_as_svg(text: str, columns: int, words: tuple[str, ...]) -> str:
    """The text of a terminal, without the fonts that rich would have a reader's browser fetch."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console
    from rich.text import Text

    console = Console(file=io.StringIO(), record=True, width=columns, force_terminal=True, color_system="standard")
    console.print(Text.from_ansi(f"$ safe-gpu {' '.join(words)}\n{text}"))
    form = re.sub(r" *@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="", code_format=form, unique_id="status")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    for name, (width, words) in TERMINALS.items():  # first: they need rich
        (PICTURES / f"{name}.svg").write_text(terminal_as_svg(screen(width, words), width, words))
    for name, size in PAGES.items():
        (PICTURES / f"page-{name}.svg").write_text(page_as_svg(*size))
