#!/usr/bin/env python3
"""A soak test: processes that claim GPUs of a simulated host in every way, and end in every way, for minutes or hours.

    tools/soak.py --minutes 10 --processes 32

A referee outside the claim code counts violations: GPUs booked twice, GPUs that nobody can claim at a quiet point,
waits past their deadline, waiters served out of turn or later than they were told because others were let through,
users over their limit or held up by it wrongly, shares beside a whole claim or together larger than the memory,
undocumented exceptions. The exit status is 1 if there was any. One line of figures is printed each minute; for each
violation, the last events on that GPU. --islands, --users, --policy, --cleaner and --order fair need root.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from soak_checks import PATIENCE, USERS, Checks
from soak_host import ISLANDS, Life, Policy, SoakHost, draw, live
from stress import EachMinute, parser_with_seed, violation_text
from support.kernel import adopt_orphans, bind_mount, end_descendants, ended_children, send_signal, unmount
from support.stage import import_everything, place_for_all, replace_file

from safe_gpu.drivers.simulated import PRESETS, find_preset

GRACE = 15.0  # how far past its deadline a claim may return on a busy machine with a driver that stalls, seconds
QUIET_EVERY = 20.0  # seconds


class Soak:
    """The controller: starts processes, hurts them, and reads what they tell.

    Attributes:
        islands: where processes may live.
        story: the last events that were told.
        violations: those that must not be.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = random.Random(options.seed)
        self.options = options
        self.islands = ISLANDS[:1]
        if options.islands:
            self.islands = ISLANDS
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.violations: list[dict[str, Any]] = []
        self.longest_wait = 0.0
        self.story: deque[dict[str, Any]] = deque(maxlen=4000)
        self._number = 0
        self._children: set[int] = set()
        self._players: dict[int, int] = {}  # pid on the host -> number
        self._hurt: set[int] = set()  # numbers of those that were stopped
        self._resume: list[tuple[float, int]] = []
        self._place = place_for_all("soak")
        self.host = self._make_host()
        self._shared: tuple[str, ...] = ()
        if options.shares:
            self._shared = tuple(self.host.gpus[:3])
        self._users: tuple[int, ...] = ()
        if options.users:
            self._users = USERS
        self._policy: Policy | None = None
        if options.users or options.policy or options.order == "fair":
            self._policy = Policy(self.host.path, options.order)
        self._checks = Checks(self, fair=options.order == "fair")
        self.host.enter()
        import_everything()  # so that forked processes import nothing
        adopt_orphans()
        self._events = open(self.host.referee.log, encoding="utf-8")  # noqa: SIM115
        self._partial = ""

    def _make_host(self) -> SoakHost:
        """Make the host, with the host's own /proc in it for processes in PID namespaces."""
        host = SoakHost(f"{self._place}/host", self.options.preset)
        if not self.options.islands:
            return host
        Path(host.path, "islands").touch()
        try:
            bind_mount("/proc", f"{host.path}/proc")
        except OSError as err:
            sys.exit(f"soak.py: --islands needs root, and mount(2): {err.strerror}")
        return SoakHost(host.path)

    # ---- Time passes ----

    def run(self, seconds: float) -> None:
        """Let processes live for this time, with a quiet point every 20 s and at the end."""
        self._be_quiet()
        started = time.monotonic()
        quiet = started + QUIET_EVERY / 3
        minutes = EachMinute()
        while time.monotonic() < started + seconds and not self._is_caught:
            self._step()
            if time.monotonic() >= quiet:
                self._be_quiet()
                quiet = time.monotonic() + QUIET_EVERY
            if minutes.has_passed():
                self.report(time.monotonic() - started)
        if not self._is_caught:
            self._be_quiet()
        self._end_all()

    @property
    def _is_caught(self) -> bool:
        """Whether the claim code was broken on purpose and that was found."""
        return self.options.broken != "" and self.violations != []

    def _step(self) -> None:
        """Let a moment pass."""
        while len(self._children) < self.options.processes:
            self.start(draw(self.rng, self.islands, self._users, self._shared))
        self._reap()
        self._listen()
        self._resume_stopped(time.monotonic())
        if self._players and self.rng.random() < 0.05:
            self._harm(self.rng.choice(list(self._players)))
        if self.rng.random() < 0.01:
            self._change_weather()
        if self.options.cleaner and self.rng.random() < 0.2:
            self._clean()
        time.sleep(0.005)

    def start(self, life: Life) -> int:
        """Start a process that lives this life; its number."""
        self._number += 1
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            live(self.host, self._number, life, self.options.broken)
        self._children.add(child)
        self.counts["processes"] += 1
        return self._number

    def _harm(self, pid: int) -> None:
        """Kill, interrupt or stop a process, whatever it is doing."""
        what = self.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP))
        if send_signal(pid, what):
            self.counts[what.name] += 1
            self._hurt.add(self._players[pid])
            if what == signal.SIGSTOP:
                self._resume.append((time.monotonic() + self.rng.uniform(0.05, 1.5), pid))

    def _resume_stopped(self, now: float) -> None:
        """Let those go on that were stopped until now."""
        for when, pid in list(self._resume):
            if now >= when:
                send_signal(pid, signal.SIGCONT)
                self._resume.remove((when, pid))

    def _change_weather(self) -> None:
        """Let the driver fail otherwise, or do well."""
        # Who asks for all of the shared GPUs is refused for ever while one of them is lost, and rightly.
        some = self.rng.sample([gpu for gpu in self.host.gpus if gpu not in self._shared], 2)
        kinds: list[dict[str, Any]] = [{}, {}, {}, {}]
        kinds += [{"lag": 0.05}, {"stall": 0.1}, {"stall": 2.0}, {"hides": some}, {"lost": some}, {"fails": True}]
        self._set_weather(self.rng.choice(kinds))

    def _set_weather(self, weather: dict[str, Any]) -> None:
        """Let the driver be so from now on, as :class:`soak_host.Weather` reads it."""
        replace_file(f"{self.host.path}/weather", json.dumps(weather))

    def _clean(self) -> None:
        """What a cleaner of /tmp does: remove a file, a directory, everything; or move it away."""
        self.counts["cleaned"] += 1
        state = self.host.state
        what = self.rng.random()
        with suppress(OSError, IndexError):
            if what < 0.05:
                os.rename(state, f"{self.host.path}/moved-{self.counts['cleaned']}")
            elif what < 0.15:
                shutil.rmtree(state, ignore_errors=True)
            else:
                files = [os.path.join(place, name) for place, _, names in os.walk(state) for name in names]
                os.unlink(self.rng.choice(files))

    # ---- What the processes tell ----

    def _listen(self) -> None:
        """Read what was told since."""
        self._partial += self._events.read()
        *lines, self._partial = self._partial.split("\n")
        for line in lines:
            event = json.loads(line)
            self.story.append(event)
            self.counts[event["event"]] += 1
            self._heed(event)

    def _heed(self, event: dict[str, Any]) -> None:
        """Conclude what there is to conclude from an event."""
        if event["event"] == "begins":
            self._players[event["pid"]] = event["number"]
        elif event["event"] == "refused":
            self.errors[event["error"]] += 1
            if event["error"] in ("StateDirError", "LockTimeout") and not self.options.cleaner:
                self.violation(event | {"what": "an error without a cause"})
        elif event["event"] == "waited":
            self.longest_wait = max(self.longest_wait, event["seconds"])
            if event["seconds"] > event["timeout"] + GRACE and event["number"] not in self._hurt:
                self.violation(event | {"what": "a wait past its deadline"})
        elif event["event"] == "violation":
            self.violation(event)

    def violation(self, event: dict[str, Any]) -> None:
        """Print it with what went before."""
        self.violations.append(event)
        what = event.pop("what")
        gpu = event.get("uuid", "-")
        number = event.get("number")
        about = [past for past in self.story if gpu in past.get("uuids", ()) or past.get("number") == number]
        print(violation_text(f"{what}: {event}", *about[-12:]))

    def number_of(self, pid: int) -> int | None:
        """The number of a process that has told that it begins."""
        return self._players.get(pid)

    def _reap(self) -> None:
        """See who has ended."""
        self._children.difference_update(ended_children())
        for pid in list(self._players):
            if not self.host.referee.start_time(pid):
                del self._players[pid]

    # ---- Quiet points ----

    def _be_quiet(self) -> None:
        """Let all end, and see what must be true then."""
        if self.story:
            self._let_all_end()
        self.counts["quiet points"] += 1
        cleaner = Path(self.host.path, "cleaner")  # the referee counts what users hold only while none is at work
        cleaner.unlink(missing_ok=True)
        if self._policy is not None:
            self._policy.set({})
        for check in self._checks_of_all():
            if not self._is_caught:
                check()
        if self.options.cleaner:
            cleaner.touch()
        self._end_all()
        if self._policy is not None:
            self.counts["policies"] += 1
            self._policy.change(self.rng, self._users or (os.getuid(),))

    def _checks_of_all(self) -> list[Callable[[], None]]:
        """The checks at a quiet point, in their order."""
        checks: list[Callable[[], None]] = []
        if self._shared:
            checks.append(partial(self._checks.share_out, self._shared))
        for island in self.islands:
            checks.append(partial(self._checks.claim_all, island))
        checks += [self._checks.take_turns, self._checks.stay_behind, self._checks.keep_promises]
        if self._policy is not None:
            checks.append(partial(self._checks.keep_limits, self._policy))
        return checks

    def _let_all_end(self) -> None:
        """Wait in good weather until all have ended; those that take long are killed."""
        self._set_weather({})
        deadline = time.monotonic() + PATIENCE
        while (self._children or self._players) and time.monotonic() < deadline:
            self._resume_stopped(math.inf)
            self._reap()
            self._listen()
            time.sleep(0.01)
        self._end_all()

    def told(self, number: int, *events: str) -> set[str]:
        """Wait until a process tells one of these events or has been silent for long; all that it told."""
        awaited = events or ("holds", "refused", "violation")
        deadline = time.monotonic() + PATIENCE
        while True:
            self._listen()
            told = {event["event"] for event in self.story if event.get("number") == number}
            if told.intersection(awaited) or time.monotonic() > deadline:
                return told
            self._reap()
            time.sleep(0.002)

    def kill(self, number: int) -> None:
        """Kill a process that has told that it begins."""
        for pid, known in self._players.items():
            if known == number:
                send_signal(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Kill all, with what outlives its parent by design: a forked child, or a claim inside a claim."""
        end_descendants()
        self._children.clear()
        self._players.clear()
        self._listen()

    def report(self, seconds: float) -> None:
        """Print one line of figures."""
        words = ("processes", "holds", "refused", "SIGKILL", "SIGSTOP", "policies", "cleaned", "quiet points")
        figures = ", ".join(f"{self.counts[word]} {word}" for word in words if self.counts[word])
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.most_common(4))
        print(
            f"{seconds / 60:5.1f} min: {figures}; {errors}; longest wait {self.longest_wait:.1f} s; "
            f"{len(self.violations)} violations",
            flush=True,
        )

    def close(self) -> None:
        """Remove the host."""
        self._events.close()
        if self.host.has_islands:
            unmount(f"{self.host.path}/proc")
        shutil.rmtree(self._place, ignore_errors=True)


_NEEDING_ROOT = {
    "islands": "some in another state directory, a private one, a PID namespace",
    "users": "as three users",
    "policy": "with limits that change; part of --users",
    "cleaner": "the state directory is cleaned and moved",
}


def options_of_soak() -> argparse.Namespace:
    """The options of the command line."""
    parser = parser_with_seed(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=24, help="how many live at a time")
    parser.add_argument("--shares", action="store_true", help="most claims are on three GPUs, and share them")
    for name, text in _NEEDING_ROOT.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--order", choices=("fifo", "fair"), default="fifo", help="in which users are served")
    name_of = partial(re.sub, "^simulated:", "")
    parser.add_argument("--preset", type=name_of, choices=large_hosts(), default="dgx-a100", help="the simulated host")
    options = parser.parse_args()
    needs_root = options.order == "fair" or any(getattr(options, name) for name in _NEEDING_ROOT)
    if needs_root and os.geteuid() != 0:
        parser.error(f"--{', --'.join(_NEEDING_ROOT)} and --order fair need root")
    return options


def large_hosts() -> list[str]:
    """The simulated hosts with eight GPUs or more."""
    names = []
    for name in PRESETS:
        usable = [gpu for gpu in find_preset(name).of(None).gpus if not gpu.unusable]
        if len(usable) >= 8:
            names.append(name)
    return names


def main() -> int:
    options = options_of_soak()
    print(f"seed {options.seed}", flush=True)
    soak = Soak(options)
    started = time.monotonic()
    try:
        soak.run(options.minutes * 60)
    finally:
        soak.report(time.monotonic() - started)
        soak.close()
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
