"""Which processes use a GPU that somebody else has claimed, or another one than their claim holds.

Nobody is blamed for what cannot be seen. A process is reported with its user only where all claims of the GPU are seen
here, and it is certainly of none of them. That of a container is nobody's: its parents do not show who started it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from ..coordination.doors import MOST_PARTS
from ..coordination.entry import Entry
from ..coordination.holders import Claims, lives_here
from ..gpus.devices import Gpu, GpuProcess, HostSnapshot
from ..host import procfs
from ..selection.verdicts import memory_text, possible_mps_servers, users_of
from ..wording.text import gpu_ranges
from .facts import BesideStatus
from .processes import ProcessTable


class Bystanders:
    """The processes on GPUs that are of no claim there.

    Args:
        claims: those that live.
        beyond: UUIDs of the GPUs that are known to be held by their doors alone. Processes there are not reported.
        labels: UUID -> the name of a device for people, of all that are shown.
        processes: what /proc says.
    """

    def __init__(
        self, claims: Claims, beyond: Collection[str], labels: Mapping[str, str], processes: ProcessTable
    ) -> None:
        self._claims = claims
        self._beyond = beyond
        self._labels = labels
        self._processes = processes
        self._made_by: dict[int, list[Entry]] = {}  # by a process of some PID namespace
        for entry in claims.living:
            self._made_by.setdefault(entry.pid, []).append(entry)

    @cached_property
    def _kept_by(self) -> Mapping[int, list[Entry]]:
        """The claims whose entry a process has open and locked."""
        found: dict[int, list[Entry]] = {}
        for entry in self._claims.living:
            for pid in self._processes.keepers.get(entry.name, ()):
                found.setdefault(pid, []).append(entry)
        return found

    def beside(self, gpu: Gpu, snapshot: HostSnapshot) -> tuple[BesideStatus, ...]:
        """Return the processes that use a claimed GPU and are of none of its claims, and those that use one which their
        claim does not hold; the one with the most memory first."""
        if gpu.uuid in self._beyond or gpu.mig_enabled or not gpu.processes:
            return ()  # with MIG on the processes are on the instances
        listed = [one for one in gpu.processes if not (one.elsewhere or snapshot.has_ended(one))]
        users = users_of(gpu, listed, self._processes.describe, mps_servers=possible_mps_servers(snapshot))
        users.sort(key=lambda process: (-(process.memory_used or 0), process.pid))
        on_gpu = self._claims.on(gpu.uuid)
        found = (self._beside(process, on_gpu) for process in users)
        return tuple(one for one in found if one is not None)

    def _beside(self, process: GpuProcess, on_gpu: Sequence[Entry]) -> BesideStatus | None:
        """Return what is reported of a process on a GPU with these claims; None for nothing."""
        described = self._processes.described(process)
        if described is None:
            return None
        user, command = described
        own = self._claims_of(process.pid, on_gpu)
        if any(one in on_gpu for one in own):
            return None
        whose: str | None = user
        if own:
            text = self._text_on_stray(process, user, own, on_gpu)
        else:
            text = self._text_on_stranger(process, user, on_gpu)
            if self._processes.family_of(process.pid) is None:
                whose = None
        if not text:
            return None
        return BesideStatus(process.pid, whose, command, process.memory_used, text)

    def _text_on_stray(self, process: GpuProcess, user: str, own: Iterable[Entry], on_gpu: Sequence[Entry]) -> str:
        """Return the sentence on a process whose claims are others; "" if the devices that they hold are not shown."""
        held: set[str] = set()
        for entry in own:
            held.update(entry.gpus)
        labels = [label for uuid, label in self._labels.items() if uuid in held]
        if not labels:
            return ""
        where = "here"
        if on_gpu:
            where = f"beside {_these(on_gpu)}"
        return f"{_uses(process, user)} {where}, and its own claim holds GPU {gpu_ranges(labels)}"

    def _text_on_stranger(self, process: GpuProcess, user: str, on_gpu: Sequence[Entry]) -> str:
        """Return the sentence on a process without a claim; "" if it may be of one of these, or if there is none."""
        if not on_gpu or any(one.uid < 0 for one in on_gpu):
            return ""
        seen = on_gpu[:MOST_PARTS]
        unseen = {one.uid for one in seen if self._processes.pid_of(one) is None}
        unseen.update(one.uid for one in on_gpu[MOST_PARTS:])
        family = self._processes.family_of(process.pid)
        if family is None:
            if unseen:
                return ""
            return f"{_uses(process, None)} in a container; its user is not known"
        effective, _ = family
        uids = {effective, procfs.real_uid_of(process.pid)}
        if not uids.isdisjoint(unseen):
            return ""
        if any(procfs.may_descend_from(process.pid, one.pid) for one in seen if lives_here(one)):
            return ""
        if any(one.uid in uids for one in on_gpu):
            started = f"was not started by {_these(on_gpu)}, as far as can be seen (a container, tmux?)"
            return f"{_uses(process, user)} and {started}"
        return f"{_uses(process, user)} beside {_these(on_gpu)}"

    def _claims_of(self, pid: int, on_gpu: Sequence[Entry]) -> list[Entry]:
        """Return the claims that a process or one of its ancestors has made or keeps; of those on this GPU one is
        enough."""
        family = (pid, *self._processes.ancestors(pid))
        made = [entry for one in family for entry in self._made_by.get(one, ()) if lives_here(entry)]
        if any(entry in on_gpu for entry in made):
            return made
        return made + [entry for one in family for entry in self._kept_by.get(one, ())]


def _uses(process: GpuProcess, user: str | None) -> str:
    whose = ""
    if user is not None:
        whose = f" of {user}"
    return f"process {process.pid}{whose} uses {memory_text(process)}"


def _these(claims: Sequence[Entry]) -> str:
    if len(claims) == 1:
        return "this claim"
    return "these claims"
