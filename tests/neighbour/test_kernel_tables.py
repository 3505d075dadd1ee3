"""The kernel's tables of locks and names, which a neighbour can make long: when they are read, and what they tell."""

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safe_gpu.coordination.scope import gpus_of_scope
from support.claims import claim

import safe_gpu
from safe_gpu.claim.free import wait_for_gpus
from safe_gpu.claim.limits import remaining_quota
from safe_gpu.claim.search import attempt
from safe_gpu.coordination import name_table
from safe_gpu.coordination.flock import lock_file, unlock_file
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.host import procfs
from safe_gpu.status.gather import gather

ANNA, BEN = 4711, 4712

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


@pytest.fixture
def limit(rules: Any, open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody, root too, may hold one GPU."""
    rules("[default]\nmax_gpus = 1\n[user root]\nmax_gpus = 1")
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "host"))


def refusal(nb_gpus: int = 1, **options: Any) -> str:
    with pytest.raises(safe_gpu.NotEnoughGpusError) as caught:
        claim(nb_gpus, **options)
    return str(caught.value)


@pytest.fixture
def holder(state_dir: Path, child: Callable[..., Any]) -> Callable[..., str]:
    """``holder(2, delegate=True)``: another process of this user holds two GPUs; returns its token."""

    def hold(nb_gpus: int = 1, *, env: dict[str, str] | None = None, **options: Any) -> str:
        code = f"options = {{'affinity': None, 'timeout': 0, **{options!r}}}\n"
        code += f"owner = safe_gpu.GPUOwner({nb_gpus}, safe_gpu.NoPlaceholder(), **options)\n"
        other = child(
            f"import os, safe_gpu\n{code}say(os.environ.get('SAFE_GPU_SCOPE', 'none')); listen()", env=env or {}
        )
        token: str = other.hear()
        assert " " not in token, token
        return token

    return hold


@pytest.fixture
def reads(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that this process reads from now on. It must not hold host.lock meanwhile."""
    found: list[str] = []

    def watched(table: str, genuine: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            if arguments[:1] != ("/proc/self/maps",):
                found.append(table)
            if (state_dir / "host.lock").exists():
                with (state_dir / "host.lock").open("r+") as file:
                    assert lock_file(file.fileno()), f"{table} is read under host.lock"
                    unlock_file(file.fileno())
            return genuine(*arguments)

        return read

    monkeypatch.setattr(procfs, "lines_of", watched("locks", procfs.lines_of))
    monkeypatch.setattr(name_table.NameTable, "add", watched("names", name_table.NameTable.add))
    return found


def test_a_claim_reads_none(reads: list[str]) -> None:
    with claim(2, delegate=True):
        pass
    assert reads == []


def test_who_looks_reads_them_without_host_lock(reads: list[str], holder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = holder(2, delegate=True)
    for look in (gather, safe_gpu.get_free_gpus, lambda: refusal(7), lambda: refusal(7, timeout=0.01)):
        look()  # type: ignore[operator]
        assert {"locks", "names"} <= set(reads)
        reads.clear()
    wait_for_gpus(1, timeout=0)
    assert set(reads) == {"names"}
    reads.clear()
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    with claim(2) as inner:
        assert inner.devices_taken == [0, 1]
    assert set(reads) == {"names"}


def test_a_limit_is_told_without_host_lock(limit: None, reads: list[str], holder: Any) -> None:
    holder()
    assert "you hold 1 of your 1 GPU" in refusal()
    assert {"locks", "names"} <= set(reads)
    reads.clear()
    assert remaining_quota(SimulatedDriver("dgx-a100").snapshot(), 1) == 0
    assert set(reads) == {"locks", "names"}


# What nobody could tell


RUN = (sys.executable, "-m", "safe_gpu", "run", "--quiet", "--timeout", "0", "--")
LEAVE = ("sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")


@pytest.fixture
def leave(state_dir: Path) -> Any:
    """``leave()`` runs a command of Anna's under a claim that leaves a child behind, as tmux does; True if it could."""
    pids: list[int] = []

    def start(private: bool) -> bool:
        user = ("setpriv", f"--reuid={ANNA}", f"--regid={ANNA}", "--clear-groups", *RUN, *LEAVE)
        mount = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o mode=1777 none {state_dir} && exec "$@"', "sh")
        state_dir.mkdir(mode=0o1777, exist_ok=True)
        state_dir.chmod(0o1777)
        done = subprocess.run((*mount, *user) if private else user, capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            pids.append(int(done.stdout))
        else:
            assert "you hold 1 of your 1 GPU" in done.stderr
        return done.returncode == 0

    yield start
    for pid in pids:
        os.kill(pid, 9)


@pytest.mark.parametrize("private", [False, True], ids=["shared", "private-tmp"])
def test_what_a_command_leaves_behind_counts(limit: None, leave: Any, private: bool) -> None:
    assert [leave(private) for _ in range(3)] == [True, False, False]


def test_a_share_elsewhere_counts_as_its_gpu(limit: None, open_tmp: Path, holder: Any) -> None:
    holder(share="1GiB", env={"SAFE_GPU_DIR": str(open_tmp / "other")})
    assert "you hold 1 of your 1 GPU" in refusal()


def test_status_tells_whose_a_claim_of_another_directory_is(limit: None, open_tmp: Path, as_user: Any) -> None:
    def hold(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        os.environ["SAFE_GPU_DIR"] = str(open_tmp / "other")
        claim(only=3)
        say("held")
        listen()

    assert as_user(hold, uid=ANNA).hear() == "held"

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        one = gather().gpus[3].claim
        assert one is not None
        say(json.dumps([one.pid, one.user, one.uid, one.elsewhere]))

    assert json.loads(as_user(look, uid=BEN).hear()) == [None, procfs.user_name(ANNA), ANNA, ""]


# Tables that are too long


@pytest.fixture
def too_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A neighbour has more locks, or sockets, than can be read in time; here one of each."""
    modules = {"locks": procfs, "names": name_table}
    with open(tmp_path / "lock", "w") as file, socket.socket(socket.AF_UNIX) as one:
        fcntl.flock(file, fcntl.LOCK_EX)
        one.bind(str(tmp_path / "socket"))
        yield lambda table: monkeypatch.setattr(modules[table], "LONGEST_READ", -1)


@pytest.mark.parametrize("table", ["locks", "names"])
def test_a_limit_that_is_not_known_holds(limit: None, too_long: Callable[[str], None], table: str) -> None:
    too_long(table)
    assert "how many of your 1 GPU you hold is not known: other users have too many locks or sockets" in refusal()
    assert remaining_quota(SimulatedDriver("dgx-a100").snapshot(), 1) == 0


@pytest.mark.parametrize("table", ["locks", "names"])
def test_a_scope_that_is_not_known_is_not_left(too_long: Callable[[str], None], monkeypatch, table: str) -> None:
    monkeypatch.setenv("SAFE_GPU_SCOPE", "0123456789abcdef")
    too_long(table)
    assert "whether the claim around this process (SAFE_GPU_SCOPE) lives is not known" in refusal()


# The claim around this process


def test_forged_carriers_do_not_hide_it(state_dir: Path, as_user: Any, ground: Any) -> None:
    """A neighbour has the hash of the token, which is public, in more records than anybody wants to read."""

    def hold(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        claim(1, delegate=True)
        say(os.environ["SAFE_GPU_SCOPE"])
        listen()

    def forge(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        record = next(path for path in (state_dir / "leases").glob("*.lock") if path.stat().st_size).read_text()
        for number in range(600):
            path = state_dir / "leases" / f"AMD-{number:04}.lock"
            path.write_text(record)
            path.chmod(0o666)
        say("forged")

    token = as_user(hold, uid=ANNA).hear()
    assert as_user(forge, uid=BEN).hear() == "forged"

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        say(gpus_of_scope(token))
        name_table.NameTable.add = lambda *_: False  # type: ignore[method-assign]
        say(gpus_of_scope(token))

    seeker = as_user(look, uid=ANNA)
    expected = str((ground.uuids[0],))
    assert seeker.hear() == expected
    assert seeker.hear() == expected, "by the lease alone"
    assert as_user(lambda say, listen: say(gpus_of_scope(token)), uid=BEN).hear() == "()"


def test_a_claim_of_this_user_that_comes_just_before_is_seen(limit: None, holder: Any, monkeypatch) -> None:
    """After the tables were read, and before host.lock was taken."""
    looks = []
    genuine = attempt.read_facts

    def read(*arguments: Any, **options: Any) -> Any:
        facts = genuine(*arguments, **options)
        if not looks:
            holder(only=5)
        looks.append(facts)
        return facts

    monkeypatch.setattr(attempt, "read_facts", read)
    assert "you hold 1 of your 1 GPU" in refusal(only=0)
    assert len(looks) == 1
