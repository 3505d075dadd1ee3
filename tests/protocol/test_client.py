"""The second client of the protocol: what it holds is seen by this package, and the reverse."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.ground import write_for_all

from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.name_table import read_names
from safe_gpu.coordination.scope_names import scope_name
from safe_gpu.drivers.simulated import SimulatedDriver

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
NOW = {"c": ("-t", "0"), "python": ("--timeout", "0")}
DELEGATES = {"c": ("-s",), "python": ()}
KINDS = ("c", "python")
BOTH = pytest.mark.parametrize(("first", "second"), [KINDS, KINDS[::-1]], ids=["C first", "Python first"])
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
USER = 54321
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


@pytest.mark.skipif(not COMPILERS, reason="needs a C compiler")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("name", COMPILERS)
def test_it_compiles_without_a_warning(name: str, source: Path) -> None:
    words = [name, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-o", os.devnull, str(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@BOTH
def test_each_sees_what_the_other_holds(scene: Any, first: str, second: str) -> None:
    holder = scene.until_holds(scene.start(first, 5))
    assert scene.start(second, 4, *NOW[second]).finish()[0] == 75
    scene.until_holds(scene.start(second, 3, *NOW[second]))
    assert scene.said("rival") == []
    holder.end()
    scene.until_holds(scene.start(second, 5, *NOW[second]))


def test_status_shows_its_claim_and_owner(scene: Any) -> None:
    holder = scene.until_holds(scene.start("c", 2, "-f", "3600"))
    claimed = [gpu for gpu in scene.status() if gpu["state"] == "claimed"]
    assert [gpu["uuid"] for gpu in claimed] == scene.uuids[:2]
    claim = claimed[0]["claim"]
    assert (claim["pid"], claim["uid"]) == (holder.pid, os.geteuid())
    assert claim["until"] == pytest.approx(claim["since"] + 3600, abs=0.01)
    assert [process["pid"] for process in claimed[0]["processes"]] == [holder.pid]
    record = json.loads((scene.state_dir / "leases" / f"{scene.uuids[0]}.lock").read_text())
    assert Path(record["command"]).name == Path(scene.job()[0]).name
    assert record["gpus"] == scene.uuids[:2]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_one_leaves_nothing_that_blocks(scene: Any, how: int) -> None:
    holder = scene.until_holds(scene.start("c", 8))
    waiter = scene.until_waits(scene.start("c", 1))
    waiter.end(how)
    assert scene.status()[0]["state"] == "claimed"
    holder.end(how)
    assert {gpu["state"] for gpu in scene.status()} == {"free"}
    scene.all_can_be_claimed()
    assert scene.tickets() == []


@BOTH
def test_a_claim_inside_a_claim(scene: Any, first: str, second: str) -> None:
    """The inner one gets GPUs of the outer one only, at most those, and each once."""
    inner = " ".join(scene.words(second, 2, *NOW[second]))
    enough = " ".join(scene.words(second, 1, *NOW[second]))
    script = (
        f"{enough} sh -c '"
        f'echo $CUDA_VISIBLE_DEVICES; {enough} sh -c "echo \\$CUDA_VISIBLE_DEVICES"; {inner} true; echo $?\'; '
        f"{inner} sh -c 'echo $CUDA_VISIBLE_DEVICES'"
    )
    code, out, err = scene.start(first, 2, *DELEGATES[first], command=["sh", "-c", script]).finish()
    assert code == 0, err
    *singles, refused, both = out.split()
    assert refused != "0", out
    assert singles[0] in scene.uuids[:2]
    assert both.split(",") == scene.uuids[:2]
    # Whether a third level may claim what the second one left differs: it is a claim inside the first one, too.
    assert len(set(singles)) == len(singles)
    scene.all_can_be_claimed()


@BOTH
def test_a_claim_inside_waits_for_another_one_inside(scene: Any, first: str, second: str) -> None:
    held, go = scene.directory / "held", scene.directory / "go"
    for fifo in (held, go):
        os.mkfifo(fifo)
    holder = " ".join([*scene.words(first, 1), "sh", "-c", f"'echo held >{held}; read x <{go}'"])
    waiter = " ".join([*scene.words(second, 1), "echo", "served"])
    party = scene.start(first, 1, *DELEGATES[first], command=["sh", "-c", f"{holder} & read x <{held}; {waiter}; wait"])
    scene.until(lambda: len(scene.tickets()) == 1, party)
    assert scene.start(second, 8, *NOW[second]).finish()[0] == 75
    go.write_text("go\n")
    assert party.finish()[:2] == (0, "served\n")


@BOTH
def test_a_claim_that_would_wait_for_its_own_parent_is_refused(scene: Any, first: str, second: str) -> None:
    forever = " ".join([*scene.words(second, 4), "true"])
    party = scene.start(first, 5, command=["sh", "-c", f"unset SAFE_GPU_SCOPE CUDA_VISIBLE_DEVICES; {forever}"])
    code, _, err = party.finish()
    assert code == 75
    assert "parent" in err


@BOTH
def test_a_stale_scope_is_ignored(scene: Any, first: str, second: str) -> None:
    token = scene.start(first, 1, *DELEGATES[first], command=["sh", "-c", "echo $SAFE_GPU_SCOPE"]).finish()[1].strip()
    assert re.fullmatch(r"[0-9a-f]{16}@\d+", token)
    code, _, err = scene.start(second, 8, *NOW[second], command=["true"], env={"SAFE_GPU_SCOPE": token}).finish()
    assert code == 0
    assert "SAFE_GPU_SCOPE" in err


@BOTH
def test_names_keep_two_state_directories_apart(scene: Any, first: str, second: str) -> None:
    other = {"SAFE_GPU_DIR": str(scene.directory / "other")}
    holder = scene.until_holds(scene.start(first, 6))
    for size, code in ((3, 75), (2, 0)):
        assert scene.start(second, size, *NOW[second], command=["true"], env=other).finish()[0] == code
    waiter = scene.start(second, 3, env=other)
    scene.until(lambda: waiter.pid in scene.tickets(scene.directory / "other"), waiter)
    holder.end()
    scene.until_holds(waiter)
    assert scene.said("rival") == []


@BOTH
def test_a_cleaned_directory_gives_no_gpu_away(scene: Any, first: str, second: str) -> None:
    """Nor what is claimed inside: the name of a claim says whose it is."""
    inner = " ".join([*scene.words(second, 2, *NOW[second]), *scene.job()])
    clean = f"rm -rf {scene.state_dir}/leases {scene.state_dir}/queue"
    party = scene.start(first, 6, *DELEGATES[first], command=["sh", "-c", f"{clean}; exec {inner}"])
    scene.until(lambda: bool(scene.served()), party)
    for kind in KINDS:
        assert scene.start(kind, 3, *NOW[kind], command=["true"]).finish()[0] == 75
        assert scene.start(kind, 2, *NOW[kind], command=["true"]).finish()[0] == 0


def test_the_names_of_a_simulated_host_have_the_hash_of_its_directory(scene: Any) -> None:
    for env in ({}, {"SAFE_GPU_SIMULATED_DIR": ""}):
        tree = env.get("SAFE_GPU_SIMULATED_DIR", scene.env["SAFE_GPU_SIMULATED_DIR"]) or f"{scene.state_dir}/simulated"
        prefix = names.simulated_prefix(tree)
        party = scene.start("c", 1, command=["sleep", "60"], env=env)
        scene.until(lambda: names.name_of(scene.uuids[0], prefix) in read_names(), party)  # noqa: B023
        party.end()


def bare(scene: Any, uuid: str, *command: str, token: str = "") -> subprocess.CompletedProcess[str]:
    """The C client and a command, on a host that is not simulated: names begin with the UUID."""
    words = [scene.build("client.c"), "-n", "1", "-g", uuid, "-t", "0", *command]
    env = {**scene.env, "SAFE_GPU_SCOPE": token}
    return subprocess.run(words, env=env, capture_output=True, text=True, errors="replace", timeout=60)


def test_a_short_name_is_padded(scene: Any) -> None:
    uuid = f"GPU-{os.urandom(8).hex()}"
    shown = bare(scene, uuid, "cat", "/proc/net/unix").stdout.splitlines()
    assert [line[-49:] for line in shown if uuid in line] == [f"@safe-gpu/1/{uuid}................."]
    one = names.take_name(names.name_of(uuid))
    assert one is not None
    assert bare(scene, uuid, "true").returncode == 75
    one.release()
    assert bare(scene, uuid, "true").returncode == 0


def test_the_names_of_a_claim_let_its_user_in(scene: Any) -> None:
    """Both together: the second one is of the socket that has the first."""
    uuid, token = f"GPU-{os.urandom(8).hex()}", os.urandom(8).hex()
    outer = names.outer_of(uuid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, socket.socket(socket.AF_UNIX) as other:
        inode = os.fstat(ours.fileno()).st_ino
        assert "is of no living claim" in bare(scene, uuid, "true", token=token).stderr
        ours.bind(f"\0safe-gpu/1/{outer}")
        assert "is of no living claim" in bare(scene, uuid, "true", token=token).stderr
        other.bind(f"\0safe-gpu/1/{scope_name(outer, token, inode + 1)}")
        assert "is of no living claim" in bare(scene, uuid, "true", token=token).stderr
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours, socket.socket(socket.AF_UNIX) as other:
        ours.bind(f"\0safe-gpu/1/{outer}")
        other.bind(f"\0safe-gpu/1/{scope_name(outer, token, os.fstat(ours.fileno()).st_ino)}")
        assert bare(scene, uuid, "true", token=token).stderr == ""
        assert "is of no living claim" in bare(scene, uuid, "true", token=f"{token}@1").stderr


# A job that closes some of the descriptors that it has inherited: those of leases, or of names that end so.
CLOSES = """
import os, socket, sys, time
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        continue
    kind = "lease" if "/leases/" in target else ""
    if target.startswith("socket:"):
        name = socket.socket(fileno=os.dup(number)).getsockname().decode().rstrip(".").rpartition("GPU-")[2]
        kind = name.partition(".")[2] or "UUID"
        kind = kind if kind in ("UUID", "outer") else "HASH"
    if kind in sys.argv[1:]:
        os.close(number)
