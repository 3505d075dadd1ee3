"""Who holds what, by the living claims of one listing, and who of them are in each other's way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import islice

from ..errors import StateDirError
from ..gpus.devices import Gpu, HeldAs, Holder
from ..host import procfs
from ..host.foreign_files import read_start
from ..host.programs import command_of
from .directory import state_dir_path
from .doors import MOST_PARTS, PIECE_PARTS, Doors, digest
from .entries import living_entries
from .entry import Entry, entry_names
from .held_as import held_as
from .silicon import Silicon, share_of, silicon_of

_SECOND_LOOK = 0.005  # seconds

_MOST_DESCRIPTORS = 20_000  # of one user, among which an entry is looked for


class Claims:
    """The living claims of one listing.

    A claim is inside another one if a living claim of the same owner, which is inside none, has its ``inside`` as
    ``token``. One that was inside a claim that has ended is inside none. Who is in whose way by a GPU and its pieces is
    the rule of :mod:`~safe_gpu.coordination.silicon`.

    Args:
        gpus: the devices that the driver shows; of others only claims that name them are known.

    Example::

        holders = Claims(living_claims(), snapshot.gpus).holders()
    """

    def __init__(self, living: Iterable[Entry], gpus: Iterable[Gpu] = ()) -> None:
        self.living = tuple(entry for entry in living if not entry.nb_gpus)
        self._shown = {gpu.uuid: gpu for gpu in gpus}
        self._may_enclose: dict[tuple[str, int], Entry] = {}  # hash of the token and owner -> claim
        for one in self.living:
            if one.token and not one.inside and one.uid >= 0:
                self._may_enclose[one.token, one.uid] = one
        self._in_the_way: dict[str, list[Entry]] = {}  # of a device
        self._silicon: dict[str, Silicon] = {}  # name of an entry -> what it has: a neighbour can make it large

    def enclosing(self, token: str) -> Entry | None:
        """Return the living claim of this user with this token, the value of SAFE_GPU_SCOPE. Its doors are not
        asked."""
        if not token:
            return None
        return self._may_enclose.get((digest(token), os.geteuid()))

    def is_inside(self, entry: Entry) -> bool:
        """Return whether it is inside a living claim."""
        return bool(entry.inside) and (entry.inside, entry.uid) in self._may_enclose

    def in_the_way(self, uuid: str, inside: str = "") -> list[Entry]:
        """Return the claims that take room of a device from another claim: those on it, and those on the GPU of which
        it is a piece, or on pieces of it.

        Args:
            inside: hash of the token of the enclosing claim of that one; "" of a claim inside none.
        """
        enclosing = self._may_enclose.get((inside, os.geteuid()))
        found = []
        for one in self.on(uuid):
            is_inside_another = one.inside != inside and self.is_inside(one)
            if one is not enclosing and not is_inside_another:
                found.append(one)
        return found

    def on(self, uuid: str) -> list[Entry]:
        """Return all claims that have a device, its GPU or pieces that are in its way, also those inside others."""
        if uuid not in self._in_the_way:
            self._in_the_way[uuid] = self._find_in_the_way(uuid)
        return self._in_the_way[uuid]

    def _find_in_the_way(self, uuid: str) -> list[Entry]:
        gpu = self._shown.get(uuid)
        if gpu is None:
            return [one for one in self.living if uuid in one.gpus]
        # A neighbour may have a thousand claims that name every GPU: only of those beside it the rule is asked.
        return [one for one in self.living if uuid in one.gpus or self._is_beside(one, gpu)]

    def _is_beside(self, one: Entry, gpu: Gpu) -> bool:
        """Return whether a claim that does not name a device is in its way."""
        if not (_mentions(one, gpu.uuid) or _mentions(one, gpu.whole)):
            return False
        if gpu.mig_enabled and self._is_on_shown_instances(one, gpu):
            return False  # the GPU cannot be claimed itself, and its instances show who holds them
        if one.name not in self._silicon:
            self._silicon[one.name] = silicon_of(one)
        return Silicon.of_device(gpu).meets(self._silicon[one.name])

    def _is_on_shown_instances(self, one: Entry, gpu: Gpu) -> bool:
        instances = one.pieces.get(gpu.uuid, ())
        return len(instances) > 0 and all(name in self._shown for name in instances)

    def held_as(self, one: Entry, uuid: str) -> HeldAs | None:
        """Return as what a claim holds a device that the driver shows; see :func:`.held_as.held_as`."""
        return held_as(one, self._shown[uuid], self._shown)

    def parts(self, uuid: str, inside: str = "", door: str = "") -> set[int]:
        """Return the parts of a GPU that the claims in its way have. A part that is held and is none of these belongs
        to a claim without an entry here.

        Other claims do not count: two claims of a neighbour, one inside the other, take no room, and could say that
        they have what another state directory holds. Parts of pieces never count.

        Args:
            door: by which of its names; "" is the UUID.
        """
        return _parts(self.in_the_way(uuid, inside), door or uuid)

    def parts_with_doors(self, uuid: str, inside: str = "", door: str = "") -> set[int]:
        """Return the same without the parts of claims whose process has ended: its children keep the entry and not the
        doors, so such a door that is held may be of another state directory."""
        return _parts([one for one in self.in_the_way(uuid, inside) if not has_ended(one)], door or uuid)

    def holders(self, inside: str = "") -> dict[str, Holder]:
        """Return UUID -> who holds it, for people, of the devices that the driver shows, as seen by a claim inside
        none, or inside the one with this hash of a token; as of :func:`holder_of`, and whether they are stopped."""
        return self._holders(inside, _holder_and_whether_stopped)

    def holders_as_written(self, inside: str = "") -> dict[str, Holder]:
        """Return the same as of :func:`holder_as_written`, so it may be called under host.lock."""
        return self._holders(inside, holder_as_written)

    def _holders(self, inside: str, describe: Callable[[Entry], Holder]) -> dict[str, Holder]:
        found = {}
        for uuid, gpu in self._shown.items():
            claims = self.in_the_way(uuid, inside)
            whole = [one for one in claims if share_of(one, gpu) is None]
            if whole:
                each = [describe(one)._replace(held_as=self.held_as(one, uuid)) for one in whole[:MOST_PARTS]]
                found[uuid] = each[0]._replace(others=tuple(each[1:]))
            elif claims:
                found[uuid] = Holder.of_sharers(describe(one)._replace(share=one.gpus[uuid]) for one in claims)
        return found


def _mentions(entry: Entry, name: str) -> bool:
    return name in entry.gpus or name in entry.pieces


def _parts(claims: Iterable[Entry], door: str) -> set[int]:
    return {one.parts[door] for one in claims if one.parts.get(door, MOST_PARTS) < MOST_PARTS}


def living_claims() -> list[Entry]:
    """Return the living claims in the state directory of this process."""
    return living_entries(state_dir_path(), "claims")


def holder_as_written(entry: Entry) -> Holder:
    """Return what an entry says of its process. Neither /proc nor a directory service is asked whether that is so:
    it may be called under host.lock."""
    holder = Holder(
        entry.pid,
        None,
        entry.job or None,
        entry.command or None,
        entry.since,
        entry.start,
        namespace=procfs.namespace_text(entry.pidns or None),
        until=entry.until,
        uid=entry.uid,
        queued=entry.queued,
    )
    if holder.namespace:
        return holder._replace(pid=None, start=None)  # these numbers mean nothing here
    return holder


def keepers_of(entries: Collection[Entry]) -> dict[str, list[int]]:
    """Return name of an entry -> the processes that have its file open and locked, as far as this user may see: the one
    that made it, and those that this has forked.

    A file may have several names, and any file may have that of an entry, so device and inode are compared. Only
    processes of the owners are looked at, and some thousand descriptors of each owner.
    """
    names = {entry.file: entry.name for entry in entries}
    left = dict.fromkeys((entry.uid for entry in entries), _MOST_DESCRIPTORS)
    found: dict[str, list[int]] = {}
    for pid in procfs.pids():
        uid = procfs.uid_of(pid)
        if uid not in left or os.geteuid() not in (0, uid):
            continue
        for number in islice(procfs.descriptors(pid), left[uid]):
            left[uid] -= 1
            file = _locked_entry(pid, number)
            if file in names:
                keepers = found.setdefault(names[file], [])
                if pid not in keepers[-1:]:
                    keepers.append(pid)
    return found


def _locked_entry(pid: int, number: str) -> tuple[int, int] | None:
    """Return device and inode of an entry that a process has open and locked by this descriptor; None if it is none."""
    path = f"/proc/{pid}/fd/{number}"
    with suppress(OSError):
        name = os.path.basename(os.readlink(path).removesuffix(" (deleted)"))
        if entry_names([name]):  # of others, such as sockets and files of FUSE, the status is not asked for
            status = os.stat(path)
            if b"lock:" in (read_start(f"/proc/{pid}/fdinfo/{number}") or b""):
                return status.st_dev, status.st_ino
    return None


def surviving_process_of(entry: Entry) -> int | None:
    """Return the process that has an entry, such as a child that kept it after its parent ended; None where this user
    may not see it."""
    if os.geteuid() not in (0, entry.uid):
        return None
    keepers = keepers_of([entry]).get(entry.name)
    if keepers is None:
        return None
    return keepers[0]


def holder_of(entry: Entry, surviving: Callable[[Entry], int | None] = surviving_process_of) -> Holder:
    """Return who holds an entry, for people: its process if that lives here, else one that it left behind.

    The user is the owner of the file. A directory service may be asked.

    Args:
        surviving: as :func:`surviving_process_of`.
    """
    holder = holder_as_written(entry)
    if entry.uid >= 0:
        holder = holder._replace(user=procfs.user_name(entry.uid))
    if holder.namespace:
        return holder._replace(pid=entry.pid)  # its own number there
    is_hidden = entry.pid and not procfs.exists(entry.pid) and not procfs.has_ended(entry.pid)
    if is_hidden or lives_here(entry):
        return holder._replace(command=command_of(entry.pid, holder.command))
    return holder._replace(pid=surviving(entry), start=None, left_by=entry.pid)


def _holder_and_whether_stopped(entry: Entry) -> Holder:
    """Return who holds an entry, for people, and whether that process is stopped."""
    holder = holder_of(entry)
    if holder.pid is None or holder.namespace:
        return holder
    return holder._replace(stopped=procfs.is_stopped(holder.pid))


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
    gpus: Iterable[Gpu], prefix: str, living: Callable[[], list[Entry]] = living_claims
) -> tuple[Claims, dict[str, Holder]]:
    """Return the living claims, and UUID -> why it cannot be claimed, of those of these GPUs that no living claim here
    has all of: another state directory holds it, or too many claims hold pieces of its GPU. No lock is taken.

    A door may outlive its entry for a moment, and a claim may come between two questions, so what seems to be held is
    looked at twice.

    Args:
        gpus: that the driver shows.
        prefix: what stands before UUIDs in the names of doors.
        living: lists the claims.

    Raises:
        StateDirError: they cannot be read.
    """
    shown = tuple(gpus)
    claims = Claims(living(), shown)
    beyond = _held_beyond(shown, claims, prefix)
    if beyond:
        time.sleep(_SECOND_LOOK)
        claims = Claims(living(), shown)
        beyond = _held_beyond([gpu for gpu in shown if gpu.uuid in beyond], claims, prefix)
    return claims, beyond


def _held_beyond(gpus: Iterable[Gpu], claims: Claims, prefix: str) -> dict[str, Holder]:
    found = {}
    with suppress(OSError):  # no sockets here: entries alone count
        doors = Doors(prefix)
        for gpu in gpus:
            if are_taken_elsewhere(doors, gpu, claims):
                found[gpu.uuid] = Holder(elsewhere=True)
            elif is_full(doors, gpu, claims):
                found[gpu.uuid] = holder_of_full(gpu)
        return found
    return {}


def are_taken_elsewhere(doors: Doors, gpu: Gpu, claims: Claims) -> bool:
    """Return whether no living claim here has all of a GPU, and its doors are held by others. Of a GPU with MIG on the
    instances tell."""
    if gpu.mig_enabled or _is_held_here(gpu, claims):
        return False
    if any(doors.are_taken(name, claims.parts(gpu.uuid, door=name)) for name in gpu.names):
        return True
    return gpu.is_piece and doors.is_held_against_pieces(gpu.whole, gpu.mode)


def is_full(doors: Doors, gpu: Gpu, claims: Claims) -> bool:
    """Return whether a device is a piece that no living claim here has all of, while as many claims hold pieces of its
    GPU as can."""
    return gpu.is_piece and not _is_held_here(gpu, claims) and doors.has_no_part_for_pieces(gpu.whole)


def _is_held_here(gpu: Gpu, claims: Claims) -> bool:
    return any(share_of(one, gpu) is None for one in claims.in_the_way(gpu.uuid))


def holder_of_full(gpu: Gpu) -> Holder:
    """Return what stands for a holder of a piece of a GPU of which as many claims hold pieces as can."""
    whole = gpu.whole
    if gpu.is_mig_instance:
        whole = str(gpu.index)
    return Holder(full=f"{len(PIECE_PARTS)} claims hold pieces of GPU {whole}, which is the most")


def gpus_of_scope(scope: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of this user's living claim with this value of SAFE_GPU_SCOPE, whichever driver
    knows them; none if there is no such claim, and if the claims cannot be read."""
    if not scope:
        return ()
    with suppress(StateDirError):  # the claim itself meets the same error
        enclosing = Claims(living_claims()).enclosing(scope)
        if enclosing is not None:
            return tuple(sorted(enclosing.gpus))
    return ()


def enclosing_claim(living: Collection[Entry], scope: str) -> Entry | None:
    """Return the claim of this process, else that of its nearest ancestor, else the one with this scope; None without
    any.

    Args:
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
    """
    for pid in (os.getpid(), *procfs.ancestors(os.getpid())):
        for entry in living:
            if entry.pid == pid and lives_here(entry):
                return entry
    return Claims(living).enclosing(scope)
