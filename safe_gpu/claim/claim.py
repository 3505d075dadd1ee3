"""What a claim holds: its leases, the text of their records, and the lock of the older package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..coordination.locks import StateDirGuard
from ..coordination.signals import DeferredSignals
from ..devices import HostSnapshot

if TYPE_CHECKING:
    from ..coordination.leases import Lease, LeaseRecord
    from ..coordination.legacy import LegacyLock
    from ..coordination.locks import LockedHost
    from ..coordination.socket_names import SocketName
    from ..devices import Gpu


class Claim:
    """The leases of one claim. It is created empty and filled step by step, so that :meth:`release` works at any time.

    Args:
        record: the record of this process for the lease files, made before host.lock is taken.
        token: a secret that lets child processes claim inside this claim; "" for none. Records have its hash.

    Attributes:
        gpus: the claimed GPUs, as in ``before``.
        leases: the leases of these GPUs.
        names: the names of these GPUs, which exclude processes with another state directory.
        before: the last poll before the placeholders are allocated.
        kept: the lock that keeps cleaners of temporary files out of the state directory.
        inner: whether this claim is made inside another one. Such a claim cannot delegate.
        explained: UUID -> driver pids on that GPU that belong to the outer claim.
        legacy: the lock of the older package, while it is held.
    """

    def __init__(self, record: LeaseRecord, token: str = "") -> None:
        self.gpus: tuple[Gpu, ...] = ()
        self.leases: list[Lease] = []
        self.names: list[SocketName] = []
        self.kept = StateDirGuard(by_children=True)
        self.before = HostSnapshot(())
        self.inner = False
        self.explained: Mapping[str, Collection[int]] = {}
        self.legacy: LegacyLock | None = None
        self._record = record
        self._taken = record  # with GPUs and times, once they are known
        self._token = token

    @property
    def token(self) -> str:
        """What child processes need to claim inside this claim; "" if they cannot."""
        return "" if self.inner else self._token

    def take(
        self,
        host: LockedHost,
        gpus: tuple[Gpu, ...],
        leases: dict[str, Lease],
        names: dict[str, list[SocketName]],
        hold_for: float | None = None,
    ) -> None:
        """Move the leases and names of these GPUs from ``leases`` and ``names`` (by UUID) into this claim, and write
        their records. ``inner`` has been set before. ``hold_for``: seconds that the claim will probably last.

        Raises:
            StateDirError: a record cannot be written (no space). The claim holds the leases even then.
        """
        self.gpus = gpus
        for gpu in gpus:
            self.leases.append(leases[gpu.uuid])
            del leases[gpu.uuid]
            self.names.extend(names.get(gpu.uuid, ()))
            names.pop(gpu.uuid, None)
        self._taken = self._record.claiming(tuple(gpu.uuid for gpu in gpus), self.token, hold_for)
        line = self._taken.encode()
        for lease in self.leases:
            lease.write(line)
        self.kept.hold(host)

    def note(self) -> None:
        """Tell the history of this claim, and how those before it ended. It holds its GPUs; host.lock is not held."""
        from .note import append_history

        with DeferredSignals():
            append_history(self._taken, self.gpus, self.leases)

    def keep_across_exec(self) -> None:
        """Keep the leases and locks across exec(2) of this process."""
        with DeferredSignals():
            for lease in self.leases:
                lease.keep_across_exec()
            for name in self.names:
                name.keep_across_exec()
            self.kept.keep_across_exec()

    def release_legacy(self) -> None:
        """Release the lock of the older package, if it is held."""
        if self.legacy is not None:
            DeferredSignals().through(self.legacy.release)
            self.legacy = None

    def release(self) -> None:
        """Release everything, after which the claim is empty. Safe to call twice."""
        DeferredSignals().through(self._release_now)

    def _release_now(self) -> None:
        with ExitStack() as steps:  # every step runs, even if another one raises
            steps.callback(self.kept.release)
            steps.callback(self.leases.clear)
            for lease in self.leases:
                steps.callback(lease.release)
            steps.callback(self.names.clear)
            for name in self.names:
                steps.callback(name.release)  # before the leases: whose lease is free has no name any more
            steps.callback(self.release_legacy)
