"""What a claim holds, from its first lease to its release."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..coordination.locks.cleaner_guard import StateDirGuard
from ..coordination.scope_names import token_with_namespace
from ..coordination.signals import DeferredSignals
from ..gpus.devices import Gpu, HostSnapshot
from ..host import procfs
from ..selection.sharing import share_capacity
from .history_entry import append_history

if TYPE_CHECKING:
    from ..coordination.leases.lease import Lease
    from ..coordination.leases.record import LeaseRecord
    from ..coordination.locks.host_lock import LockedHost
    from ..coordination.locks.legacy_lock import LegacyLock
    from ..coordination.socket_names import SocketName


class Taken:
    """What one look has taken of a GPU, until a claim takes it over.

    Attributes:
        lease: that of the GPU, locked shared if there is a slot.
        slot: that of a slot, of a claim that shares the GPU; None for the whole GPU.
        names: of the GPU or of the slot.
    """

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.slot: Lease | None = None
        self.names: list[SocketName] = []

    def give_back_names(self) -> None:
        for name in self.names:
            name.release()
        self.names.clear()

    def give_back_slot(self) -> None:
        if self.slot is not None:
            self.slot.release()
            self.slot = None

    def give_back(self) -> None:
        self.give_back_names()
        self.give_back_slot()
        self.lease.release()


class Claim:
    """The leases of one claim. It is created empty and filled step by step, so that :meth:`release` works at any time.

    Args:
        record: the record of this process for the lease files, made before host.lock is taken.
        secret: of the token that lets child processes claim inside this claim; "" for none.

    Attributes:
        gpus: the claimed GPUs, as in ``before``.
        leases: the leases of these GPUs, or of the slots in which the claim shares them.
        beneath: the GPUs' leases, locked shared, of a claim that shares them.
        names: the names of these GPUs, which exclude processes with another state directory.
        before: the last poll before the placeholders are allocated.
        kept: the lock that keeps cleaners of temporary files out of the state directory.
        share: bytes of each GPU that it holds; None for whole GPUs, and inside another claim.
        inner: whether this claim is made inside another one. Such a claim cannot delegate.
        named: whether its names can be had, as far as it is known. Its token says so.
        queued: when it joined the queue, in Unix seconds; None if it did not wait.
        explained: UUID -> driver pids on that GPU that belong to the outer claim.
        legacy: the lock of the older package, while it is held.
    """

    def __init__(self, record: LeaseRecord, secret: str = "") -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self.leases: list[Lease] = []
        self.beneath: list[Lease] = []
        self.share: int | None = None
        self.names: list[SocketName] = []
        self.kept = StateDirGuard(by_children=True)
        self.before = HostSnapshot(())
        self.inner = False
        self.named = True
        self.queued: float | None = None
        self.explained: Mapping[str, Collection[int]] = {}
        self.legacy: LegacyLock | None = None
        self._record = record
        self._taken = record  # with GPUs and times, once they are known
        self._secret = secret
        self._namespace = procfs.network_namespace() if secret else None

    @property
    def delegates(self) -> bool:
        """Whether child processes may claim inside this claim."""
        return bool(self._secret) and not self.inner

    @property
    def token(self) -> str:
        """What child processes need to claim inside this claim, whose hash its records have; "" if they cannot."""
        return token_with_namespace(self._secret, self._namespace if self.named else 0) if self.delegates else ""

    def take(
        self,
        host: LockedHost,
        gpus: tuple[Gpu, ...],
        taken: dict[str, Taken],
        hold_for: float | None = None,
        *,
        share: int | None = None,
    ) -> None:
        """Move what was taken of these GPUs, by UUID, into this claim, and write the records. ``inner`` has
        been set before. ``hold_for``: seconds that the claim will probably last.

        Raises:
            StateDirError: a record cannot be written (no space). The claim holds the leases even then.
        """
        self.gpus = gpus
        for gpu in gpus:
            one = taken[gpu.uuid]
            self.leases.append(one.slot or one.lease)
            if one.slot is not None:
                self.beneath.append(one.lease)
            self.names.extend(one.names)
            del taken[gpu.uuid]
        self._taken = self._record.claiming(tuple(gpu.uuid for gpu in gpus), self.token, hold_for, self.queued)
        self.share = share
        if share is not None:
            self._taken = self._taken._replace(
                share=share, of=min(filter(None, map(share_capacity, gpus)), default=None)
            )
        line = self._taken.encode()
        for lease in self.leases:
            lease.write(line)
        self.kept.hold(host)

    def _held(self) -> tuple[list[Lease] | list[SocketName], ...]:
        """Return all that is held. What is released last comes first: whose lease is free has no name any more, so that
        nobody is refused for that moment."""
        return self.beneath, self.leases, self.names

    def note(self, waited: float) -> None:
        """Tell the history of this claim, and how those before it ended. It holds its GPUs; host.lock is not held.

        Args:
            waited: seconds from the call to the GPUs.
        """
        with DeferredSignals():
            append_history(self._taken, self.gpus, self.leases, waited)

    def keep_across_exec(self) -> None:
        """Keep the leases and locks across exec(2) of this process."""
        with DeferredSignals():
            for held in self._held():
                for one in held:
                    one.keep_across_exec()
            self.kept.keep_across_exec()

    def release_legacy(self) -> None:
        """Release the lock of the older package, if it is held."""
        if self.legacy is not None:
            DeferredSignals().run_deferred(self.legacy.release)
            self.legacy = None

    def release(self) -> None:
        """Release everything, after which the claim is empty. Safe to call twice."""
        DeferredSignals().run_deferred(self._release_now)

    def _release_now(self) -> None:
        with ExitStack() as steps:  # every step runs, even if another one raises
            steps.callback(self.kept.release)
            for held in self._held():
                steps.callback(held.clear)
                for one in held:
                    steps.callback(one.release)
            steps.callback(self.release_legacy)
