"""The figures of a host by its document of ``status --json``, which may be another host's and say anything. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...gpus.devices import MIG_IS_ON
from ...host.procfs import printable
from ...wording.text import short_age
from ..facts import FREE

Document = Mapping[str, Any]

TITLES = ("Free", "GPU", "Waiting", "Longest", "Held by")

NO_DOCUMENT = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What comes of an answer that is no such document."""


class Figures(NamedTuple):
    """A line on one host.

    Attributes:
        free, total: numbers of GPUs.
        waiting, waiters: the number of waiters, and their users.
        cells: its cells in a table of hosts, by title.
        broken: sentences on the GPUs that cannot be used.
        identity: the same for two names of one host.
    """

    free: int
    total: int
    waiting: int
    waiters: str
    cells: Mapping[str, str]
    broken: tuple[str, ...]
    identity: str


def figures_of(status: Document, now: float) -> Figures:
    """Return them.

    Raises:
        NO_DOCUMENT: it is none.
    """
    gpus = countable(status)
    free, waiting = sum(one["state"] in FREE for one in gpus), len(status["queue"])
    since = [one["since"] for one in status["queue"] if one["since"] is not None]
    models = Counter(one["name"] or "(no name)" for one in gpus)
    held: Counter[str] = Counter()
    for one in gpus:
        for claim in claims_of(one):
            part = (claim["share"] or 0) / (one["memory_total"] or 1) if "share" in claim else 1
            held[claim["user"] or "?"] += part  # type: ignore[assignment]
    cells = (
        f"{free} of {len(gpus)}",
        ", ".join(f"{number} x {name}" if len(models) > 1 else name for name, number in models.items()),
        str(waiting or ""),
        short_age(now - min(since)) if since else "",
        ", ".join(f"{user} {round(number, 2):g}" for user, number in held.most_common()),
    )
    broken = [one for one in gpus if one["state"] == "unusable" and one["state_shown"] != "drained"]
    return Figures(
        free,
        len(gpus),
        waiting,
        printable(", ".join(dict.fromkeys(one["user"] or "?" for one in status["queue"]))),
        dict(zip(TITLES, map(printable, cells), strict=True)),
        tuple(printable(f"GPU {one['index']}: {one['reason']}") for one in broken),
        repr((status["host"], status["state_dir"], *(one["uuid"] for one in gpus))),
    )


def countable(status: Document) -> list[Document]:
    """Return its GPUs, of which the instances count in place of a GPU that is divided."""
    return [one for one in status["gpus"] if not one["reason"].startswith(MIG_IS_ON)]


def claims_of(gpu: Document) -> Sequence[Document]:
    """Return the claims of a GPU: all that share it, or the one that has it."""
    return gpu["shares"] or [one for one in [gpu["claim"]] if one]
