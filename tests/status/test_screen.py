"""What ``safe-gpu status`` shows on terminals of 80 and 120 columns, with and without colour, and its pictures."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.terminals import open_terminal

from safe_gpu.wording.text import display_width

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "picture.py"
if not TOOL.exists():
    pytest.skip("this is not a checkout: there is no tools/ here", allow_module_level=True)
specification = importlib.util.spec_from_file_location("picture", TOOL)
picture: Any = importlib.util.module_from_spec(specification)  # type: ignore[arg-type]
specification.loader.exec_module(picture)  # type: ignore[union-attr]

SGR = re.compile(r"\x1b\[\d+m")


@pytest.fixture(autouse=True)
def in_a_terminal() -> None:
    """Skip where none can be made."""
    for fd in open_terminal():
        os.close(fd)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    colored = picture.screen(width)
    plain = picture.screen(width, NO_COLOR="1")
    assert SGR.sub("", colored) == plain
    assert "\x1b[36m█" in colored or width == 40
    assert "\x1b" not in plain
    assert picture.screen(width, TERM="dumb") == plain
    assert max(map(display_width, plain.splitlines())) <= width
    assert "█" in plain or width == 40
    ascii_only = picture.screen(width, NO_COLOR="1", PYTHONIOENCODING="ascii")
    assert ascii_only == plain.translate(str.maketrans("█▌░", "##-"))


@pytest.mark.parametrize(("width", "last"), [(50, "JOB/PID"), (60, "LEFT"), (72, "COMMAND")])
def test_a_column_is_whole_or_left_out(width: int, last: str) -> None:
    plain = picture.screen(width, NO_COLOR="1")
    assert f" {last}\n  0 " in plain
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
def test_the_pictures_are_of_today(name: str) -> None:
    """``python tools/picture.py`` draws them anew."""
    width, words = picture.PICTURE[name]
    expected = f"$ safe-gpu {' '.join(words)}\n{picture.screen(width, words, NO_COLOR='1')}"
    assert text_of(picture.PICTURES / f"{name}.svg").rstrip() == expected.rstrip()
