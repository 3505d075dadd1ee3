"""A race for GPUs and for pieces of them, while an administrator divides the GPUs otherwise, with kill -9.

Two detectors know nothing of each other. By **marks** each process that has claimed something says what it has, and
looks at the marks of others: all of a GPU beside a piece of it is a violation, and so are pieces of two modes. By
**silicon** each process that computes takes a lock on the slices of the chip that it reaches by the names in its
environment, and counts there: a lock that is held is a violation, and so is a count that is lost. As with real drivers
a GPU is not divided while somebody computes there, and whoever has claimed all of a GPU that was divided since computes
on its first piece.

    tests/race/pieces_race.py --vendor mig --seconds 600
    cc -std=c11 -o /tmp/client tests/protocol/complete/for_tests.c
    tests/race/pieces_race.py --vendor amd --directories --client /tmp/client
"""

import argparse
import fcntl
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support import racing
from support.referee import DYING, Mark, Referee
from support.stage import HostDirectory

import safe_gpu
from safe_gpu.coordination.holders import living_claims
from safe_gpu.drivers.simulated import PRESETS, SimulatedDriver
from safe_gpu.errors import SafeGpuError
from safe_gpu.gpus.devices import Gpu

SLICES = 8  # of a chip
_ROOM_FOR_SHARES = 1 << 40  # of a GPU: there is always room for one more

_PROCESSORS = "2 1 24 24 10 10 21"
_THREE = "mig 3g.40gb/2 40320 2g.20gb 19968 1g.10gb 9856"
_TWO = "mig 1g.10gb 9856 3g.40gb 40320"


class Vendor(NamedTuple):
    """A host with two cards, and the modes in which these may be."""

    card: str
    modes: tuple[str, ...]


VENDORS = {
    "mig": Vendor("NVIDIA A100-SXM4-80GB; 81920; 07:0 0f:1", ("whole", _THREE, _TWO)),
    "amd": Vendor("AMD Instinct MI300X; 196480; 05:0 26:1", ("whole", "partitions 2", "partitions 8")),
    "intel": Vendor("Intel Data Center GPU Max 1550; 131072; 18:0 42:1", ("functions 2", "functions 4", "whole")),
}
for _name, _vendor in VENDORS.items():
    PRESETS[f"race-{_name}"] = [_PROCESSORS, _vendor.card]


class Held(NamedTuple):
    """What a claim holds of one card."""

    card: str
    uuid: str
    is_piece: bool
    mode: str
    share: int | None

    def mark(self, referee: Referee) -> Mark:
        """Mark that this process has it."""
        piece = ""
        if self.is_piece:
            piece = self.uuid
        return referee.begin(self.card, self.share, piece=piece, mode=self.mode)


