"""What a claim asks for. Pure.

A condition is a class here, and a row of :data:`CONDITIONS`. Everything else derives from it: the arguments of claims
and their parsing, the option of the command line, the verdicts, and what a ticket tells others.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import Gpu, HostSnapshot, vendor_of_name
from ..gpus.vendors import VENDORS
from ..settings.values import as_index, model_pattern, names_device, parse_names, parse_size, refused
from ..wording import style
from ..wording.text import format_bytes, plural
from .sharing import LEAST_SHARE, MIB, part_of, share_capacity, why_unshareable

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Conditions(TypedDict, total=False):
    """The arguments of a claim that set conditions, as callers may write them."""

    min_memory: int | str | None
    model: str | None
    exclude: str | int | Iterable[str | int]
    only: str | int | Iterable[str | int]
    max_utilization: int | str | None
    near: str | None
    share: int | str | None
    prefer: str | Iterable[str] | None


@dataclass(frozen=True)
class Condition:
    """What a claim asks of each GPU, or of the GPUs together, besides their number.

    Texts about GPUs are for people; "" means that the GPU meets the condition.

    Attributes:
        value: as parsed.
        argument: of ``claim_gpus``.
        metavar: of the command line's option.
        help: of the command line's option.
        ticketed: whether others must know it, since it depends on more than which GPU it is. Then ``value`` is JSON.
    """

    value: Any

    argument: ClassVar[str]
    metavar: ClassVar[str]
    help: ClassVar[str]
    ticketed: ClassVar[bool] = False

    @classmethod
    def parse(cls, value: Any) -> Any:
        """Return the checked value; None is no condition.

        Raises:
            UnsatisfiableRequestError: names the value and what is valid.
        """
        raise NotImplementedError

    @classmethod
    def from_ticket(cls, value: object) -> "Condition":
        """Return the condition of another process's ticket.

        Raises:
            ValueError, TypeError: the value is not valid.
        """
        return cls(cls.parse(value))

    def resolved(self, gpus: Sequence[Gpu]) -> "Condition":
        """Return what it means on a host with these GPUs.

        Raises:
            UnsatisfiableRequestError: it is not valid there.
        """
        return self

    @property
    def needs(self) -> str:
        """The method of :class:`~safe_gpu.drivers.base.Driver` that must complete each poll for it; "" for none."""
        return ""

    def why_outside(self, gpu: Gpu) -> str:
        """Return why the GPU never meets the condition."""
        return ""

    def why_unknowable(self, gpu: Gpu) -> str:
        """Return why it will never be known whether the GPU meets the condition."""
        return ""

    def why_not_now(self, gpu: Gpu, freed: int = 0) -> str:
        """Return why the GPU does not meet the condition at the moment.

        Args:
            freed: bytes that are in use by processes that do not count.
        """
        return ""

    def groups(self, gpus: Sequence[Gpu]) -> list[list[Gpu]]:
        """Return the largest sets of these GPUs of which any subset meets the condition together."""
        return [list(gpus)]


def _memory_is_not_told(argument: str) -> str:
    return f"the driver does not report its memory: leave {style.option(argument)} out"


class MinMemory(Condition):
    argument = "min_memory"
    metavar = "S"
    help = "free memory on each GPU, such as 20GiB"
    ticketed = True

    @classmethod
    def parse(cls, value: Any) -> int | None:
        return parse_size(value) or None

    @classmethod
    def from_ticket(cls, value: object) -> Condition:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_MEMORY:
            raise ValueError(value)
        return cls(value)

    def why_outside(self, gpu: Gpu) -> str:
        if gpu.memory_total is None or gpu.memory_total >= self.value:
            return ""
        return f"{format_bytes(gpu.memory_total)} in all, {format_bytes(self.value)} asked for"

    def why_unknowable(self, gpu: Gpu) -> str:
        if gpu.memory_free is not None:
            return ""
        return _memory_is_not_told(self.argument)

    def why_not_now(self, gpu: Gpu, freed: int = 0) -> str:
        if gpu.memory_free is None:
            return f"free memory unknown, {format_bytes(self.value)} asked for"
        free = gpu.memory_free + freed
        if free >= self.value:
            return ""
        return f"{format_bytes(free)} of memory free, {format_bytes(self.value)} asked for"


@dataclass(frozen=True)
class _Models(Condition):
    """Names of models, or parts of them; ``names`` are the product names of the host."""

    names: tuple[str, ...] = ()

    @cached_property
    def meant(self) -> Sequence[Any]:
        """The pattern (``re.Pattern``) of what each means there."""
        texts = self.value
        if isinstance(texts, str):
            texts = (texts,)
        return [model_pattern(text, self.names) for text in texts]

    def resolved(self, gpus: Sequence[Gpu]) -> Condition:
        return replace(self, names=tuple(gpu.name for gpu in gpus))


class Model(_Models):
    argument = "model"
    metavar = "P"
    help = "part of the GPU's name, such as A100, or a pattern: 'RTX*4090'"

    @classmethod
    def parse(cls, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            example = style.value("A100")
            pattern = style.value("RTX*4090")
            raise refused("model", value, f"give part of the name, such as {example}, or a pattern: {pattern}")
        return value.strip()

    def why_outside(self, gpu: Gpu) -> str:
        if self.meant[0].match(gpu.name):
            return ""
        pattern = style.written(self.argument, self.value)
        return f"{gpu.name or 'GPU without a name'} does not match {pattern}"


class _Names(Condition):
    """Names of GPUs: indices, UUIDs and prefixes of UUIDs. ``listed`` says whether a GPU must be, or must not."""

    metavar = "L"
    listed: ClassVar[bool]

    @classmethod
    def parse(cls, value: Any) -> tuple[str, ...] | None:
        return parse_names(value, cls.argument) or None

    def why_outside(self, gpu: Gpu) -> str:
        if any(names_device(name, gpu) for name in self.value) == self.listed:
            return ""
        setting = style.setting(self.argument, ",".join(self.value))
        if self.listed:
            return f"not listed in {setting}"
        return f"listed in {setting}"


class Only(_Names):
    argument = "only"
    help = "only these GPUs: 0,3 or 4-7 or UUIDs"
    listed = True


class Exclude(_Names):
    argument = "exclude"
    help = "not these GPUs: 0,3 or 4-7 or UUIDs"
    listed = False


class MaxUtilization(Condition):
    argument = "max_utilization"
    metavar = "PCT"
    help = "only GPUs whose utilisation is at most this, in percent, such as 10"
    ticketed = True

    @property
    def needs(self) -> str:
        return "detailed"

    @classmethod
    def parse(cls, value: Any) -> int:
        percent = as_index(value)
        if isinstance(value, str):
            digits = value.strip().removesuffix("%")
            if digits.isdecimal() and len(digits) < 4:
                percent = int(digits)
        if percent is None or not 0 <= percent <= 100:
            raise refused(cls.argument, value, f"give percent from 0 to 100, such as {style.value(10)}")
        return percent

    def why_unknowable(self, gpu: Gpu) -> str:
        """Return why, as of a MIG instance, whose utilisation NVML does not report."""
        if gpu.utilization is not None:
            return ""
        return f"the driver does not report its utilisation: leave {style.option(self.argument)} out"

    def why_not_now(self, gpu: Gpu, freed: int = 0) -> str:
        if gpu.utilization is None:
            return f"utilisation unknown, at most {self.value}% asked for"
        if gpu.utilization <= self.value:
            return ""
        return f"{gpu.utilization}% busy, at most {self.value}% asked for"


class Near(Condition):
    argument = "near"
    metavar = "HOW"
    help = "all on one NUMA node (numa), or each connected to each by NVLink (nvlink)"
    ticketed = True

    @classmethod
    def parse(cls, value: Any) -> str:
        if not isinstance(value, str) or value not in _TOGETHER:
            choices = " or ".join(style.value(choice) for choice in _TOGETHER)
            raise refused(cls.argument, value, f"choose {choices}")
        return value

    @property
    def needs(self) -> str:
        if self.value == "nvlink":
            return "linked"
        return ""

    @property
    def together(self) -> str:
        """What the GPUs must be together."""
        return _TOGETHER[self.value]

    def groups(self, gpus: Sequence[Gpu]) -> list[list[Gpu]]:
        if self.value == "nvlink":
            return _groups_by_nvlink(gpus)
        return _groups_by_node(gpus)


_TOGETHER = {"numa": "on one NUMA node", "nvlink": "all connected to each other by NVLink"}


def _groups_by_node(gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    """Return the GPUs of each NUMA node, without those whose node is not known."""
    by_node: dict[int, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.numa_node is not None:
            by_node.setdefault(gpu.numa_node, []).append(gpu)
    return [by_node[node] for node in sorted(by_node)]


def _groups_by_nvlink(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Return the largest sets of GPUs each of which is linked to each."""
    groups = []
    for clique in _cliques(tuple((gpu.uuid, gpu.nvlink_peers) for gpu in gpus)):
        groups.append([gpu for gpu in gpus if gpu.uuid in clique])
    return groups


