"""The clients of the protocol in C: what they hold is seen by this package, and the reverse."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.real import long

SOURCES = [
    pytest.param(path, id=f"{path.parent.name}/{path.name}", marks=[long] if path.parent.name == "complete" else [])
    for path in sorted(Path(__file__).parent.rglob("*.c"))
]
KINDS = ("c", "python")
BOTH = pytest.mark.parametrize(("first", "second"), [KINDS, KINDS[::-1]], ids=["C first", "Python first"])
ALL_PAIRS = pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("c", "python", id="C first"),
        pytest.param("python", "c", id="Python first"),
        pytest.param("minimal", "python", id="example first"),
        pytest.param("python", "minimal", id="example second"),
        pytest.param("minimal", "c", id="example before C", marks=long),
        pytest.param("c", "minimal", id="example after C", marks=long),
    ],
)
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
USER = 54321  # nobody's
THEIRS = {"user": USER, "group": USER, "extra_groups": [], "umask": 0o077}
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


@pytest.mark.skipif(not COMPILERS, reason="needs a C compiler")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", COMPILERS)
def test_it_compiles_without_a_warning(name: str, source: Path) -> None:
    words = [name, "-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-o", os.devnull, str(source)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("source", ["complete/client.c", "client.c"])
def test_the_client_is_a_program_of_its_own(scene: Any, source: str) -> None:
    """Without for_tests.c it knows no driver, and takes the doors of real GPUs."""
    uuid = f"GPU-{uuid4()}"
    words = [scene.build(source), "-n", "1", "-g", uuid, "-t", "0"]
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read line"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    here = {**scene.env, "DOORS_OF_SIMULATED_HOST": ""}
    elsewhere = {**here, "SAFE_GPU_DIR": str(scene.directory / "other")}
    scene.make_state_dir()
    scene.make_state_dir(scene.directory / "other")
    with subprocess.Popen([*words, *show], env=here, **streams) as holder:
        assert holder.stdout.readline() == f"{uuid}\n"
        (claim,) = scene.entries("claims")
        assert (claim.pid, claim.gpus) == (holder.pid, {uuid: None})
        for env in (here, elsewhere):
            assert subprocess.run([*words, "true"], env=env, timeout=40).returncode == 75
        holder.communicate("\n")
    assert subprocess.run([*words, "true"], env=here, timeout=40).returncode == 0


@ALL_PAIRS
def test_each_sees_what_the_other_holds(scene: Any, first: str, second: str) -> None:
    scene.make_state_dir()
    holder = scene.until_holds(scene.start(first, 5))
    assert scene.start(second, 4, "now").finish()[0] == 75
    scene.until_holds(scene.start(second, 3, "now"))
    assert scene.said("rival") == []
    holder.end()
    scene.until_holds(scene.start(second, 5, "now"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kind", ["c", "minimal"])
def test_a_dead_one_leaves_nothing_that_blocks(scene: Any, how: int, kind: str) -> None:
    scene.make_state_dir()
    holder = scene.until_holds(scene.start(kind, 8))
    waiter = scene.until_waits(scene.start(kind, 1))
    waiter.end(how)
    holder.end(how)
    assert scene.entries("claims") == scene.tickets() == []
    scene.all_can_be_claimed()
    dead = [path for name in ("claims", "queue") for path in (scene.state_dir / name).iterdir()]
    assert len(dead) <= 1, f"{dead} were to be removed by the next claim of their owner"


@ALL_PAIRS
def test_both_share_a_gpu(scene: Any, first: str, second: str) -> None:
    scene.make_state_dir()
    for kind in (first, second):
        scene.until_holds(scene.start(kind, 8, "10 GiB"))
    for kind in (first, second):
        assert scene.ends(kind, 8, "now", "60 GiB") == 0
    scene.until_holds(scene.start(first, 1, "60 GiB"))
    for kind in (first, second):
        assert scene.ends(kind, 8, "now", "10 GiB") == 75
        assert scene.ends(kind, 1, "now") == 75
    assert scene.said("rival") == []


@pytest.mark.parametrize("kind", [*KINDS, "minimal"])
def test_a_share_that_only_a_child_keeps_vouches_for_no_door(scene: Any, kind: str) -> None:
    """The child keeps the entry and no door, so a share of another directory may have it since."""
    work = "import os, safe_gpu\nsafe_gpu.claim_gpus(8, share='10GiB')\nif os.fork(): os._exit(0)\nprint(), input()\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-P", "-c", work], env=scene.env, **pipes)
    assert child.wait(40) == 0
    assert child.stdout.readline() == "\n"
    scene.make_state_dir(scene.directory / "other")
    share = (kind, 1, "now", "10 GiB")
    assert scene.ends(*share) == 0
    scene.until_holds(scene.start(kind, 8, "10 GiB", env={"SAFE_GPU_DIR": str(scene.directory / "other")}))
    assert scene.ends(*share) == 75
    child.communicate("\n", timeout=40)


@BOTH
def test_a_claim_inside_a_claim(scene: Any, first: str, second: str) -> None:
    """The inner one gets GPUs of the outer one only, at most those, and each once."""
    inner = " ".join(scene.words(second, 2, "now"))
    enough = " ".join(scene.words(second, 1, "now"))
    script = (
        f"{enough} sh -c '"
        f'echo $CUDA_VISIBLE_DEVICES; {enough} sh -c "echo \\$CUDA_VISIBLE_DEVICES"; {inner} true; echo $?\'; '
        f"{inner} sh -c 'echo $CUDA_VISIBLE_DEVICES'"
    )
    code, out, err = scene.start(first, 2, "around", command=["sh", "-c", script]).finish()
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
    party = scene.start(first, 1, "around", command=["sh", "-c", f"{holder} & read x <{held}; {waiter}; wait"])
    scene.until(lambda: len(scene.tickets()) == 1, party)
    assert scene.start(second, 8, "now").finish()[0] == 75
    go.write_text("go\n")
    assert party.finish()[:2] == (0, "served\n")


@ROOT
def test_the_scope_of_another_user_lets_nobody_in(scene: Any) -> None:
    party = scene.start("c", 8, "around", command=["sh", "-c", "echo $SAFE_GPU_SCOPE; exec sleep 60"], **THEIRS)
    token = party.process.stdout.readline().decode().strip()
    for kind in KINDS:
        code, _, err = scene.start(kind, 1, "now", command=["true"], env={"SAFE_GPU_SCOPE": token}).finish()
        assert code == 75
        assert "SAFE_GPU_SCOPE" in err


@ALL_PAIRS
def test_doors_keep_two_state_directories_apart(scene: Any, first: str, second: str) -> None:
    scene.make_state_dir()
    scene.make_state_dir(scene.directory / "other")
    other = {"SAFE_GPU_DIR": str(scene.directory / "other")}
    holder = scene.until_holds(scene.start(first, 6))
    for size, code in ((3, 75), (2, 0)):
        assert scene.ends(second, size, "now", env=other) == code
    waiter = scene.start(second, 3, env=other)
    scene.until(lambda: waiter.pid in scene.tickets(scene.directory / "other"), waiter)
    holder.end()
    scene.until_holds(waiter).end()
    assert scene.said("rival") == []


@ALL_PAIRS
def test_a_cleaned_directory_gives_no_gpu_away(scene: Any, first: str, second: str) -> None:
    scene.make_state_dir()
    scene.until_holds(scene.start(first, 6))
    waiter = scene.until_waits(scene.start(second, 8))
    shutil.rmtree(scene.state_dir)
    for kind in KINDS:
        assert scene.ends(kind, 3, "now") == 75
    scene.until_waits(waiter)  # anew


# A job that closes some of the descriptors that it has inherited: its entry, or the doors of these kinds.
CLOSES = """
import os, socket, sys, time
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        target = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        continue
    kind = "entry" if "/claims/" in target else ""
    if target.startswith("socket:"):
        name = socket.socket(fileno=os.dup(number)).getsockname().decode().rstrip(".").rpartition("GPU-")[2]
        kind = {0: "door", 1: "part", 2: f"token{name[-1]}"}[name.count(".")]
    if kind in sys.argv[1:]:
        os.close(number)