print(os.environ["SAFE_GPU_SCOPE"], flush=True)
time.sleep(60)
"""


@BOTH
@pytest.mark.parametrize("left", ["HASH", "lease", "outer HASH", "HASH lease"])
def test_of_a_claim_half_dead_nobody_gets_a_gpu_that_another_gets(
    scene: Any, first: str, second: str, left: str
) -> None:
    lost = sorted({"UUID", "outer", "HASH", "lease"} - set(left.split()))
    outer = scene.start(first, 8, *DELEGATES[first], command=[sys.executable, "-c", CLOSES, *lost])
    token = outer.process.stdout.readline().decode().strip()
    rival = scene.start(
        second, 8, *NOW[second], *DELEGATES[second], env={"SAFE_GPU_DIR": str(scene.directory / "other")}
    )
    scene.until(lambda: rival.pid in scene.served() or rival.process.poll() is not None)
    inner = scene.start(first, 8, *NOW[first], env={"SAFE_GPU_SCOPE": token})
    scene.until(lambda: inner.pid in scene.served() or inner.process.poll() is not None)
    assert len(scene.served()) < 2


@pytest.mark.parametrize("sizes", [[512 << 20, 512 << 20], [512 << 20, 513 << 20]])
@pytest.mark.parametrize("kind", KINDS)
def test_what_draws_counts_together(scene: Any, kind: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(scene.tree.parent))
    driver = SimulatedDriver("dgx-a100")
    with ExitStack() as drawing:
        for pid, size in zip((os.getpid(), os.getppid()), sizes, strict=True):
            drawing.enter_context(driver.occupy(scene.uuids[0], memory=size, kind="graphics", pid=pid))
        assert scene.start(kind, 8, *NOW[kind], command=["true"]).finish()[0] == (75 if sum(sizes) > 1 << 30 else 0)


def test_a_gpu_with_a_note_is_taken_last(scene: Any) -> None:
    scene.start("python", 1, command=["true"]).finish()
    note = {"when": time.time(), "error": "CUDA_ERROR_ECC_UNCORRECTABLE"}
    write_for_all(scene.state_dir / "leases" / f"{scene.uuids[0]}.fault", json.dumps(note))
    assert scene.start("c", 1, command=["printenv", "CUDA_VISIBLE_DEVICES"]).finish()[1].strip() == scene.uuids[1]
    assert scene.start("c", 8, command=["true"]).finish()[0] == 0


def test_a_lease_that_cannot_be_opened_closes_its_gpu_only(scene: Any) -> None:
    (scene.state_dir / "leases" / f"{scene.uuids[0]}.lock").mkdir(parents=True)
    for path in (scene.state_dir, scene.state_dir / "leases"):
        path.chmod(0o1777)
    shown = scene.start("c", 7, command=["printenv", "CUDA_VISIBLE_DEVICES"]).finish()[1].strip()
    assert shown.split(",") == scene.uuids[1:]
    assert scene.start("c", 8, command=["true"]).finish()[0] == 75


@ROOT
def test_another_user_makes_the_directory_and_shares_it(scene: Any) -> None:
    theirs = {"user": USER, "group": USER, "extra_groups": [], "umask": 0o077}
    holder = scene.until_holds(scene.start("c", 6, **theirs))
    assert scene.start("python", 3, *NOW["python"]).finish()[0] == 75
    ours = scene.until_holds(scene.start("python", 2, *NOW["python"]))
    waiter = scene.until_waits(scene.start("c", 8, **theirs))
    claimed = {(gpu["claim"]["pid"], gpu["claim"]["uid"]) for gpu in scene.status()}
    assert claimed == {(holder.pid, USER), (ours.pid, 0)}
    last = scene.until_waits(scene.start("python", 8))
    ours.end()
    holder.end()
    scene.until_holds(waiter)
    waiter.end()
    scene.until_holds(last)


@ROOT
def test_the_scope_of_another_user_lets_nobody_in(scene: Any) -> None:
    theirs = {"user": USER, "group": USER, "extra_groups": []}
    party = scene.start("c", 8, "-s", command=["sh", "-c", "echo $SAFE_GPU_SCOPE; exec sleep 60"], **theirs)
    token = party.process.stdout.readline().decode().strip()
    for kind in KINDS:
        code, _, err = scene.start(kind, 1, *NOW[kind], command=["true"], env={"SAFE_GPU_SCOPE": token}).finish()
        assert code == 75
        assert "SAFE_GPU_SCOPE" in err