class Silicon:
    """The chips: a lock and a count for each slice of each card.

    Args:
        place: a directory of its own.
    """

    def __init__(self, place: Path, referee: Referee, driver: SimulatedDriver) -> None:
        self._place = place
        self._referee = referee
        self._driver = driver

    def make(self) -> None:
        """Make the files of all slices."""
        self._place.mkdir()
        for card in self.cards:
            for number in range(SLICES):
                (self._place / f"{card}.{number}").touch()
                (self._place / f"{card}.{number}.count").write_text(f"{0:20}")
            (self._place / f"{card}.busy").touch()

    @property
    def cards(self) -> list[str]:
        """The names of the cards."""
        return [gpu.whole for gpu in self._driver.idle.gpus]

    def divide(self, card: str, mode: str) -> bool:
        """Divide a card, unless somebody computes there."""
        with open(self._place / f"{card}.busy", "rb") as busy:
            try:
                fcntl.flock(busy, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self._driver.divide(card, mode)
            return True

    def compute(self, held: Held) -> str:
        """Compute for a moment on what a process reaches that has claimed this. Returns what that is; "" is nothing."""
        with ExitStack() as stack:
            busy = stack.enter_context(open(self._place / f"{held.card}.busy", "rb"))
            fcntl.flock(busy, fcntl.LOCK_SH)  # from here on nobody divides it
            device = self._reached(held)
            if device is None:
                return ""
            slices = [f"{held.card}.{number}" for number in self._slices(device)]
            for name in slices:
                self._occupy(stack.enter_context(open(self._place / name, "r+b", 0)), held)
            if held.share is None:
                counts = {name: self._count(name) for name in slices}
                time.sleep(random.uniform(0, 0.005))
                for name, count in counts.items():
                    with open(self._place / f"{name}.count", "r+b", 0) as file:
                        file.write(f"{count + 1:20}".encode())  # at once, since it may be killed
                    self._referee.tell("counted", slice=name)
            return "piece" if device.is_piece else "whole"

    def _count(self, name: str) -> int:
        """How often somebody has computed on a slice."""
        return int((self._place / f"{name}.count").read_text())

    def lost(self) -> list[str]:
        """The slices in which counts are lost: of one that was killed there may be one more than it told."""
        told = Counter(one["slice"] for one in self._referee.events() if one["event"] == "counted")
        return [name for name, number in told.items() if self._count(name) < number]

    def _reached(self, held: Held) -> Gpu | None:
        """The device that the driver shows a process by what stands in its environment."""
        shown = [gpu for gpu in self._driver.snapshot().gpus if gpu.whole == held.card and not gpu.unusable]
        for gpu in shown:
            if gpu.uuid == held.uuid:
                return gpu
        if held.is_piece:
            return None
        return shown[0]  # by the index of the card

    def _slices(self, device: Gpu) -> range:
        """The slices of the chip that a device has."""
        if not device.is_piece:
            return range(SLICES)
        pieces = [gpu for gpu in self._driver.snapshot().gpus if gpu.is_piece and gpu.whole == device.whole]
        number = [gpu.uuid for gpu in pieces].index(device.uuid)
        if device.is_mig_instance:
            sizes = [int(re.findall(r"([0-9])[cg]\.", gpu.name)[0]) for gpu in pieces]
            begin = sum(sizes[:number])
            return range(begin, begin + sizes[number])
        size = SLICES // len(pieces)
        return range(number * size, (number + 1) * size)

    def _occupy(self, file: Any, held: Held) -> None:
        """Take a slice of a chip, or tell that a living process has it."""
        until = time.monotonic() + DYING
        kind = fcntl.LOCK_SH
        if held.share is None:
            kind = fcntl.LOCK_EX
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                os.truncate(file.fileno(), 0)
                os.pwrite(file.fileno(), f"{os.getpid()} {self._referee.start_time(os.getpid())}".encode(), 0)
                return
            pid, _, start = os.pread(file.fileno(), 100, 0).decode().partition(" ")
            if self._referee.lives(int(pid or 0), start) or time.monotonic() > until:
                self._referee.tell("violation", what="two compute on one slice", of=held, rival=pid, slice=file.name)
                return
            time.sleep(0.001)


class Race(racing.Race):
    """A race for GPUs and their pieces."""

    def __init__(self, host: HostDirectory, options: argparse.Namespace) -> None:
        super().__init__(host, _ROOM_FOR_SHARES, options)
        self.driver = SimulatedDriver(host.preset)
        self.silicon = Silicon(Path(host.path, "silicon"), self.referee, self.driver)
        self.silicon.make()

    def works(self) -> dict[str, Callable[[], None]]:
        return {**super().works(), "administrator": self.administrate}

    def compete(self, number: int) -> None:
        """Claim again and again, whole GPUs and pieces, whichever there are, and compute on them at times."""
        options = self.options
        if options.directories and number % 2:
            os.environ["SAFE_GPU_DIR"] = f"{self.host.path}/other"
        while True:
            share = None
            if options.shares:
                share = random.choice([None, None, 4 << 30])
            patience = random.choice([0, 0, 0.3, 2])
            if options.client and number % 4 >= 2:
                self.claim_in_c(share, patience)
            else:
                self.claim(share, patience)

    def claim(self, share: int | None, patience: float) -> None:
        """Claim one or two devices, or a certain one, and work there."""
        nb_gpus = random.choice([1, (1, 2)])
        only: tuple[str, ...] = ()
        if random.random() < 0.5:
            nb_gpus = 1
            only = (random.choice(self.driver.snapshot().gpus).uuid,)
        try:
            owner = safe_gpu.GPUOwner(
                nb_gpus,
                safe_gpu.NoPlaceholder(),
                affinity=None,
                timeout=patience,
                share=share,
                only=only,
                hold_for=random.choice([None, 1]),
            )
        except (safe_gpu.NotEnoughGpusError, safe_gpu.UnsatisfiableRequestError):
            self.tell("refused")
            return
        except SafeGpuError as err:
            self.tell("error", error=repr(err))
            return
        self.work([Held(gpu.whole, gpu.uuid, gpu.is_piece, gpu.mode, owner.share) for gpu in owner.gpus])
        owner.release_gpus()

    def claim_in_c(self, share: int | None, patience: float) -> None:
        """The same by the client in C, which is told to end, or killed."""
        words = ["-n", 1, "-g", ",".join(self.names), "-m", 80 << 30, "-s", share or 0, "-t", patience]
        process, said = racing.start_client(self.options.client, words, "echo held; read line")
        if not said:
            _, errors = process.communicate()
            if process.returncode == 75:
                self.tell("refused", error=errors)
            else:
                self.tell("violation", error=errors)
            return
        held = [_held_by(entry) for entry in living_claims() if entry.pid == process.pid]
        if not held:
            self.tell("violation", what="a claim has no living entry")
        self.work(held)
        racing.end_client(process)

    @property
    def names(self) -> list[str]:
        """All devices of all modes, as the client in C takes them."""
        found: dict[str, None] = {}
        for card in self.driver.preset.cards:
            for mode in VENDORS[self.options.vendor].modes:
                for gpu in card.devices(mode):
                    if not gpu.unusable:
                        found[_name_for_client(gpu)] = None
        return list(found)

    def work(self, held: list[Held]) -> None:
        """Hold something for a while, and compute on it now and then."""
        marks = [one.mark(self.referee) for one in held]
        for one in held:
            self.tell("claimed", what="piece" if one.is_piece else "whole", share=one.share, mode=one.mode)
        for _ in range(random.choice([0, 1, 2])):
            time.sleep(random.uniform(0, 0.02))  # an administrator divides the GPU meanwhile
            for one in held:
                reached = self.silicon.compute(one)
                self.tell("computed" if reached else "reached nothing", on=reached)
        if random.random() < 0.15:
            os.kill(os.getpid(), signal.SIGKILL)
        for mark in marks:
            mark.end()

    def administrate(self) -> None:
        """Divide the cards otherwise."""
        while True:
            card = random.choice(self.silicon.cards)
            mode = random.choice(VENDORS[self.options.vendor].modes)
            self.tell("divided" if self.silicon.divide(card, mode) else "in use", mode=mode)
            time.sleep(random.uniform(0, 0.03))

    def run(self) -> list[dict[str, Any]]:
        super().run()
        for name in self.silicon.lost():
            self.tell("violation", what="a count is lost", slice=name)
        return self.referee.events()


def _name_for_client(gpu: Gpu) -> str:
    """A device as the client in C takes it: of a piece also its card and mode, of others their second name."""
    if gpu.is_piece:
        name = f"{gpu.uuid}@{gpu.whole}"
        if gpu.mode:
            name += f"+{gpu.mode}"
        return name
    if gpu.uuid != gpu.whole:
        return f"{gpu.uuid}={gpu.whole}"
    return gpu.uuid


def _held_by(entry: Any) -> Held:
    """What the client in C has, which claims one device."""
    ((uuid, share),) = entry.gpus.items()
    for card, pieces in entry.pieces.items():
        return Held(card, uuid, uuid in pieces, entry.modes.get(card, ""), share)
    return Held(uuid, uuid, False, "", share)


def main() -> int:
    parser = racing.race_parser(__doc__)
    parser.add_argument("--vendor", choices=VENDORS, default="mig")
    parser.add_argument("--directories", action="store_true", help="two state directories")
    parser.add_argument("--host-lock", choices=("on", "off"), default="on")
    options = parser.parse_args()
    with racing.host_of_race(f"race-{options.vendor}", has_host_lock=options.host_lock == "on") as host:
        race = Race(host, options)
        told = race.run()
    return race.report(told)


if __name__ == "__main__":
    sys.exit(main())
