"""Nothing in the state directory is reached by a path: the owner of a directory may put a link in the place of a name.

Every system call that takes a path is looked at, during whole lives of claims and of the commands that look.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.real import long

LIFE = """
import os, subprocess, sys, safe_gpu
run = lambda *words: subprocess.run([sys.executable, "-m", "safe_gpu", *words], stdout=subprocess.DEVNULL, check=False)
with safe_gpu.GPUOwner(7, affinity=None, timeout=0):
    run("run", "-n", "2", "--timeout", "0.5", "--", "true")
    run("wait", "-n", "2", "--timeout", "0.2")
    for look in (["status"], ["status", "--json"], ["doctor"], ["history"], ["policy"]):
        run(*look)
run("run", "-n", "8", "--for", "1h", "--", "true")
safe_gpu.get_free_gpus()
run("history", "--by", "user")
"""

STRACE = ("strace", "-f", "-y", "-s", "300", "-e", "trace=%file,fchmodat,fchownat", "-o")

# What follows a link in the last part of a path, whichever directory it is relative to.
FOLLOWS = {"chmod", "fchmodat", "chown", "fchownat", "truncate", "access", "faccessat", "statfs", "execve"}
CALL = re.compile(r"^\d+ +(\w+)\((.*)$")


def is_offence(name: str, rest: str, state: str) -> bool:
    """Whether a call follows the last part of a path into the state directory, or a directory above that in it."""
    if re.search(rf'"{re.escape(state)}/[^"]+"', rest):  # an absolute path
        is_seen_alone = "AT_SYMLINK_NOFOLLOW" in rest and re.search(rf'"{re.escape(state)}/[^"/]+"', rest)
        return name not in ("readlink", "connect", "bind") and not (name == "newfstatat" and is_seen_alone)
    if not re.match(rf"\d+<{re.escape(state)}[^>]*>", rest):
        return False
    if name == "openat":
        return "O_NOFOLLOW" not in rest and not re.search(r'>, "\.{1,2}", ', rest)
    if name == "newfstatat" or name in FOLLOWS:
        return "AT_SYMLINK_NOFOLLOW" not in rest and '""' not in rest
    return False


def offences(trace: str, state: str) -> list[str]:
    calls = ((line, CALL.match(line)) for line in trace.splitlines() if state in line)
    return [line for line, call in calls if call and is_offence(call[1], call[2].split(" = ")[0], state)]


@long
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be the victim")
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_no_path_into_the_state_directory_is_followed(state_dir: Path, tmp_path: Path, dgx: Any) -> None:
    root = str(Path(__file__).parents[2])
    trace = tmp_path / "trace"
    subprocess.run(
        [*STRACE, trace, sys.executable, "-c", LIFE],
        env={**os.environ, "PYTHONPATH": root},
        check=True,
        umask=0o077,
        timeout=110,
    )
    text = trace.read_text(errors="replace")
    for name in ("linkat", "renameat", "openat", "unlinkat"):
        assert re.search(rf"{name}\(.*{re.escape(str(state_dir))}", text), f"{name} was seen"
    assert offences(text, str(state_dir)) == []


def test_forbidden_system_calls_are_found_in_a_trace() -> None:
    lines = [
        '7 chmod("/s/queue", 01777) = 0',
        '7 fchmodat(4</s>, ".queue.1", 01777) = 0',
        '7 newfstatat(AT_FDCWD, "/s/claims", {...}, 0) = 0',
        '7 newfstatat(4</s>, "claims", {...}, 0) = 0',
        '7 newfstatat(AT_FDCWD, "/s/claims/7.00000000000000aa", {...}, AT_SYMLINK_NOFOLLOW) = 0',
        '7 openat(4</s/claims>, "7.00000000000000aa", O_RDWR|O_CLOEXEC) = 5',
        '7 openat(AT_FDCWD, "/s/history/2026-11.jsonl", O_RDONLY|O_NOFOLLOW) = 5',
        '7 utimensat(AT_FDCWD, "/s/history/x.seen", NULL, 0) = 0',
    ]
    assert offences("\n".join(lines), "/s") == lines
    fine = [
        '7 openat(AT_FDCWD, "/s", O_RDONLY|O_NOFOLLOW|O_DIRECTORY) = 4</s>',
        '7 linkat(4</s>, ".host.lock.00000000000000aa", 4</s>, "host.lock", 0) = 0',
        '7 newfstatat(5</s/host.lock>, "", {...}, AT_EMPTY_PATH) = 0',
        '7 newfstatat(4</s>, "claims", {...}, AT_SYMLINK_NOFOLLOW) = 0',
        '7 newfstatat(AT_FDCWD, "/s/claims", {...}, AT_SYMLINK_NOFOLLOW) = 0',
    ]
    assert offences("\n".join(fine), "/s") == []
