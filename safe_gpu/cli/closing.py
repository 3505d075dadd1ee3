"""Which GPUs are closed to new claims: what the commands drain and resume read and write."""

import argparse
import os
import time
from collections.abc import Collection, Iterable, Sequence

from ..coordination.closed import all_windows, closed_file, drained_gpus, read_closed
from ..errors import GPUAffinityError, PolicyError
from ..gpus.windows import Window, drain_line
from ..host.foreign_files import MOST_BYTES
from ..host.programs import is_root
from ..settings.values import is_index, names_device
from ..status.facts import GpuStatus
from ..status.gather import gather
from ..wording.text import gpu_ranges, grouped
from .arguments import gpu_list
from .output import say, write_whole

_KEPT = 7 * 86400.0  # seconds for which a window that is over is kept: the clock may have jumped


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Let the command take GPUs."""
    names = "as nvidia-smi shows them: 3, 0,3 or 4-7; all if none is named"
    parser.add_argument("gpus", nargs="*", type=_gpus_of_word, metavar="GPU", help=names)


ALL = ("all", "*")
"""What people write for all GPUs, where no name means them."""


def _gpus_of_word(word: str) -> Sequence[str]:
    if word.lower() in ALL:
        raise ValueError(leave_out(word))
    try:
        return gpu_list(word)
    except ValueError:
        raise ValueError(f"{word!r} names no GPU: write indices or UUIDs, such as 0,2, 4-7 or GPU-8932f937") from None


def leave_out(word: str) -> str:
    """Return the usage error for a word for all GPUs."""
    return f"leave {word} out: all GPUs are meant if none is named"


def named_gpus(lists: Iterable[Sequence[str]]) -> list[GpuStatus]:
    """Return the GPUs that the user named; all GPUs of this host if there are no names.

    Args:
        lists: the names, as :func:`~safe_gpu.cli.arguments.gpu_list` parses them.

    Raises:
        GPUAffinityError: there is no such GPU, or an index may be that of another one.
    """
    names: list[str] = []
    for some in lists:
        names += some
    status = gather()
    if not names:
        return list(status.gpus)
    if status.doubt and any(is_index(name) for name in names):
        raise GPUAffinityError(status.doubt)
    unknown = []
    uuids: set[str] = set()
    for name in names:
        named = {one.gpu.uuid for one in status.gpus if names_device(name, one.gpu)}
        if not named:
            unknown.append(name)
        uuids |= named
    if unknown:
        raise GPUAffinityError(f"this host has no GPU {', '.join(unknown)}: see safe-gpu status")
    return [one for one in status.gpus if one.gpu.uuid in uuids]


class ClosedGpusFile:
    """The file of this user that closes GPUs: root's, or that of the owner of the state directory.

    Raises:
        PolicyError: this user is neither.
    """

    def __init__(self) -> None:
        self._by_root = is_root()
        if not self._by_root and not _owns_state_dir():
            raise PolicyError("only root and the owner of the state directory may drain GPUs: ask them")
        closed = read_closed(by_root=self._by_root)
        self._reasons = dict(closed.reasons)
        self._windows = list(closed.windows)

    def drain(self, uuids: Iterable[str], reason: str) -> None:
        """Close GPUs until they are resumed."""
        for uuid in uuids:
            self._reasons[uuid] = reason

    def reserve(self, window: Window) -> None:
        """Close GPUs for a time."""
        self._windows.append(window)

    def resume(self, uuids: Iterable[str]) -> None:
        """Forget why GPUs are drained. Windows stay."""
        for uuid in uuids:
            self._reasons.pop(uuid, None)

    def windows(self) -> list[Window]:
        """Return the windows of this file that are not over."""
        now = time.time()
        return [window for window in self._windows if now < window.end]

    def cancel(self, window: Window, uuids: Collection[str]) -> None:
        """Take GPUs out of a window of :meth:`windows`."""
        others = tuple(uuid for uuid in window.gpus if uuid not in uuids)
        self._windows.remove(window)
        self._windows.append(window._replace(gpus=others))

    def write(self) -> None:
        """Replace the file.

        Raises:
            GPUAffinityError: nobody would read so much.
        """
        path = closed_file(by_root=self._by_root)
        content = "".join(f"{line}\n" for line in self._lines()).encode()
        if len(content) > MOST_BYTES:
            too_large = f"{path} would be larger than {MOST_BYTES} bytes"
            raise GPUAffinityError(f"{too_large}: cancel reservations with safe-gpu resume")
        if content or os.path.lexists(path):
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            write_whole(path, content)

    def _lines(self) -> list[str]:
        """Return the lines of the file, without windows that close no GPU or have long been over."""
        lines = [drain_line(uuid, reason) for uuid, reason in self._reasons.items()]
        now = time.time()
        for window in self._windows:
            if window.gpus and now < window.end + _KEPT:
                lines += window.lines
        return lines


def _owns_state_dir() -> bool:
    state_dir = os.path.dirname(closed_file(by_root=False))
    return os.path.isdir(state_dir) and os.stat(state_dir).st_uid == os.geteuid()


def say_who_may_claim(gpus: Iterable[GpuStatus]) -> None:
    """Say which GPUs can be claimed now, and if not, why, and who still holds them."""
    reasons = drained_gpus()
    now = time.time()
    reserved = [window for window in all_windows() if window.begin <= now < window.end]
    alike = grouped((one.label, _who_may_claim(one, reasons.get(one.gpu.uuid), reserved)) for one in gpus)
    for text, labels in alike.items():
        say(f"GPU {gpu_ranges(labels)}: {text}")


def _who_may_claim(one: GpuStatus, reason: str | None, reserved: Iterable[Window]) -> str:
    """Return whether a GPU can be claimed now.

    Args:
        reason: why it is drained; None if it is not.
        reserved: the reservations of now.
    """
    if reason is None:
        if any(window.covers(one.gpu) for window in reserved):
            return "not drained"
        return "can be claimed"
    if one.claim is None:
        return reason
    users = ", ".join(dict.fromkeys(claim.name for claim in one.claims))
    until = "that claim ends"
    if len(one.claims) > 1:
        until = "these claims end"
    return f"{reason}; claimed by {users} until {until}"