def linked(peers: Iterable[tuple[str, frozenset[str]]]) -> dict[str, set[str]]:
    """Return the UUIDs to which each GPU is linked, or that are linked to it.

    Args:
        peers: each UUID with those that it names.
    """
    named = dict(peers)
    found: dict[str, set[str]] = {uuid: set() for uuid in named}
    for uuid in named:
        for peer in found.keys() & named[uuid] - {uuid}:
            found[uuid].add(peer)
            found[peer].add(uuid)
    return found


@lru_cache(64)  # asked for each of hundreds of waiters; of 16 GPUs it takes 0.7 ms
def _cliques(peers: tuple[tuple[str, frozenset[str]], ...]) -> list[frozenset[str]]:
    """Return the largest sets of UUIDs each of which is linked to each."""
    cliques = {frozenset[str]()}
    for uuid, others in linked(peers).items():
        # Those of the GPUs so far, with this one and without it.
        with_it = {clique & others | {uuid} for clique in cliques}
        both = cliques | with_it
        cliques = {clique for clique in both if not any(clique < larger for larger in with_it)}
    return sorted(cliques, key=sorted)


def _percent_meant(value: Any) -> str | None:
    """Return a part of 1, such as 0.5 or "0.5", in percent; None for anything else, also for whole numbers."""
    is_whole = as_index(value) is not None or (isinstance(value, str) and "." not in value)
    if is_whole or isinstance(value, bool):
        return None
    try:
        part = float(value)
    except (TypeError, ValueError):
        return None
    if not 0 < part <= 1:
        return None
    return f"{max(1, round(100 * part))}%"


