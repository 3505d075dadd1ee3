"""The GPUs that root has closed: drained ones, and those that are reserved for other users."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from ..coordination.closed import all_windows, drained_gpus, has_closed_file, look_up_admitted_users, windows_against
from ..coordination.host_lock import Host
from ..gpus.devices import Gpu
from ..gpus.windows import Spans, Window, spans_of, why_reserved
from ..selection.verdicts import Rules


class ClosedGpus:
    """The GPUs that are closed, by the latest reading, and the rules by which GPUs are judged then.

    Args:
        rules: without what is closed.

    Attributes:
        rules: with what is drained, or reserved for others than this user.
        rules_for_others: with what is drained.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.rules_for_others = rules
        self._drained: Mapping[str, str] = {}
        self._windows: Sequence[Window] = ()

    def prepare(self, host: Host, hold_for: float | None) -> None:
        """Read what is closed, and look up for whom among those who wait GPUs are reserved.

        A directory service may be asked, so host.lock must not be held.

        Args:
            hold_for: for how long this claim will hold its GPUs, in seconds; None is unknown.
        """
        self._read_files(host)
        if self._windows:
            uids = {ticket.uid for ticket in host.queue.look(())}
            uids.add(os.geteuid())
            look_up_admitted_users(self._windows, uids)
        self._set_rules(hold_for)

    def read(self, host: Host, hold_for: float | None) -> None:
        """Read what is closed, as :meth:`prepare` does, but look up nobody: host.lock may be held."""
        self._read_files(host)
        self._set_rules(hold_for)

    def spans_against(self, uid: int, gpus: Sequence[Gpu]) -> Mapping[str, Spans]:
        """Return when GPUs are reserved for others than a user: UUID -> spans."""
        if not self._windows:
            return {}
        return spans_of(windows_against(self._windows, uid), gpus)

    def _read_files(self, host: Host) -> None:
        self._drained = {}
        self._windows = ()
        if host.directory is not None and has_closed_file(host.directory):
            self._drained = drained_gpus()
            self._windows = all_windows()

    def _set_rules(self, hold_for: float | None) -> None:
        reserved: Mapping[str, str] = {}
        if self._windows:
            reserved = why_reserved(windows_against(self._windows, os.geteuid()), time.time(), hold_for)
        self.rules = self.rules._replace(closed={**reserved, **self._drained})
        self.rules_for_others = self.rules._replace(closed=self._drained)
