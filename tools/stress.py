"""What the tools have in common that let claims be disturbed in every way, and look for violations."""

import argparse
import logging
import random
import time

import common  # noqa: F401 - says where the package and the support of its tests are
from support.broken import add_break_option

_MINUTE = 60.0  # seconds


def parser_with_seed(text: str | None) -> argparse.ArgumentParser:
    """A parser with --seed, and with --break, which is ``broken``; the first line of a text describes the tool."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of what is random")
    add_break_option(parser)
    return parser


def keep_quiet() -> None:
    """Let the package log nothing, as in a program that has not set up logging."""
    logging.getLogger("safe_gpu").addHandler(logging.NullHandler())


def violation_text(what: str, *more: object) -> str:
    """What is printed of a violation: what is wrong, and below it the command that shows it again, or what came before.

    It is printed at once, so that what several processes print does not mix.
    """
    return "\n    ".join(map(str, (f"VIOLATION: {what}", *more)))


class EachMinute:
    """Tells once a minute that another one has passed."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _MINUTE

    def has_passed(self) -> bool:
        """Whether a minute has passed since this was last so, or since the beginning."""
        if time.monotonic() < self._due:
            return False
        self._due += _MINUTE
        return True