print(os.environ["SAFE_GPU_SCOPE"], flush=True)
time.sleep(60)
"""


@BOTH
@pytest.mark.parametrize("lost", ["entry", "door token0", "door part token1", "entry door token0 token1"])
def test_of_a_claim_half_dead_nobody_gets_a_gpu_that_another_gets(scene, first: str, second: str, lost: str) -> None:
    outer = scene.start(first, 8, "around", command=[sys.executable, "-c", CLOSES, *lost.split()])
    token = outer.process.stdout.readline().decode().strip()
    rival = scene.start(second, 8, "now", env={"SAFE_GPU_DIR": str(scene.directory / "other")})
    scene.until(lambda: rival.pid in scene.served() or rival.process.poll() is not None)
    inner = scene.start(first, 8, "now", env={"SAFE_GPU_SCOPE": token})
    scene.until(lambda: inner.pid in scene.served() or inner.process.poll() is not None)
    assert len(scene.served()) < 2


@pytest.mark.parametrize("kind", [*KINDS, "minimal"])
def test_nobody_claims_what_is_drained(scene: Any, kind: str) -> None:
    scene.start("c", 1, command=["true"]).finish()  # makes the directory
    closed = scene.state_dir / "closed"
    closed.write_text(f"{scene.uuids[0]} - - - a fan is broken\n")
    closed.chmod(0o644)
    shown = scene.start(kind, 1, "now", command=["printenv", "CUDA_VISIBLE_DEVICES"]).finish()[1]
    assert shown.strip() in scene.uuids[1:]
    assert scene.ends(kind, 8, "now") == 75
    closed.chmod(0o646)  # anybody may have written it
    assert scene.ends(kind, 8, "now") == 0


@ROOT
def test_who_would_hold_what_is_reserved_goes_elsewhere(scene: Any) -> None:
    scene.start("c", 1, command=["true"]).finish()
    now = time.time()
    closed = scene.state_dir / "closed"
    for whom, begin, options, code in [
        ("user:root", now - 60, ["an hour"], 75),
        (f"user:{USER}", now - 60, [], 75),  # a name, not a number
        ("group:root", now + 600, [], 75),  # for a day, as nothing is known
        ("-", now + 600, ["a minute"], 0),
        ("-", now - 600, ["a minute"], 75),
    ]:
        closed.write_text(f"{scene.uuids[0]} {begin:.0f} {begin + 1200:.0f} {whom} a course\n")
        closed.chmod(0o644)
        assert scene.ends("c", 8, "now", *options, **THEIRS) == code, (whom, options)
        assert scene.ends("c", 8, "now", *options) == 0, "it binds root"


@ROOT
def test_another_user_makes_the_directory_and_shares_it(scene: Any) -> None:
    """And status shows whose claim is whose."""
    holder = scene.until_holds(scene.start("c", 6, "an hour", **THEIRS))
    assert scene.start("python", 3, "now").finish()[0] == 75
    ours = scene.until_holds(scene.start("python", 2, "now"))
    waiter = scene.until_waits(scene.start("c", 8, **THEIRS))
    shown = scene.status()
    claimed = [(gpu["claim"]["pid"], gpu["claim"]["uid"]) for gpu in shown]
    assert claimed == [(holder.pid, USER)] * 6 + [(ours.pid, 0)] * 2
    claim = shown[0]["claim"]
    assert claim["until"] == pytest.approx(claim["since"] + 3600, abs=0.01)
    last = scene.until_waits(scene.start("python", 8))
    ours.end()
    holder.end()
    scene.until_holds(waiter)
    waiter.end()
    scene.until_holds(last)


@BOTH
def test_a_stale_scope_is_ignored(scene: Any, first: str, second: str) -> None:
    token = scene.start(first, 1, "around", command=["sh", "-c", "echo $SAFE_GPU_SCOPE"]).finish()[1].strip()
    assert re.fullmatch(r"[0-9a-f]{16}", token)
    code, _, err = scene.start(second, 8, "now", command=["true"], env={"SAFE_GPU_SCOPE": token}).finish()
    assert code == 0
    assert "SAFE_GPU_SCOPE" in err
