"""From a request to leases: look, lock, lease or queue, look again.

Nothing slow is done under host.lock: the driver is polled before and after, and what was true meanwhile is checked
again once the leases are held.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from . import procfs
from .claims import Claim
from .coordination.files import StateDir, state_dir_path
from .coordination.host_lock import MINIMUM_PATIENCE, HostLock, LockedHost
from .coordination.leases import (
    Lease,
    LeaseRecord,
    inner_name,
    probe,
    read_record,
    try_lease,
)
from .coordination.legacy import take_legacy_lock
from .coordination.signals import tidy_on_signals
from .devices import Gpu, GpuRequest, Holder, HostSnapshot
from .errors import NotEnoughGpusError
from .scopes import family_may_hold, outer_claim, usable_inside
from .selection import can_be_met_by_releases, check_possible, choose
from .view import HostView

if TYPE_CHECKING:
    from .coordination.lookout import Lookout
    from .coordination.waiting import Ahead, Demand, Waiter
    from .drivers.base import Driver
    from .report import WaitNews
    from .visibility import Fence

__all__ = ["Acquisition"]

# How often the head of the queue looks at leases: often enough for a hand-over that no one notices; half as often once
# it has waited for a second, since then nobody is in a hurry.
_LEASE_PAUSE = 0.010
# It looks in full so often, whatever it sees: a state directory may be cleaned away under it.
_FULL_LOOK = 1.0
# Sleepers look anyway so often, and waiting is reported so often.
_MINUTE = 60.0
# Whoever passes a waiter because a stranger blocks it must have seen the stranger this recently.
_RECENT = 1.0


class _Look:
    """What one hold of host.lock found out: leases, or who or what is in the way."""

    def __init__(self) -> None:
        self.chosen: tuple[Gpu, ...] = ()
        self.leases: list[Lease] = []
        self.unleased: frozenset[str] = frozenset()
        self.ahead: Ahead | None = None
        self.passed = False
        self.outdated = False

    def give_back(self) -> None:
        """Hold nothing; safe to call twice."""
        for lease in self.leases:
            lease.release()
        if self.ahead is not None:
            self.ahead.close()


class Acquisition:
    """One attempt to get GPUs, from the first poll to leases that a second poll confirmed.

    Args:
        driver: polled outside every lock; snapshot: its latest poll.
        request: checked by ``selection.parse_request``.
        fence: the UUIDs to choose from, or None.
        timeout: seconds until ClaimTimeout; 0 does not wait, None waits for ever. They count from ``began``, a
            ``time.monotonic()`` value; None is now.
        scope: value of SAFE_GPU_SCOPE, or None.
        token: what the records shall carry so that claims inside are possible; "" for none.
        must_delegate: whether a claim that turns out to be inside another may not silently drop the token.
        own: driver pids that are this process.
        near: NUMA nodes of the CPUs that this process may use, where that narrows anything.
        job, command: for the records; command None is this process's own.
        logger: gets the steps at INFO.
        on_wait: called when waiting begins and once a minute.
    """

    def __init__(
        self,
        driver: Driver,
        snapshot: HostSnapshot,
        request: GpuRequest,
        *,
        fence: Fence | None = None,
        timeout: float | None = 0.0,
        began: float | None = None,
        scope: str | None = None,
        token: str = "",
        must_delegate: bool = False,
        own: Collection[int] = (),
        near: frozenset[int] | None = None,
        job: str | None = None,
        command: str | None = None,
        logger: Any,
        on_wait: Callable[[WaitNews], None] | None = None,
    ) -> None:
        now = time.monotonic() if began is None else began
        self._request = request
        self._fence = fence
        self._timeout = timeout
        self._deadline = None if timeout is None else now + timeout
        self._lock_deadline = None if timeout is None else now + max(timeout, MINIMUM_PATIENCE)
        self._scope = scope
        self._token = token
        self._must_delegate = must_delegate
        self._near = near
        self._job = job
        self._command = command
        self._log = logger
        self._on_wait = on_wait

        self._view = HostView(driver, snapshot, request, fence, own)
        self._waiter: Waiter | None = None
        self._lookout: Lookout | None = None
        self._polled_for: frozenset[str] | None = None
        self._next_news = 0.0
        self._watching = 0.0
        self._looks = 0
        self._tried_last = timeout == 0

    def claim(self, keep: Callable[[Claim], object]) -> Claim:
        """Leases on N GPUs, or none.

        Args:
            keep: called with them as soon as they are held, so that an interrupt finds an owner that can release them.

        Raises:
            UnsatisfiableRequestError: this host can never satisfy the request; nothing was waited for.
            NotEnoughGpusError, ClaimTimeout: busy now, or until the deadline.
            LockTimeout, StateDirError, NoDriverError: the host's lock, directory or driver cannot be had.
        """

        def confirm(look: _Look) -> Claim | None:
            claim = Claim(
                look.chosen,
                look.leases,
                self._view.snapshot,
                token="" if self._view.outer else self._token,
                inner=bool(self._view.outer),
                explained=self._view.explained,
            )
            keep(claim)
            try:
                return claim if self._confirm(claim) else None
            except BaseException:
                claim.release()
                raise

        claim: Claim = self._until(confirm, take=True)
        return claim

    def wait(self) -> tuple[Gpu, ...]:
        """The GPUs that the request could have now, without taking them; the same errors as :meth:`claim`."""

        def confirm(look: _Look) -> tuple[Gpu, ...] | None:
            self._view.poll()  # what the last poll showed may be as old as the wait
            free = {verdict.gpu.uuid for verdict in self._view.judge({}) if verdict.free}
            return look.chosen if free.issuperset(gpu.uuid for gpu in look.chosen) else None

        gpus: tuple[Gpu, ...] = self._until(confirm, take=False)
        return gpus

    def _until(self, finish: Callable[[_Look], Claim | tuple[Gpu, ...] | None], *, take: bool) -> Any:
        check_possible(self._view.snapshot, self._request, self._fence)
        self._log.info("acquiring lock")
        result: Claim | tuple[Gpu, ...] | None = None
        look = _Look()
        try:
            with tidy_on_signals():
                try:
                    while result is None:
                        look = _Look()  # ours before it holds anything: an interrupt may come at any line
                        self._look(look, take)
                        if look.chosen:
                            result = finish(look)
                        else:
                            self._refuse_or_wait(look)
                        if result is None:
                            look.give_back()
                finally:
                    self._leave()
            return result
        except BaseException:
            self._leave()  # again, where the interrupt came just there
            look.give_back()
            if isinstance(result, Claim):
                result.release()
            raise

    def _leave(self) -> None:
        if self._lookout is not None:
            self._lookout.close()  # where the interrupt came before it was closed
        if self._waiter is not None:
            self._waiter.leave()

    # One look, under host.lock

    def _look(self, look: _Look, take: bool) -> None:
        usable = self._view.usable
        if self._waiter is None and not self._scope and self._may_wait() and _somebody_waits():
            self._stand_in_line(usable).prepare()
        procfs.user_name(os.geteuid())  # for records and tickets: a directory service is not asked under host.lock
        with HostLock(self._lock_until()) as host:
            if self._scope:
                usable = self._inside(host, usable)
            if host.queue.names():
                self._stand_in_line(usable)
            self._try(look, host, usable, take)
            if not look.chosen and self._may_wait():
                self._stand_in_line(usable).join(host)
        if look.chosen or not self._looks:
            self._log.info("lock acquired")
            self._log.info("lock released")
        self._looks += 1

    def _lock_until(self) -> float | None:
        """A look at the end of a long wait has time for host.lock too, or a crowd would end in LockTimeout."""
        if self._lock_deadline is None:
            return None
        return max(self._lock_deadline, time.monotonic() + MINIMUM_PATIENCE)

    def _stand_in_line(self, usable: list[Gpu]) -> Waiter:
        """This claim's place in the queue; most claims find nobody there and need none."""
        if self._waiter is None:
            from .coordination.waiting import Demand, Waiter

            stems = (f"{gpu.uuid}.inner" if self._view.outer else gpu.uuid for gpu in usable)
            self._waiter = Waiter(Demand(self._request.nb_gpus, frozenset(stems), self._request.min_memory))
        return self._waiter

    def _inside(self, host: LockedHost, usable: list[Gpu]) -> list[Gpu]:
        """Inside another claim, those of the GPUs that are that claim's."""
        assert self._scope is not None
        self._view.outer = outer_claim(host, self._view.snapshot, self._scope)
        if self._view.outer:
            return usable_inside(self._view.outer, usable, self._request, delegate=self._must_delegate)
        self._log.warning(
            "SAFE_GPU_SCOPE=%s names no living claim here (it leaks through qsub -V, ssh and tmux): ignored",
            self._scope,
        )
        self._scope = None
        if self._waiter is not None:
            self._waiter.abandon(host)
            self._waiter = None
        return usable

    def _try(self, look: _Look, host: LockedHost, usable: list[Gpu], take: bool) -> None:
        held: dict[str, Lease] = {}
        tried = False

        def hold() -> dict[str, Lease]:
            nonlocal tried
            if not tried:
                tried = True
                shared = self._view.snapshot.shared_display
                for gpu in usable:
                    if (lease := try_lease(host, self._view.lease_name(gpu.uuid), shared=shared)) is None:
                        continue
                    held[gpu.uuid] = lease
                    if not self._view.outer and not shared and probe(host, inner_name(gpu.uuid)):
                        held.pop(gpu.uuid).release()  # an outer claim died and one inside it lives on
            return held

        kept: set[str] = set()
        try:
            if self._waiter is not None:
                look.ahead = self._waiter.ahead(host, lambda demand: self._may_pass(look, host, demand, hold()))
            if look.ahead is not None:
                return
            look.unleased = frozenset(hold())
            if len(held) < self._request.nb_gpus:
                return
            leased = {gpu.uuid: Holder() for gpu in usable if gpu.uuid not in held}
            verdicts = [verdict for verdict in self._view.judge(leased) if verdict.gpu.uuid in held]
            chosen = choose(verdicts, self._request.nb_gpus, near=self._near)
            if chosen is None:
                return
            look.outdated = look.passed and self._view.age > _RECENT
            if look.outdated:
                return
            if take:
                look.leases = [held[gpu.uuid] for gpu in chosen]
                self._record(chosen, look.leases)
                kept = {gpu.uuid for gpu in chosen}
            look.chosen = chosen
        finally:
            for uuid, lease in held.items():
                if uuid not in kept:
                    lease.release()

    def _record(self, chosen: tuple[Gpu, ...], leases: list[Lease]) -> None:
        uuids = tuple(gpu.uuid for gpu in chosen)
        token = "" if self._view.outer else self._token
        line = LeaseRecord.of_this_process(uuids, self._job, token, self._command).encode()
        for lease in leases:
            lease.write(line)

    def _may_pass(self, look: _Look, host: LockedHost, demand: Demand, free: Mapping[str, Lease]) -> bool:
        """Whether the release of leases alone could not satisfy that waiter: a stranger sits on what it needs."""
        wanted = {stem.removesuffix(".inner") for stem in demand.gpus}
        leased: dict[str, Holder] = {}
        leaving = set()
        for uuid in wanted:
            gpu = self._view.snapshot.by_uuid(uuid)
            if gpu is None:
                continue
            name = self._view.lease_name(uuid)
            if uuid not in free and probe(host, name):
                leased[uuid] = Holder()
            elif gpu.processes:
                record = read_record(host.leases, name)
                if record is not None and any(process.pid == record.pid for process in gpu.processes):
                    leaving.add(uuid)  # its last holder is still dying: no stranger
        verdicts = self._view.judge_for(GpuRequest(demand.nb_gpus, min_memory=demand.min_memory), leased)
        passes = not can_be_met_by_releases(wanted, demand.nb_gpus, verdicts, leaving)
        look.passed = look.passed or passes
        return passes

    # Outside every lock of ours

    def _confirm(self, claim: Claim) -> bool:
        """Whether the GPUs are still free of strangers now that the leases are held; else everything is given back."""
        claim.legacy = take_legacy_lock(self._deadline, self._log)
        self._view.poll()
        claim.before = self._view.snapshot
        verdicts = {verdict.gpu.uuid: verdict for verdict in self._view.judge({})}
        for gpu in claim.gpus:
            verdict = verdicts.get(gpu.uuid)
            if verdict is None or not verdict.free:
                reason = "it is gone" if verdict is None else verdict.reason
                self._log.info("GPU %s was taken meanwhile (%s): starting over", gpu.label, reason)
                claim.release()
                return False
        claim.gpus = tuple(verdicts[gpu.uuid].gpu for gpu in claim.gpus)
        return True

    def _may_wait(self) -> bool:
        return self._deadline is None or time.monotonic() < self._deadline

    def _refuse_or_wait(self, look: _Look) -> None:
        if look.outdated:
            self._view.poll()
            return
        if not self._may_wait():
            if self._tried_last:
                raise self._refusal()
            self._tried_last = True
            self._view.poll()
            return
        if time.monotonic() >= self._next_news:
            # Where nobody listens, once: whether a parent holds what this claim waits for.
            self._next_news = time.monotonic() + _MINUTE if self._on_wait is not None else math.inf
            self._tell(look)
        self._pause(look)

    def _pause(self, look: _Look) -> None:
        left = math.inf if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if look.ahead is not None:
            assert self._waiter is not None
            if not self._waiter.sleep_behind(look.ahead, min(left, self._minute())):
                self._view.poll()  # has a stranger come or gone?
            return
        changed = look.unleased != self._polled_for
        if len(look.unleased) >= self._request.nb_gpus and (changed or time.monotonic() >= self._view.next_poll):
            self._polled_for = look.unleased
            self._view.poll()
            return
        self._watch(look, left)

    def _minute(self) -> float:
        """Seconds until a sleeper looks anyway: to the next news, or at a pace of its own where nobody hears any, since
        hundreds that came together would else look together."""
        if self._on_wait is not None:
            return max(0.0, self._next_news - time.monotonic())
        return _MINUTE * (0.75 + os.getpid() % 500 / 1000)

    def _watch(self, look: _Look, left: float) -> None:
        """Sleep until a lease may have come free, the driver is to be asked again, or so many seconds have passed."""
        from .coordination.lookout import Lookout

        now = time.monotonic()
        self._watching = self._watching or now
        until = now + min(left, _FULL_LOOK)
        if len(look.unleased) >= self._request.nb_gpus:
            until = min(until, self._view.next_poll)
        within = self._view.outer or {gpu.uuid for gpu in self._view.usable}
        held = (gpu.uuid for gpu in self._view.usable if gpu.uuid in within and gpu.uuid not in look.unleased)
        self._lookout = Lookout(map(self._view.lease_name, held))
        with self._lookout as lookout:
            while now < until:
                pause = _LEASE_PAUSE if now - self._watching < 1.0 else 2 * _LEASE_PAUSE
                time.sleep(min(until - now, pause))
                if lookout.stirs():
                    return
                now = time.monotonic()

    def _position(self) -> int:
        return 1 if self._waiter is None else self._waiter.position()

    def _tell(self, look: _Look) -> None:
        if self._on_wait is None and not family_may_hold(self._view.usable, inner=bool(self._view.outer)):
            return  # where nobody listens, nobody asks who holds what: among hundreds of waiters that has its price
        if look.ahead is None:
            self._view.poll()
        from .explanation import judge_with_holders
        from .report import WaitNews

        verdicts = judge_with_holders(self._view, self._request)
        if self._on_wait is not None:
            free = sum(verdict.free for verdict in verdicts)
            self._on_wait(WaitNews(self._position(), free, self._request.nb_gpus, verdicts))

    def _refusal(self) -> NotEnoughGpusError:
        from .explanation import refusal

        return refusal(self._view, self._request, self._fence, position=self._position(), waited=self._timeout or 0.0)


def _somebody_waits() -> bool:
    with StateDir(state_dir_path()) as root, StateDir("queue", root) as queue:
        return bool(queue.names())
