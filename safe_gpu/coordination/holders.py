"""Who holds what, by the living claims of one listing, and who of them are in each other's way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from ..errors import StateDirError
from ..gpus.devices import Gpu, HeldAs, Holder
from ..host import procfs
from ..host.foreign_files import read_start
from ..host.programs import command_of
from .directory import state_dir_path
from .doors import Doors, digest
from .entry import Entry, living_entries
from .held_as import held_as

_SECOND_LOOK = 0.005  # seconds

_MOST_DESCRIPTORS = 20_000  # of one user, of which an heir is looked for


class Claims:
    """The living claims of one listing.

    A claim is inside another one if a living claim of the same owner, which is inside none, has its ``inside`` as
    ``token``. One that was inside a claim that has ended is inside none. A GPU and a piece of it, such as a MIG
    instance, are in each other's way, whatever the driver shows of them now.

    Args:
        gpus: the devices that the driver shows; without them, only claims that name a device are known to be on it.

    Example::

        holders = Claims(living_claims(), snapshot.gpus).holders()
    """

    def __init__(self, living: Iterable[Entry], gpus: Iterable[Gpu] = ()) -> None:
        self.living = tuple(entry for entry in living if not entry.nb_gpus)
        self._shown = {gpu.uuid: gpu for gpu in gpus}
        self._around = {
            (one.token, one.uid): one for one in self.living if one.token and not one.inside and one.uid >= 0
        }
        self._naming: dict[str, list[Entry]] = {}  # a GPU

    def around(self, token: str) -> Entry | None:
        """Return the living claim of this user with this token, the value of SAFE_GPU_SCOPE. Its doors are not
        asked."""
        return self._around.get((digest(token), os.geteuid())) if token else None

    def is_inside(self, entry: Entry) -> bool:
        """Return whether it is inside a living claim."""
        return bool(entry.inside) and (entry.inside, entry.uid) in self._around

    def on(self, uuid: str, inside: str = "") -> list[Entry]:
        """Return the claims on a GPU that take room of it from a claim.

        Args:
            inside: hash of the token of the claim around that one; "" of a claim inside none.
        """
        around = self._around.get((inside, os.geteuid())) if inside else None
        if uuid not in self._naming:
            gpu = self._shown.get(uuid)
            self._naming[uuid] = [
                one for one in self.living if uuid in one.gpus or (gpu is not None and held_as(one, gpu, self._shown))
            ]
        naming = self._naming[uuid]
        return [one for one in naming if (one.inside == inside or not self.is_inside(one)) and one is not around]

    def held_as(self, one: Entry, uuid: str) -> HeldAs | None:
        """Return as what a claim holds a device that the driver shows; see :func:`.held_as.held_as`."""
        return held_as(one, self._shown[uuid], self._shown)

    def parts(self, uuid: str, inside: str = "", name: str = "") -> set[int]:
        """Return the parts of a GPU that the claims of :meth:`on` have, or of what else has this name.

        No other claim vouches for a door: two claims of a neighbour, one inside the other, take no room, and could
        say that they have what another state directory holds.
        """
        name = name or uuid
        return {one.parts[name] for one in self.on(uuid, inside) if name in one.parts}

    def parts_with_doors(self, uuid: str, inside: str = "", name: str = "") -> set[int]:
        """Return the same without the parts of claims whose process has ended: its children keep the entry and not the
        doors, so such a door that is held may be of another state directory."""
        name = name or uuid
        return {one.parts[name] for one in self.on(uuid, inside) if name in one.parts and not has_ended(one)}

    def holders(self, inside: str = "", *, told: bool = True) -> dict[str, Holder]:
        """Return UUID -> who holds it, of the devices that the driver shows, as seen by a claim inside none, or inside
        the one with this hash of a token.

        Args:
            told: whether for people, as of :func:`holder_of`; else as of :func:`said_by`, which asks nobody.
        """
        describe = holder_of if told else said_by
        found = {}
        for uuid in self._shown:
            claims = self.on(uuid, inside)
            whole = next((one for one in claims if one.gpus.get(uuid) is None), None)
            if whole is not None:
                found[uuid] = describe(whole)._replace(held_as=self.held_as(whole, uuid))
            elif claims:
                found[uuid] = Holder.of_sharers(describe(one)._replace(share=one.gpus[uuid]) for one in claims)
        return found


def living_claims() -> list[Entry]:
    """Return the living claims in the state directory of this process."""
    return living_entries(state_dir_path(), "claims")


def said_by(entry: Entry) -> Holder:
    """Return what an entry says of its process. Nobody is asked, so it may be called under host.lock."""
    namespace = procfs.namespace_text(entry.pidns or None)
    return Holder(
        None if namespace else entry.pid,
        None,
        entry.job or None,
        entry.command or None,
        entry.since,
        None if namespace else entry.start,
        namespace=namespace,
        until=entry.until,
        uid=entry.uid,
        queued=entry.queued,
    )


def heirs_of(entries: Iterable[Entry]) -> dict[str, int]:
    """Return name of an entry -> a process that has it open and locked, as far as this user may see.

    Only processes of the owners are looked at, and some thousand descriptors of each owner.
    """
    files = {entry.name: entry.file for entry in entries}
    left = dict.fromkeys((entry.uid for entry in entries), _MOST_DESCRIPTORS)
    found: dict[str, int] = {}
    for pid in procfs.pids():
        uid = procfs.uid_of(pid)
        if uid is None or os.geteuid() not in (0, uid) or left.get(uid, 0) <= 0:
            continue
        opened = procfs.open_files(pid) or {}
        left[uid] -= len(opened)
        for number, target in opened.items():
            name = target.rpartition("/")[2]
            if name in files and _is_open(pid, number, files[name]):
                found.setdefault(name, pid)
    return found


def _is_open(pid: int, number: int | str, file: tuple[int, int]) -> bool:
    """Return whether a process has this file open and locked. Any file may have its name."""
    with suppress(OSError):
        status = os.stat(f"/proc/{pid}/fd/{number}")
        return (status.st_dev, status.st_ino) == file and b"lock:" in (
            read_start(f"/proc/{pid}/fdinfo/{number}") or b""
        )
    return False


def heir_of(entry: Entry) -> int | None:
    """Return the process that has an entry, whichever it names; None where this user may not see it."""
    return heirs_of([entry]).get(entry.name) if os.geteuid() in (0, entry.uid) else None


def holder_of(entry: Entry, heir: Callable[[Entry], int | None] = heir_of) -> Holder:
    """Return who holds an entry, for people: its process if that lives here, else one that it left behind.

    The user is the owner of the file. A directory service may be asked.

    Args:
        heir: as :func:`heir_of`.
    """
    said = said_by(entry)._replace(user=procfs.user_name(entry.uid) if entry.uid >= 0 else None)
    if said.namespace:
        return said._replace(pid=entry.pid)  # its own number there
    is_hidden = entry.pid and not procfs.exists(entry.pid) and not procfs.has_ended(entry.pid)
    if is_hidden or lives_here(entry):
        return said._replace(command=command_of(entry.pid, said.command))
    return said._replace(pid=heir(entry), start=None, left_by=entry.pid)


def has_ended(entry: Entry) -> bool:
    """Return whether the process that made an entry has ended, as far as can be seen from here."""
    if not entry.pid or procfs.namespace_text(entry.pidns or None):
        return False
    if procfs.has_ended(entry.pid):
        return True
    told = procfs.start_time(entry.pid)
    return told is not None and not procfs.is_start(entry.start, entry.pid, told)


def lives_here(entry: Entry) -> bool:
    """Return whether the process that made an entry lives in this PID namespace, and is of the owner of the entry."""
    if procfs.namespace_text(entry.pidns or None):
        return False
    # A zombie does not count: its child may hold the entry.
    if not procfs.is_start(entry.start, entry.pid, procfs.start_of_living(entry.pid)):
        return False
    return procfs.uid_of(entry.pid) == entry.uid or procfs.real_uid_of(entry.pid) == entry.uid


def claims_now(
    gpus: Iterable[Gpu], tree: str, living: Callable[[], list[Entry]] = living_claims
) -> tuple[Claims, set[str]]:
    """Return the living claims, and those of these GPUs that another state directory holds. No lock is taken.

    A door may outlive its entry for a moment, and a claim may come between two questions, so what seems to be held
    elsewhere is looked at twice.

    Args:
        gpus: that the driver shows.
        tree: what stands before UUIDs in the names of doors.
        living: lists the claims.

    Raises:
        StateDirError: they cannot be read.
    """
    shown = tuple(gpus)
    claims = Claims(living(), shown)
    elsewhere = _elsewhere(shown, claims, tree)
    if elsewhere:
        time.sleep(_SECOND_LOOK)
        claims = Claims(living(), shown)
        elsewhere = _elsewhere([gpu for gpu in shown if gpu.uuid in elsewhere], claims, tree)
    return claims, elsewhere


def _elsewhere(gpus: Iterable[Gpu], claims: Claims, tree: str) -> set[str]:
    """Return those of these GPUs that no living claim here has all of, and whose doors are held by others."""
    with suppress(OSError):  # no sockets here: entries alone count
        return {gpu.uuid for gpu in gpus if are_taken_elsewhere(Doors(tree), gpu, claims)}
    return set()


def are_taken_elsewhere(doors: Doors, gpu: Gpu, claims: Claims) -> bool:
    """Return whether no living claim has all of a GPU, and its doors are held by others. Where MIG is on, the instances
    tell."""
    if gpu.mig_enabled or any(one.gpus.get(gpu.uuid) is None for one in claims.on(gpu.uuid)):
        return False
    taken = any(
        doors.are_taken(name, claims.parts(gpu.uuid, name=name), divisible=gpu.is_divided_by(name))
        for name in gpu.names
    )
    return taken or (gpu.is_piece and doors.is_shut(gpu.whole, gpu.mode))


def gpus_of_scope(scope: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of this user's living claim with this value of SAFE_GPU_SCOPE, whichever driver
    knows them; none if there is no such claim, and if the claims cannot be read."""
    with suppress(StateDirError):  # the claim itself meets the same error
        around = Claims(living_claims()).around(scope) if scope else None
        return () if around is None else tuple(sorted(around.gpus))
    return ()


def claim_around(living: Collection[Entry], scope: str) -> Entry | None:
    """Return the claim of this process, else that of its nearest ancestor, else the one with this scope; None without
    any.

    Args:
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
    """
    for pid in (os.getpid(), *procfs.ancestors(os.getpid())):
        for entry in living:
            if entry.pid == pid and lives_here(entry):
                return entry
    return Claims(living).around(scope)
