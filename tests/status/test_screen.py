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


def test_a_screen_of_eighty_columns() -> None:
    """Each fact once: whose claim it is, why a GPU is drained, when a waiter can expect to start."""
    assert (
        picture.screen(80, NO_COLOR="1")
        == """\
gpu1: 1 of 8 GPUs free, 1 idle, 1 drained, 2 waiting (nvml 550.54.15)
8 x NVIDIA A100-SXM4-80GB

GPU  STATE    MEMORY        UTIL  USER   JOB/PID     HELD  LEFT  COMMAND
  0  claimed  ███▌  71/80G   98%  anna   4711.3     3h20m   40m  python train.py
  1  claimed  ███▌  71/80G   97%  anna
  2  claimed  ███▌  70/80G   99%  anna
  3  claimed  ███▌  71/80G   96%  anna
  4  idle     ░░░░ 0.4/80G    0%  ben    pid 48213   1d1h        jupyter-lab
  5  shared   ██░░  42/80G   88%  2 claims, 16 GiB unclaimed
       share  ███▌  20/24G        carla  4718         12m        python eval.py
       share  ██░░  22/40G        dora   4719          9m   51m  simulate
  6  drained  ░░░░   0/80G    0%
  7  free     ░░░░   0/80G    0%

GPU 6: drained by root: its fan is to be replaced

Waiting, first come first served:
#  USER  JOB/PID  WANTS   WAITED  PLANNED  STARTS
1  emil  4720     4 GPUs     25m    2h00m  in 40m
2  anna  4721     1 GPU       3m    1h00m  in 40m, at limit (4 of 4)
"""
    )


@pytest.mark.parametrize(("width", "last"), [(50, "JOB/PID"), (54, "HELD"), (60, "LEFT"), (72, "COMMAND")])
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
