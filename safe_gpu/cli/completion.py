"""``safe-gpu completion``: at each Tab the shell asks this program, which answers from its own parsers."""

import argparse
from collections.abc import Sequence

from .output import print_lines

# Each shell hands over all words up to the cursor, and gets a line for each candidate, or the number of the word from
# which on the line is another program's: what ``run`` and ``bind`` are to become. That line it completes itself.
SHELLS = {
    "bash": r"""# bash completion for safe-gpu, written by: safe-gpu completion bash
_safe_gpu() {
    local found files=(-A file)
    mapfile -t found < <(safe-gpu completion bash -- "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2>/dev/null)
    if [[ ${found-} != [0-9]* ]]; then
        COMPREPLY=("${found[@]}")
    elif declare -F _command_offset >/dev/null; then
        _command_offset "$found"
    else
        ((found == COMP_CWORD)) && files+=(-A command)
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen "${files[@]}" -- "${COMP_WORDS[COMP_CWORD]}")
    fi
}
complete -F _safe_gpu safe-gpu""",
    "zsh": r"""#compdef safe-gpu
# zsh completion for safe-gpu, written by: safe-gpu completion zsh
_safe_gpu() {
    local -a answer
    answer=("${(@f)$(safe-gpu completion zsh -- "${(@Q)words[1,CURRENT]}" 2>/dev/null)}")
    if [[ $answer[1] == <-> ]]; then
        shift $answer[1] words
        ((CURRENT -= answer[1]))
        _normal
    elif [[ -n $answer[1] ]]; then
        _describe safe-gpu answer
    fi
}
if [ "$funcstack[1]" = _safe_gpu ]; then
    _safe_gpu "$@"
else
    compdef _safe_gpu safe-gpu
fi""",
    "fish": r"""# fish completion for safe-gpu, written by: safe-gpu completion fish
function __safe_gpu
    set -l word (commandline -ct)
    set -l found (safe-gpu completion fish -- (commandline -opc) "$word" 2>/dev/null)
    if string match -qr '^[0-9]+$' -- "$found[1]"
        __fish_complete_subcommand --fcs-skip=$found[1]
    else
        printf '%s\n' $found
    end
end
complete -c safe-gpu -f -a '(__safe_gpu)'""",
}
"""The script for each shell."""

_BEFORE_HELP = {"zsh": ":", "fish": "\t"}  # bash shows none


def configure_completion(parser: argparse.ArgumentParser) -> None:
    """Set its argument and its handler."""
    parser.description = "Print a script that completes commands, options and their values."
    parser.epilog = """examples:
  echo 'eval "$(safe-gpu completion bash)"' >> ~/.bashrc
  echo 'eval "$(safe-gpu completion zsh)"' >> ~/.zshrc            after compinit
  safe-gpu completion fish > ~/.config/fish/completions/safe-gpu.fish"""
    parser.add_argument("shell", nargs="?", choices=tuple(SHELLS), help="for which shell")
    parser.set_defaults(handler=_completion, usage_error=parser.error)


def _completion(options: argparse.Namespace) -> int:
    if options.shell is None:
        options.usage_error(f"for which shell? {', '.join(SHELLS)}")
    if not options.command:
        print_lines(SHELLS[options.shell])
        return 0
    found = candidates(options.command)
    if isinstance(found, int):
        print(found)
        return 0
    begun = options.command[-1].removeprefix("=")  # bash splits at the = of --option=value
    mark = _BEFORE_HELP.get(options.shell)
    for word, meaning in found.items():
        if word.startswith(begun):
            print(f"{word}{mark}{meaning}" if mark and meaning else word)
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
    if name not in COMMANDS:
        return COMMANDS if name == "help" else {}
    actions = parser_of(name)._actions
    by_name = {option: action for action in actions for option in action.option_strings}
    taking: argparse.Action | None = None  # the option whose value comes next
    for place, one in enumerate(before, 2):
        if taking is not None:
            taking = taking if one == "=" else None
        elif one.startswith("-") and one != "--":
            taking = by_name.get(one)
            if taking is not None and taking.nargs == 0:
                taking = None
        elif name in RUNNERS:
            return place + (one == "--")
    if taking is not None:
        return dict.fromkeys(map(str, taking.choices or ()), "")
    if name in RUNNERS and not word.startswith("-"):
        return len(words) - 1
    option, equals, _ = word.partition("=")
    if equals and option in by_name:
        return dict.fromkeys((f"{option}={one}" for one in by_name[option].choices or ()), "")
    shown = {option: action for option, action in by_name.items() if action.help is not argparse.SUPPRESS}
    meanings = {option: " ".join((action.help or "").split()) for option, action in shown.items()}
    return meanings | {str(one): "" for action in actions if not action.option_strings for one in action.choices or ()}
