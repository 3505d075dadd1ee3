"""What races have in common: processes that claim against each other, are killed at any moment, and start anew."""

import argparse
import logging
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.broken import add_break_option, break_build
from support.kernel import adopt_orphans, end_descendants, ended_children, leave_network, send_signal
from support.referee import Referee
from support.stage import HostDirectory, import_everything, temporary_host

from safe_gpu.coordination import doors, host_lock

WORKER = "worker"
"""How the names of the processes begin that claim, and are killed."""


def race_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all races have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--networks", action="store_true", help="a network for each process: doors are not seen")
    parser.add_argument("--client", default="", help="path of the client in C, which every second process uses")
    parser.add_argument("--until-found", action="store_true", help="end with the first fault")
    add_break_option(parser)
    return parser


@contextmanager
def host_of_race(preset: str, *, has_host_lock: bool = True) -> Iterator[HostDirectory]:
    """A simulated host for a race, which this process has entered."""
    adopt_orphans()
    logging.getLogger("safe_gpu").addHandler(logging.NullHandler())
    with temporary_host("race", preset) as host:
        import_everything()  # not by each process
        if not has_host_lock:
            host_lock.lock_file = lambda fd, path: True
        os.environ["DOORS_OF_SIMULATED_HOST"] = doors.uuid_prefix(host.tree)  # for the example in C, which knows none
        yield host


def start_client(client: str, options: Sequence[object], command: str) -> tuple["subprocess.Popen[str]", str]:
    """Start the client in C, which runs a command of the shell once it has claimed.

    Args:
        client: its path.
        options: of the client.
        command: prints a line, and reads one.

    Returns: the process, and the line; "" if it got nothing.
    """
    words = [client, *options, "sh", "-c", command]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([str(word) for word in words], text=True, **streams)
    assert process.stdout is not None
    return process, process.stdout.readline()


def end_client(process: "subprocess.Popen[str]") -> None:
    """Kill a client that has claimed, or let its command end."""
    if random.random() < 0.2:
        process.kill()
    process.communicate("\n")


class Race:
    """Processes that do their work again and again. Each race says what they are, and may say more.

    Args:
        capacity: of each GPU, in the unit of shares.
        options: of :func:`race_parser`.

    Attributes:
        found: events that there must not be.
        tell: tells the referee of an event.
    """

    found: tuple[str, ...] = ("violation", "died")

    def __init__(self, host: HostDirectory, capacity: int, options: argparse.Namespace) -> None:
        self.host = host
        self.options = options
        self.referee = Referee(f"{host.path}/referee", capacity)
        self.tell = self.referee.tell
        self._running: dict[int, str] = {}

    def works(self) -> dict[str, Callable[[], None]]:
        """The processes of this race: name -> what it does, for ever."""
        return {f"{WORKER}{number}": partial(self.compete, number) for number in range(self.options.processes)}

    def compete(self, number: int) -> None:
        """In a worker: claim again and again."""
        raise NotImplementedError

    def prepare(self, name: str) -> None:
        """In a process that has just started."""
        if self.options.networks and name.startswith(WORKER):
            leave_network()

    def disturb(self) -> None:
        """Twenty times a second, in the process that started the others."""

    def clear_away(self, pid: int) -> None:
        """When a process has ended: do what the kernel does on a real host."""

    def run(self) -> list[dict[str, Any]]:
        """Race for a while. Returns what was told."""
        works = self.works()
        for name in works:
            self._start(name, works[name])
        end = time.monotonic() + self.options.seconds
        try:
            while time.monotonic() < end and not self._has_found_enough():
                time.sleep(0.05)
                if random.random() < 0.3:
                    self._kill_a_worker()
                self.disturb()
                for pid in ended_children():
                    self.clear_away(pid)
                    if pid in self._running:
                        name = self._running.pop(pid)
                        self._start(name, works[name])
        finally:
            end_descendants()  # what the workers have left behind too
        return self.referee.events()

    def _start(self, name: str, work: Callable[[], None]) -> None:
        """Start a process."""
        pid = os.fork()
        if pid:
            self._running[pid] = name
            return
        try:
            self.prepare(name)
            random.seed(os.urandom(8))
            break_build(self.options.broken)
            work()
        except BaseException as err:
            self.tell("died", who=name, error=repr(err))
        finally:
            os._exit(1)

    def _kill_a_worker(self) -> None:
        """Kill one of the processes that claim, whatever it is doing."""
        workers = [pid for pid, name in self._running.items() if name.startswith(WORKER)]
        send_signal(random.choice(workers), signal.SIGKILL)

    def _has_found_enough(self) -> bool:
        """Whether the race is to end with the first thing that is found, and something was."""
        return self.options.until_found and any(event["event"] in self.found for event in self.referee.events())

    def report(self, told: list[dict[str, Any]]) -> int:
        """Print how often what was told, and what must not be; the exit status of the race."""
        counts: Counter[str] = Counter()
        for event in told:
            about = event.get("what") or event.get("on") or ""
            counts[f"{event['event']} {about}".rstrip()] += 1
        print(dict(sorted(counts.items())))
        bad = [event for event in told if event["event"] in self.found]
        errors = [event for event in told if event["event"] in (*self.found, "error")]
        for event in errors[:10]:
            print(event)
        return int(bool(bad))
