"""What other tools, and other words of ours, call what is meant here: hints go by meaning before they go by spelling.

The words serve Python and the command line. They are lower case, without dashes in front, and with ``_`` within.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from . import style


class Meant(NamedTuple):
    """What is written here for a word of other tools.

    Attributes:
        argument: its name in a claim of one process; "" where no argument of it does what the word asks for.
        otherwise: its name in claims across hosts, or in ``bind``, if it has another one there.
        value: what to write as its value; "" keeps the caller's.
        note: a sentence without its full stop; names of arguments in braces are filled in.
    """

    argument: str = ""
    value: str = ""
    note: str = ""
    otherwise: str = ""

    def hint(self) -> str:
        """Return the tail of a sentence such as ``there is no option --mem``, for Python or for the command line."""
        options = {name: style.option(name) for name in re.findall(r"{(\w+)}", self.note)}
        note = self.note.format(**options)
        if not self.argument:
            return note
        wanted = style.option(self.argument)
        if self.value:
            wanted = style.written(self.argument, _python_value(self.value))
        if note:
            note = f" ({note})"
        return f"did you mean {wanted}?{note}"


def _python_value(text: str) -> object:
    if text.isdecimal():
        return int(text)
    return text


_HOW_LONG = Meant("hold_for", note="how long the GPUs will probably be held; {timeout} is how long to wait for them")

_ONLY = Meant("only", otherwise="gpus")

WORDS_OF: Mapping[Meant, str] = {
    Meant(
        "nb_gpus", otherwise="gpus_per_node"
    ): "count gpu_count gpus gpus_per_node gpus_per_task how_many n n_gpu n_gpus nb_gpu ngpu ngpus nr_gpus "
    "num_gpu num_gpus number number_of_gpus G gres",
    Meant("timeout"): "block blocking max_wait patience wait wait_for wait_time wait_timeout",
    Meant("timeout", "0"): "immediate no_block no_wait nonblocking nowait",
    _HOW_LONG: "duration estimate expected_time hold hold_time max_runtime max_time runtime time time_limit wall_time "
    "walltime",
    Meant(
        "min_memory", note="free memory on each GPU"
    ): "free_memory gpu_mem gpu_memory mem mem_free mem_per_gpu memory_free "
    "memory_gb min_free_memory min_mem min_vram required_memory vram",
    Meant("share", note="a part of each GPU's memory, beside other claims"): "fraction gpu_fraction mem_fraction "
    "memory_fraction memory_limit part portion shared",
    Meant("model"): "C constraint device_name gpu_model gpu_name gpu_type kind type",
    _ONLY: "cuda_visible_devices list nodelist w",
    Meant("exclude"): "avoid blacklist except ignore skip without x",
    Meant(
        "max_utilization"
    ): "threshold load max_load max_usage max_util max_utilisation maxload usage util utilisation utilization",
    Meant("near"): "closeness locality topology",
    Meant("near", "nvlink"): "nvlink p2p peer_to_peer",
    Meant("near", "numa"): "numa numa_node same_node same_numa socket",
    Meant("prefer"): "favor favour order preference preferred",
    Meant("visible_as", "uuid"): "by_uuid use_uuid uuid uuids",
    Meant("placeholder_fn"): "backend placeholder",
    Meant(
        "affinity", otherwise="mode"
    ): "bind bind_cpus binding cpu_affinity cpu_bind cpus cpus_per_gpu cpus_per_task numa_bind pin pinning",
    Meant(
        note="leave it out, since a claim shares its GPUs with nobody unless it is made with {share}"
    ): "exclusive whole",
    Meant(
        note="a claim is on one host; Ray and Dragon claim on several: see safe_gpu.engines", otherwise="nodes"
    ): "N hosts nnodes nodes num_nodes",
    Meant(
        note="there is one queue for all; a claim that says {hold_for} may start earlier"
    ): "account nice p partition priority qos queue",
    Meant(note="claims have no names; safe-gpu status shows the command"): "J job_name name",
}
"""What other tools call each argument of a claim: words, each of which means one of them."""

ARGUMENTS = {word: meant for meant, words in WORDS_OF.items() for word in words.split()}
"""Word -> the argument of a claim that is meant. Those that choose GPUs by their index are left to :func:`meant_by`."""

_BY_INDEX = r"[dgi]|cuda|(cuda_|use_|visible_)*(gpu|device|id|index|indice|only|ordinal)(_(id|index|indice))?s?"

CLAIM = frozenset("acquire alloc allocate claim get grab hold lock request take use".split())
"""Verbs for taking GPUs."""

GIVE_BACK = frozenset("abort cancel end free kill quit release return stop terminate unclaim unlock".split())
"""Verbs for giving GPUs back."""


def chooses_by_index(word: str) -> bool:
    """Return whether an option or argument of this name chooses GPUs by their indices elsewhere."""
    return re.fullmatch(_BY_INDEX, _bare(word).lower()) is not None


def meant_by(word: str) -> Meant | None:
    """Return the argument of a claim that an option or argument of this name is elsewhere; None if nobody knows.

    >>> meant_by("--max-time").argument, meant_by("num_gpus").argument, meant_by("device_ids").argument
    ('hold_for', 'nb_gpus', 'only')
    """
    bare = _bare(word)
    found = ARGUMENTS.get(bare) or ARGUMENTS.get(bare.lower())
    if found is None and chooses_by_index(word):
        return _ONLY
    return found


def _bare(word: str) -> str:
    return word.lstrip("-").replace("-", "_")


def instead_of(name: str, known: Collection[str]) -> str:
    """Return the end of an error for an argument that there is not: what to write instead; "" if nobody knows.

    Args:
        known: the names of the arguments that there are.
    """
    meant = meant_by(name) or _meant_by_argument(name)
    if meant is not None:
        if meant.otherwise in known:
            return f": {Meant(meant.otherwise).hint()}"
        if not meant.argument or meant.argument in known:
            return f": {meant.hint()}"
    alike = _alike(name, known)
    if alike:
        return f": did you mean {style.option(alike)}?"
    return ""


def _meant_by_argument(name: str) -> Meant | None:
    """Return what an argument of a claim of one process is for; None if there is none of this name."""
    for meant in WORDS_OF:
        if meant.argument == name:
            return meant
    return None


def _alike(name: str, known: Collection[str]) -> str:
    """Return the name that is spelt alike; "" if none is."""
    from difflib import get_close_matches

    return "".join(get_close_matches(name.lower(), known, n=1, cutoff=0.7))
