"""What a neighbour's names and entries do to claims of others: many, strange, linked, dead or alive. They cost little
under host.lock, hide no claim, and are claims of nobody else."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

from safe_gpu.coordination import entry as entry_module
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import Entries, make_entry
from safe_gpu.coordination.host_lock import Host
from safe_gpu.host.held import Held

NEIGHBOUR, VICTIM = 4711, 4712
MANY = 60_000
LONGEST = 0.06  # seconds of processor time under host.lock

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def used(state_dir: Path, ground: Any) -> Path:
    claim().release_gpus()
    return state_dir


def fill(directory: Path, contents: list[bytes], number: int, uid: int = NEIGHBOUR) -> None:
    """Make that many dead entries of a neighbour. Most are names of a few files, which takes less time."""
    first: list[str] = []
    fd = os.open(directory, os.O_RDONLY)
    for place in range(1, number + 1):
        name = f"{place}.{place:016x}"
        if len(first) < len(contents):
            (directory / name).write_bytes(contents[place - 1])
            os.chown(directory / name, uid, uid)
            (directory / name).chmod(0o644)
            first.append(name)
        else:
            os.link(first[place % len(first)], name, src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)


class Cost:
    """What looks take while host.lock is held: seconds of processor time, and files that are opened."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.opened: list[int] = []
        self._opened = -1

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        locked, opened = Host.locked, entry_module.open_to_read

        @contextmanager
        def timed(host: Host, *arguments: Any) -> Iterator[None]:
            with locked(host, *arguments):
                self._opened, began = 0, time.thread_time()
                try:
                    yield
                finally:
                    self.seconds.append(time.thread_time() - began)
                    self.opened.append(self._opened)
                    self._opened = -1

        def count(*arguments: Any) -> Any:
            self._opened += self._opened >= 0
            return opened(*arguments)

        patch.setattr(Host, "locked", timed)
        patch.setattr(entry_module, "open_to_read", count)


def said(part: str, uuids: list[str]) -> bytes:
    what: dict[str, Any] = {"gpus": dict.fromkeys(uuids)} if part == "claims" else {"gpus": uuids, "nb_gpus": 1}
    return json.dumps({"v": 1, "pid": 1, **what}).encode()


@pytest.mark.parametrize("part", ["claims", "queue"])
def test_many_names_cost_little_under_host_lock(used: Path, ground: Any, as_user: Any, part: str) -> None:
    """Dead entries for all GPUs, and nonsense. They are read before, and only their names are listed under it."""
    fill(used / part, [said(part, ground.uuids), b"{", b"x" * 60_000], MANY)

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        found = Cost()
        with pytest.MonkeyPatch.context() as patch:
            found.watch(patch)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            taken = [claim(8).release_gpus() for _ in range(3)]
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        say(json.dumps([len(taken), min(found.seconds), max(found.opened), grown / 1024]))

    answer = as_user(look, uid=VICTIM).hear()
    taken, seconds, opened, grown = json.loads(answer)
    assert taken == 3
    assert opened <= 2
    assert seconds < LONGEST
    assert grown < 64, "MiB"


# Entries of a neighbour's


@pytest.fixture
def make(used: Path) -> Iterator[Callable[..., tuple[Path, Held]]]:
    """Living entries that say what is given, of a neighbour."""
    made: list[Held] = []

    def entry(part: str, number: int, uid: int = NEIGHBOUR, **what: Any) -> tuple[Path, Held]:
        with Directory(str(used), part) as directory:
            name, held = make_entry(directory, number, what, by_children=False)
        os.fchown(held.fd, uid, uid)
        made.append(held)
        return used / part / name, held

    yield entry
    for held in made:
        held.release()


def test_no_living_claim_is_left_out_however_many_a_user_has(used: Path, ground: Any, make: Any) -> None:
    for number in range(1, 201):
        make("claims", number, gpus={f"GPU-{number}": None})
    make("claims", 300, VICTIM, gpus={ground.uuids[0]: None})
    with claim() as owner:
        assert owner.devices_taken == [1]


def test_of_very_many_claims_few_are_asked_again_under_host_lock(
    used: Path, ground: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lived a moment before is taken to live."""
    monkeypatch.setattr("safe_gpu.claim.look._MOST_ASKED", 5)
    monkeypatch.setattr(Entries, "may_be_many", True)
    for number in range(1, 21):
        make("claims", number, gpus={ground.uuids[0]: None})
    cost = Cost()
    cost.watch(monkeypatch)
    with claim() as owner:
        assert owner.devices_taken == [1]
    assert cost.opened == [5]


def test_what_another_user_left_is_not_touched(used: Path, ground: Any, make: Any, as_user: Any) -> None:
    paths = []
    for part in ("claims", "queue"):
        path, held = make(part, 1, **json.loads(said(part, ground.uuids)))
        held.release()
        paths.append((path, path.stat(), path.read_bytes()))

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim(8).release_gpus()
        say("released")

    assert as_user(look, uid=VICTIM).hear() == "released"
    for path, status, content in paths:
        now = path.stat()
        assert (now.st_ino, now.st_mtime_ns, now.st_ctime_ns) == (status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
        assert path.read_bytes() == content
    claim().release_gpus()
    assert not any(path.exists() for path, _, _ in paths), "root removes them"
