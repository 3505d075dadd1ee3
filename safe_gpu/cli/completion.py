"""``safe-gpu completion``: at each Tab the shell asks this program, which answers from its own parsers."""

import argparse
from collections.abc import Iterable, Sequence
from importlib.resources import files

from .output import print_lines

SHELLS = ("bash", "zsh", "fish")
"""For each there is a script beside this file.

It hands over all words up to the cursor, and gets a line for each candidate, or the number of the word from which on
the line is another program's: what ``run`` and ``bind`` are to become. That line the shell completes itself.
"""

_BEFORE_HELP = {"zsh": ":", "fish": "\t"}  # bash shows none


def configure_completion(parser: argparse.ArgumentParser) -> None:
    """Set its argument."""
    parser.description = "Print a script that completes commands, options and their values."
    parser.epilog = """examples:
  echo 'eval "$(safe-gpu completion bash)"' >> ~/.bashrc
  echo 'eval "$(safe-gpu completion zsh)"' >> ~/.zshrc            after compinit
  safe-gpu completion fish > ~/.config/fish/completions/safe-gpu.fish"""
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="for which shell")


def do_completion(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit code."""
    if options.shell is None:
        options.usage_error(f"for which shell? {', '.join(SHELLS)}")
    if not options.command:
        script = files(__package__).joinpath(f"completion.{options.shell}").read_text("utf-8")
        print_lines(script.rstrip())
        return 0
    found = candidates(options.command)
    if isinstance(found, int):
        print(found)
        return 0
    begun = options.command[-1].removeprefix("=")  # bash splits at the = of --option=value
    mark = _BEFORE_HELP.get(options.shell)
    for word, meaning in found.items():
        if not word.startswith(begun):
            continue
        if mark and meaning:
            print(f"{word}{mark}{meaning}")
        else:
            print(word)
    return 0


def candidates(words: Sequence[str]) -> dict[str, str] | int:
    """Return what may stand in place of the last of these words, with its meaning, whatever has been typed of it.

    A number says which of the words is the first of a command line of another program.
    """
    from .commands import COMMANDS, RUNNERS, parser_of

    if len(words) < 3:
        options = {"--help": "show help", "--version": "show the version"}
        return {**COMMANDS, "help": "show the options of a command", **options}
    name, *before, word = words[1:]
    if name == "help":
        return COMMANDS
    if name not in COMMANDS:
        return {}
    actions = parser_of(name)._actions
    action_of = _by_option(actions)
    taking: argparse.Action | None = None  # the option whose value comes next
    for place, one in enumerate(before, 2):
        if taking is not None:
            if one != "=":
                taking = None
        elif one.startswith("-") and one != "--":
            taking = action_of.get(one)
            if taking is not None and taking.nargs == 0:
                taking = None
        elif name in RUNNERS:
            if one == "--":
                return place + 1
            return place
    if taking is not None:
        return {str(choice): "" for choice in taking.choices or ()}
    if name in RUNNERS and not word.startswith("-"):
        return len(words) - 1
    option, equals, _ = word.partition("=")
    if equals and option in action_of:
        return {f"{option}={choice}": "" for choice in action_of[option].choices or ()}
    return _meanings(actions)


def _by_option(actions: Iterable[argparse.Action]) -> dict[str, argparse.Action]:
    found = {}
    for action in actions:
        for option in action.option_strings:
            found[option] = action
    return found


def _meanings(actions: Iterable[argparse.Action]) -> dict[str, str]:
    """Return the options of a command with their help, and the choices of its other arguments."""
    found = {}
    for action in actions:
        if action.help is argparse.SUPPRESS:
            continue
        for option in action.option_strings:
            found[option] = " ".join((action.help or "").split())
        if not action.option_strings:
            for choice in action.choices or ():
                found[str(choice)] = ""
    return found