class Share(Condition):
    """Not all of each GPU, but this much memory: whole MiB in bytes, or percent as text until the host is known."""

    argument = "share"
    metavar = "S"
    help = "not whole GPUs, but this much memory of each, such as 20GiB or 25%%, beside others that share"
    ticketed = True

    @classmethod
    def parse(cls, value: Any) -> int | str:
        if isinstance(value, str) and value.strip().endswith("%"):
            number = value.strip().removesuffix("%").strip()
            if not number.isdecimal() or not 0 < int(number[:4]) <= 100:
                raise refused("share", value, f"give percent from 1 to 100, such as {style.value('25%')}")
            return f"{int(number)}%"
        percent = _percent_meant(value)
        if percent is not None:
            wanted = style.written("share", percent)
            raise refused("share", value, f"for that part of each GPU's memory, write {wanted}")
        size = -(-parse_size(value, "share") // MIB) * MIB
        if size < LEAST_SHARE:
            raise refused("share", value, f"{format_bytes(LEAST_SHARE)} is the least, CUDA's context included")
        return size

    @classmethod
    def from_ticket(cls, value: object) -> Condition:
        MinMemory.from_ticket(value)  # raises where it is no number of bytes
        return cls(value)

    def why_outside(self, gpu: Gpu) -> str:
        return why_unshareable(gpu, self.value)

    def why_unknowable(self, gpu: Gpu) -> str:
        if gpu.memory_total is not None:
            return ""
        return _memory_is_not_told(self.argument)

    def resolved(self, gpus: Sequence[Gpu]) -> Condition:
        """Return the same in bytes. Percent are of what can be shared of each of these GPUs, which must be alike."""
        if not isinstance(self.value, str):
            return self
        capacities = {share_capacity(gpu) for gpu in gpus}
        sizes = sorted(size for size in capacities if size is not None)
        if len(sizes) > 1:
            way_out = f"GPUs here have from {format_bytes(sizes[0])} to {format_bytes(sizes[-1])} to share: "
            way_out += f"give a size, such as {style.value('20GiB')}, or choose GPUs by {style.option('model')}"
            raise refused("share", self.value, way_out)
        if not sizes:
            return Share(0)
        percent = int(self.value.removesuffix("%"))
        share = sizes[0] * percent // 100 // MIB * MIB
        if share < LEAST_SHARE:
            raise refused("share", self.value, f"{format_bytes(LEAST_SHARE)} is the least")
        return Share(share)


class Prefer(_Models):
    """An order among the GPUs that meet the request. It excludes none."""

    argument = "prefer"
    metavar = "P"
    help = "models to take first, such as H100,A100; others are taken too"

    @classmethod
    def parse(cls, value: Any) -> tuple[str, ...] | None:
        patterns = value
        if isinstance(value, str):
            patterns = value.split(",")
        if not isinstance(patterns, Iterable) or not all(isinstance(one, str) and one.strip() for one in patterns):
            example = style.value("H100,A100")
            raise refused(cls.argument, value, f"list parts of names, the best first, such as {example}")
        return tuple(one.strip() for one in patterns) or None


CONDITIONS: tuple[type[Condition], ...] = (Only, Exclude, Model, MinMemory, MaxUtilization, Near, Share, Prefer)
"""In the order in which they are checked."""

_MOST_MEMORY = 1 << 60


_BY_ARGUMENT = {condition.argument: condition for condition in CONDITIONS}


class Selection(NamedTuple):
    """What a claim asks for, checked and parsed by :func:`parse_request`.

    ``vendor`` is one of ``VENDORS``, or None for no choice.
    ``up_to``: how many GPUs it takes if it can have them at once, of which it needs ``nb_gpus``; None: no more.
    """

    nb_gpus: int = 1
    conditions: tuple[Condition, ...] = ()
    vendor: str | None = None
    up_to: int | None = None

    def value_of(self, argument: str) -> Any:
        """Return the value of a condition; None where there is no such condition."""
        for one in self.conditions:
            if one.argument == argument:
                return one.value
        return None

    @property
    def share(self) -> int | None:
        """Bytes of each GPU; None for whole GPUs."""
        size: int | None = self.value_of("share")
        return size

    @property
    def whole(self) -> "Selection":
        """The same request for whole GPUs."""
        return self._replace(conditions=tuple(one for one in self.conditions if not isinstance(one, Share)))

    def resolved(self, snapshot: HostSnapshot) -> "Selection":
        """Return what the request means on this host: which models, and a share in bytes.

        Raises:
            UnsatisfiableRequestError: a share in percent, and the GPUs have different memory.
        """
        if not self.conditions:
            return self
        resolved = [condition.resolved(snapshot.gpus) for condition in self.whole.conditions]
        whole = self._replace(conditions=tuple(resolved))
        possible = [gpu for gpu in snapshot.gpus if not gpu.mig_enabled and not whole.why_outside(gpu)]
        shares = [condition.resolved(possible) for condition in self.conditions if isinstance(condition, Share)]
        return whole._replace(conditions=(*resolved, *shares))

    @property
    def preferred(self) -> Sequence[Any]:
        """The patterns (``re.Pattern``) of the models to take first, the best first."""
        for condition in self.conditions:
            if isinstance(condition, Prefer):
                return condition.meant
        return ()

    @property
    def driver(self) -> dict[str, Any]:
        """Arguments of :class:`~safe_gpu.drivers.opened_driver`: the request may name the vendor, or a GPU of it by a
        whole UUID in ``only``."""
        for name in self.value_of("only") or ():
            vendor = vendor_of_name(name)
            if vendor is not None:
                return {"vendor": self.vendor, "prefer": vendor}
        return {"vendor": self.vendor, "prefer": None}

    @property
    def needs(self) -> frozenset[str]:
        """The methods of :class:`~safe_gpu.drivers.base.Driver` that must complete each poll for its conditions."""
        return frozenset(condition.needs for condition in self.conditions if condition.needs)

    @property
    def ticket(self) -> tuple[tuple[str, Any], ...]:
        """What others must know of its conditions: arguments and JSON values."""
        return tuple((one.argument, one.value) for one in self.conditions if one.ticketed)

    @classmethod
    def from_ticket(cls, nb_gpus: int, conditions: Iterable[tuple[str, Any]]) -> "tuple[Selection, bool]":
        """Return the request of another process, and whether all its conditions are known here."""
        found = []
        known = True
        for argument, value in conditions:
            try:
                found.append(_BY_ARGUMENT[argument].from_ticket(value))
            except (KeyError, ValueError, TypeError):
                known = False
        return cls(nb_gpus, tuple(found)), known

    def amount(self, gpus: Iterable[Gpu]) -> float:
        """Return how many of these GPUs it counts as: a share as its part of the smallest GPU that has it."""
        least = self.share or 0
        parts = [part_of(gpu, self.share) for gpu in gpus if (share_capacity(gpu) or 0) >= least]
        return self.nb_gpus * max(parts, default=1.0)

    def why_outside(self, gpu: Gpu) -> str:
        """Return why the GPU can never satisfy the request; "" if it can."""
        for condition in self.conditions:
            reason = condition.why_outside(gpu)
            if reason:
                return reason
        return ""

    def why_unknowable(self, gpu: Gpu) -> str:
        """Return why it will never be known whether the GPU satisfies the request."""
        for condition in self.conditions:
            reason = condition.why_unknowable(gpu)
            if reason:
                return reason
        return ""

    def why_not_now(self, gpu: Gpu, disregarded: Collection[int]) -> str:
        """Return why the GPU does not satisfy the request now, without the processes with these pids."""
        if not self.conditions:
            return ""
        freed = sum(process.memory_used or 0 for process in gpu.processes or () if process.pid in disregarded)
        for condition in self.conditions:
            reason = condition.why_not_now(gpu, freed)
            if reason:
                return reason
        return ""

    def groups(self, gpus: Sequence[Gpu]) -> list[list[Gpu]]:
        """Return the largest sets of these GPUs of which any ``nb_gpus`` satisfy the request together."""
        groups = [list(gpus)]
        if not self.several:
            return groups
        for condition in self.conditions:
            divided: list[list[Gpu]] = []
            for group in groups:
                divided += condition.groups(group)
            groups = divided
        return groups

    @property
    def together(self) -> str:
        """What the GPUs must be together; "" if nothing."""
        if not self.several:
            return ""
        for condition in self.conditions:
            if isinstance(condition, Near):
                return condition.together
        return ""

    @property
    def text(self) -> str:
        """What is asked for: ``2-4 GPUs on one NUMA node``, ``20 GiB each of 2 GPUs``."""
        text = plural(self.nb_gpus)
        if self.up_to:
            text = f"{self.nb_gpus}-{self.up_to} GPUs"
        if self.share and self.several:
            text = f"{format_bytes(self.share)} each of {text}"
        elif self.share:
            text = f"{format_bytes(self.share)} of {text}"
        if self.together:
            text += f" {self.together}"
        return text

    @property
    def several(self) -> bool:
        """Whether it may get more than one GPU."""
        return max(self.nb_gpus, self.up_to or 0) > 1

    @property
    def numbers(self) -> "Iterator[Selection]":
        """The same request for each number of GPUs that it takes, the largest first."""
        for number in range(self.up_to or 0, self.nb_gpus, -1):
            yield self._replace(nb_gpus=number)
        yield self


def parse_request(nb_gpus: object = 1, *, vendor: object = None, **conditions: "Unpack[Conditions]") -> Selection:
    """Check and parse what a claim asks for.

    Args:
        nb_gpus: a whole number, 1 or more (numpy integers too), or the least and the most, as ``(2, 4)``.
        vendor: one of ``VENDORS``; None: no choice.
        conditions: as ``claim_gpus`` documents them; None or nothing in it is no condition.

    Raises:
        UnsatisfiableRequestError: a value is invalid; the message names it and says which values are valid.
    """
    given: Mapping[str, Any] = conditions
    unknown = given.keys() - _BY_ARGUMENT.keys()
    if unknown:
        raise TypeError(f"there is no argument {min(unknown)!r}")
    if isinstance(vendor, str):
        vendor = vendor.strip().lower()
    found: list[Condition] = []
    for condition in CONDITIONS:
        if given.get(condition.argument) is not None:
            value = condition.parse(given[condition.argument])
            if value is not None:
                found.append(condition(value))
    if vendor is not None and vendor not in tuple(VENDORS):
        choices = " or ".join(style.value(choice) for choice in VENDORS)
        raise refused("vendor", vendor, f"choose {choices}")
    kinds = {type(condition) for condition in found}
    if MinMemory in kinds and Share in kinds:
        both = f"{style.option('min_memory')} and {style.option('share')}"
        why = "a share is memory of its own, so ask for the larger of the two as a share"
        raise UnsatisfiableRequestError(f"{both} do not go together: {why}", value=given["share"])
    least, most = _range(nb_gpus)
    return Selection(_count(least), tuple(found), vendor, most)


def _range(nb_gpus: object) -> tuple[object, int | None]:
    """Return the least number of GPUs and, if the caller wrote two numbers, the most."""
    if not isinstance(nb_gpus, tuple) or len(nb_gpus) != 2:
        return nb_gpus, None
    least = as_index(nb_gpus[0])
    most = as_index(nb_gpus[1])
    if least is None or most is None or not 0 < least < most:
        return nb_gpus, None
    return least, most


def _count(nb_gpus: object) -> int:
    count = as_index(nb_gpus)
    if count is None or count < 1:
        job = style.value("job")
        way_out = f"ask for a whole number of GPUs, 1 or more (or {job} for the number that the batch job asked for)"
        if isinstance(nb_gpus, (list, tuple, range, set)):
            way_out += f"; to choose GPUs by index, pass {style.written('only', nb_gpus)}"
        elif isinstance(nb_gpus, str) and nb_gpus.isdecimal():  # such as sys.argv[1]
            way_out += f"; {nb_gpus!r} is text: pass int({nb_gpus!r})"
        raise refused("nb_gpus", nb_gpus, way_out)
    return count
