"""What a waiter on a terminal is told of claims whose GPUs show no work; loaded only if there is a policy file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import SafeGpuError

if TYPE_CHECKING:
    from ..claim.messages import WaitStatus


_MOST = 3  # of the claims that are new


class IdleClaims:
    """Tells of each such claim once.

    Args:
        path: the policy file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._told: set[tuple[int | None, float | None]] = set()

    def new(self, news: WaitStatus) -> list[str]:
        """A line for each claim that has become idle for long enough and may stand in the way. Takes host.lock."""
        from ..status.idle import sets_a_limit, whom_to_ask

        if not sets_a_limit(self._path):
            return []
        from ..status.gather import gather

        try:
            gpus = gather().gpus
        except (SafeGpuError, OSError):
            return []
        if news.verdicts:
            wanted = {verdict.gpu.uuid for verdict in news.verdicts if verdict.state == "claimed"}
            gpus = tuple(one for one in gpus if one.gpu.uuid in wanted)
        lines = {key: line for key, line in whom_to_ask(gpus, os.geteuid()).items() if key not in self._told}
        shown = list(lines)[:_MOST]
        self._told.update(shown)
        return [lines[key] for key in shown]
