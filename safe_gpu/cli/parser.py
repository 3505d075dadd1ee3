"""argparse as this command line wants it."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from .output import columns

EX_USAGE = 2


def is_number(text: str) -> bool:
    """Return whether a text is a number of at most nine ASCII digits."""
    return text.isdecimal() and text.isascii() and len(text) < 10


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that knows its width: argparse makes one for every option and would import shutil for it."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"width": min(columns(), 80) - 2, **options})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # The value once, not after each of the names: -n N, --gpus N.
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


class Parser(argparse.ArgumentParser):
    """argparse, with ``-5s`` taken for the value that it is, no abbreviations, and suggestions for what is unknown."""

    def __init__(self, **options: Any) -> None:
        options.update(formatter_class=_Formatter, allow_abbrev=False, add_help=False)
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-([0-9.].*|inf)$")

    def add_help_option(self) -> None:
        """Add ``--help`` at the end, where it is no group of its own."""
        self._action_groups[-1].add_argument("-h", "--help", action="help", help="show this help and exit")

    def error(self, message: str) -> NoReturn:
        name, colon, rest = message.partition(": ")
        if colon and name.startswith("argument "):
            name = name.removeprefix("argument ")
            if rest == "expected one argument":
                message = f"{name} needs a value"
            elif rest.startswith("ignored explicit argument"):
                message = f"{name} takes no value"
            else:  # our own sentences name the option
                message = rest if rest.startswith("-") else f"{name}: {rest}"
        self.exit(EX_USAGE, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as err:  # argparse has put a text of its own in place of our sentence
            raise argparse.ArgumentError(action, str(err.__context__)) from err

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from .suggest import not_a_choice

            self.error(not_a_choice(action.option_strings[-1:], str(value), tuple(map(str, action.choices))))

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from .suggest import unknown_argument

            self.error(unknown_argument(unknown[0], self.names()))
        return options

    def names(self) -> list[str]:
        """Return all options, under all their names."""
        return list(self._option_string_actions)
