"""What the file of a lease said of the claim before."""

import os
import time
from typing import NamedTuple

from ...host.foreign_files import LIMIT
from .claim_end import ClaimEnd, end_of_dead_claim
from .record import LeaseRecord


class PreviousRecord(NamedTuple):
    """What the file of a lease said at ``read``: its content, and when it had last been changed, in Unix seconds."""

    data: bytes = b""
    changed: float = 0.0
    read: float = 0.0

    @classmethod
    def of(cls, fd: int) -> "PreviousRecord":
        """Return what an open file says; nothing if it cannot be read."""
        try:
            status = os.fstat(fd)
            return cls(os.pread(fd, LIMIT, 0), status.st_mtime, time.time()) if status.st_size else cls()
        except OSError:
            return cls()

    def record(self) -> LeaseRecord | None:
        """Return the record of a claim that left it there when it died."""
        return LeaseRecord.decode(self.data) if self.data else None

    def ending(self) -> bytes:
        """Return how the claim that it speaks of ended, as a line for the file; b"" if it speaks of none."""
        if ClaimEnd.decode(self.data):
            return self.data
        record, read = self.record(), self.read
        if record is not None and record.start is not None and record.here:
            # It has lived no longer than since its process started, by the boot clock: the other may have jumped.
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - record.start / os.sysconf("SC_CLK_TCK")
            if self.changed <= record.since + age:  # else it is from before a reboot
                read = min(read, record.since + age)
        ending = record and end_of_dead_claim(record.pid, record.since, round(self.changed, 3), round(read, 3))
        return ending.encode() if ending else b""
