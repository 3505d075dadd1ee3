"""What was probably meant by a word that is no command, no option or no value here."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..wording.elsewhere import CLAIM, GIVE_BACK, chooses_by_index, meant_by
from ..wording.style import as_option, written

_MEANT = {
    **dict.fromkeys((*CLAIM, *"exec launch salloc srun start submit".split()), "run"),
    **dict.fromkeys(
        "available find gpustat info list ls nvidia-smi ps queue search show sinfo squeue users who".split(), "status"
    ),
    **dict.fromkeys("htop monitor nvitop nvtop top watch".split(), "status --watch"),
    **dict.fromkeys("block close disable maintenance offline".split(), "drain"),
    **dict.fromkeys("activate enable online open reopen unblock undrain".split(), "resume"),
    **dict.fromkeys("book reservation reserve".split(), "drain GPU --from T --until T"),
    **dict.fromkeys("accounting acct log logs sacct usage".split(), "history"),
    **dict.fromkeys("report reports".split(), "history --report month"),
    **dict.fromkeys("limit limits quota quotas rules".split(), "policy"),
    **dict.fromkeys("check diagnose health verify".split(), "doctor"),
    **dict.fromkeys("configure init install".split(), "setup"),
    **dict.fromkeys("cpus numa topo topology".split(), "affinity"),
    "version": "--version",
}
"""Words of other tools for our commands."""


class _Elsewhere(NamedTuple):
    """Options of other tools that are no argument of a claim.

    Attributes:
        words: their names, without dashes in front and with ``_`` within.
        has: an option of the commands for which this is meant.
        hint: the tail of the sentence; ``{value}`` is what was typed behind the option, or stands for it.
    """

    words: str
    has: str
    hint: str


_OPTIONS = (
    _Elsewhere(
        "fix repair",
        "--json",
        "safe-gpu doctor prints each fix and changes nothing; safe-gpu setup, as root, prepares a host",
    ),
    _Elsewhere("because comment message note", "--reason", "did you mean --reason?"),
    _Elsewhere("duration for hold_for time", "--until", "did you mean --until +{value}?"),
    _Elsewhere("begin start starttime", "--from", "did you mean --from?"),
    _Elsewhere("end endtime", "--until", "did you mean --until?"),
    _Elsewhere("cancel delete end off remove undo", "--for-group", "to allow claims again, write safe-gpu resume"),
    _Elsewhere("a all", "--for-group", "leave it out: all GPUs are meant if none is named"),
    _Elsewhere("a all", "--reservation", "leave it out: all GPUs are meant if none is named"),
    _Elsewhere("a all", "--all-hosts", "leave it out for all GPUs and users of this host; --all-hosts shows others"),
    _Elsewhere("i interval l loop lms loop_ms m monitor n w d delay", "--prometheus", "did you mean --watch?"),
    _Elsewhere("1 once", "--prometheus", "leave it out: the table is printed once unless --watch is given"),
    _Elsewhere(
        "c p f F P cp cu cpu cup cpuf cupf cpuF cupF cpuP cupP cpuFP cupFP show_cmd show_full_cmd show_pid show_fan "
        "show_fan_speed show_power",
        "--prometheus",
        "users and commands are shown without it; --verbose adds processes, fans and power",
    ),
    _Elsewhere("u show_user", "--prometheus", "did you mean --user NAME?"),
    _Elsewhere("q query query_gpu query_compute_apps x format csv xml", "--prometheus", "did you mean --json?"),
    _Elsewhere(
        "color colour force_color no_color",
        "--prometheus",
        "on terminals there are colours, unless NO_COLOR=1 is set before the command",
    ),
    _Elsewhere(
        "o only gpu gpus id L list list_gpus",
        "--prometheus",
        "all GPUs are shown without it; --free lists those that are free, --mine shows yours",
    ),
    _Elsewhere("add edit set", "--check", "limits are set in /etc/safe-gpu/config.ini, by root"),
    _Elsewhere("days last S start starttime", "--since", "did you mean --since?"),
    _Elsewhere("E end endtime", "--since", "did you mean --until?"),
    _Elsewhere("month monthly", "--report", "did you mean --report month?"),
    _Elsewhere("week weekly", "--report", "did you mean --report week?"),
    _Elsewhere("u", "--report", "did you mean --user NAME?"),
    _Elsewhere("group_by per", "--by", "did you mean --by?"),
    _Elsewhere("b background bg daemon detach", "--refused-exit", "write nohup safe-gpu run ... -- CMD >log 2>&1 &"),
    _Elsewhere("e env export", "--refused-exit", "write safe-gpu run ... -- env NAME=VALUE CMD"),
    _Elsewhere("D chdir cwd workdir", "--refused-exit", "change to that directory before: safe-gpu run stays in it"),
    _Elsewhere("log log_file logfile o output", "--refused-exit", "write safe-gpu run ... -- CMD >FILE 2>&1"),
    _Elsewhere("l", "--refused-exit", "did you mean -n? (how many GPUs)"),
    _Elsewhere("auto best free least_used random", "--refused-exit", "leave it out: only GPUs that are free are taken"),
    _Elsewhere("np ntasks pe", "--refused-exit", "one process is started: write safe-gpu run ... -- mpirun -np N CMD"),
    _Elsewhere("v verbose", "--refused-exit", "leave it out: on a terminal it says which GPUs it got"),
    _Elsewhere("dry_run test_only", "--refused-exit", "safe-gpu status shows which GPUs are free, and claims nothing"),
)


def similar(word: str, known: Iterable[str]) -> str:
    """Return the one of these words that looks most like it, dashes aside; "" where none does."""
    from difflib import get_close_matches

    bare = {}
    for one in known:
        is_short_option = one.startswith("-") and not one.startswith("--")
        if not is_short_option:
            bare[one.lstrip("-")] = one
    close = get_close_matches(word.lstrip("-").lower().replace("_", "-"), bare, n=1, cutoff=0.7)
    if not close:
        return ""
    return bare[close[0]]


def unknown_option(word: str, options_of: Mapping[str, Sequence[str]], after: str = "") -> str:
    """Return the usage error for an option where a command was expected.

    Args:
        options_of: command -> its options.
        after: what follows the option.
    """
    name = word.partition("=")[0]
    of_run = options_of["run"]
    if not after and _is_of_status(name):
        return f"there is no option {name}: did you mean safe-gpu status?"
    if name not in of_run and chooses_by_index(name):
        return unknown_argument(word, of_run, after)
    for command, options in options_of.items():
        if name in options:
            return f"{name} is an option of safe-gpu {command}: write safe-gpu {command} {word} ..."
    if _by_meaning(name, after, of_run):
        return unknown_argument(word, of_run, after)
    return unknown_argument(word, ("--help", "--version"))


def _is_of_status(name: str) -> bool:
    """Return whether tools that show GPUs have an option of this name."""
    bare = name.lstrip("-").replace("-", "_")
    return any(one.has == "--prometheus" and bare in one.words.split() for one in _OPTIONS)


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """Return the usage error for a first word that is no command."""
    from shutil import which

    from .advice import hint_for

    text = f"there is no command {word!r}"
    if word.lower() in GIVE_BACK:
        return f"{text}: a GPU is given back when its process ends: kill PID, which safe-gpu status -v shows"
    meant = _MEANT.get(word.lower()) or similar(word, commands)
    if meant:
        return f"{text}: did you mean safe-gpu {meant}?"
    if os.path.isfile(word):
        return f"{text}; {hint_for([word], 'safe-gpu run')}"
    if which(word):
        return f"{text}: to run it on a GPU, write safe-gpu run -- {word}"
    return f"{text}: choose from {', '.join(commands)}"


def unknown_argument(word: str, known: Sequence[str], after: str = "") -> str:
    """Return the usage error for an argument that a command with these options does not take, and what follows it."""
    if word == "--":
        return "no command is run here: did you mean safe-gpu run?"
    if not word.startswith("-"):
        if word.isdecimal() and "-n" in known:
            return f"unexpected argument {word!r}: did you mean -n {word}?"
        if not word.isdecimal() and "--user" in known:
            return f"unexpected argument {word!r}: did you mean --user {word}?"
        return f"unexpected argument {word!r}"
    name, _, value = word.partition("=")
    hint = _by_meaning(name, value or after, known)
    if not hint and len(name) > 2:
        meant = similar(name, known)
        if meant:
            hint = f"did you mean {meant}?"
    if not hint:
        return f"there is no option {name}"
    return f"there is no option {name}: {hint}"


def _by_meaning(name: str, value: str, known: Sequence[str]) -> str:
    """Return the hint for an option of other tools, with what follows it, that does what one of these options does;
    "" if nobody knows it."""
    bare = name.lstrip("-").replace("-", "_")
    for one in _OPTIONS:
        if one.has in known and bare in one.words.split():
            first, *_ = [*value.split(), "2h"]
            return one.hint.format(value=first)
    meant = meant_by(name)
    if meant is None:
        return ""
    if meant.argument == "only":
        return _choosing_by_index(value, known)
    if not meant.argument and "-n" in known:
        return meant.hint()
    if as_option(meant.argument) in known:
        return meant.hint()
    return ""


def _choosing_by_index(value: str, known: Sequence[str]) -> str:
    """Return the hint for an option that chooses GPUs by their indices, with this value; "" if none of these does."""
    for option in ("--only", "--gpu"):
        if option in known:
            gpus = re.match(r"(cuda:)?((\d|GPU-|MIG-)[\w,:-]*)(?!\S)", value)
            if gpus is None:
                return f"did you mean {option} 0?"
            return f"did you mean {option} {gpus[2]}?"
    return ""


def impossible_value(option: str, value: str) -> str:
    """Return the hint for a value that an option does not take, but another one does; "" if none does."""
    from ..errors import UnsatisfiableRequestError
    from ..settings.values import parse_size

    if option != "--memory":
        return ""
    try:
        parse_size(value)
    except UnsatisfiableRequestError:
        return ""
    return f"for free memory on each GPU, write {written('min_memory', value)}"
