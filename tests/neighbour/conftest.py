"""A neighbour on the same host, and what a command costs while it is at work."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import api
from support.claims import claim
from support.processes import PACKAGE_ROOT

RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> int:
    """renameat2(2) with RENAME_EXCHANGE; returns 0 or the error number."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.renameat2(-100, bytes(one), -100, bytes(other), RENAME_EXCHANGE) and ctypes.get_errno()


class Cost(NamedTuple):
    """How a command ended, and what it took: seconds, and MiB of memory at most beyond a bare interpreter."""

    code: int
    out: str
    err: str
    seconds: float
    mebibytes: float


# Starts the command from a small process: a process inherits the peak of the one that it was started from.
_MEASURE = """
import json, resource, subprocess, sys, time
began = time.monotonic()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
seconds = time.monotonic() - began
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(json.dumps([done.returncode, done.stdout, done.stderr, seconds, peak]))
"""


def measure(*command: str) -> Cost:
    words = [sys.executable, "-ISc", _MEASURE, sys.executable, *command]
    env = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=True)
    return Cost(*json.loads(done.stdout))


@pytest.fixture(scope="session")
def cost() -> Callable[..., Cost]:
    """``cost("status")`` runs ``safe-gpu status`` and measures it; ``before`` is what the process executes first."""
    bare = measure("-c", "pass").mebibytes

    def run(*arguments: object, before: str = "") -> Cost:
        program = f"{before}\nimport runpy; runpy.run_module('safe_gpu', run_name='__main__')"
        taken = measure("-c", program, *map(str, arguments))
        return taken._replace(mebibytes=taken.mebibytes - bare)

    return run


# Sets where the kernel finds arguments and environment to one GiB of memory, as any user may (prctl(2), PR_SET_MM_MAP).
WIDEN = """
import ctypes, mmap, os, struct
size = 1 << 30
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[0:5] = b"wide\\0"
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
fields = [int(field) for field in open("/proc/self/stat").read().rpartition(")")[2].split()[1:]]
field = lambda number: fields[number - 4]
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
places = (field(26), field(27), field(45), field(46), field(47), libc.sbrk(0), field(28), start, start + size)
line = struct.pack("=11QQIi", *places, start, start + size, 0, 0, -1)
print(libc.prctl(35, 14, ctypes.create_string_buffer(line), ctypes.c_ulong(len(line)), 0), flush=True)
"""


@pytest.fixture
def huge_process(child: Callable[..., Any]) -> int:
    """The pid of a process whose command line and environment are one GiB each."""
    process = child(WIDEN + "listen()")
    if process.hear() != "0":
        pytest.skip("this kernel does not let a process move its arguments")
    return int(process.pid)


@pytest.fixture
def entry_of(state_dir: Path, as_user: Any) -> Callable[..., Path]:
    """``entry_of(NEIGHBOUR, {"gpus": {}})``: the path of a living entry of that user with this content."""

    def make(uid: int, content: dict[str, Any], part: str = "claims", number: int = 1) -> Path:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            with api.Directory(str(state_dir), part) as directory:
                name, _held = api.make_entry(directory, number, content, by_children=False)
                say(name)
                listen()

        return state_dir / part / as_user(work, uid=uid).hear()

    return make


@pytest.fixture
def claim_as(state_dir: Path, as_user: Any) -> Callable[..., Any]:
    """``claim_as(ANNA, 1)``: a process of hers that claims one GPU, says which, or the error, and holds it.

    Args of that function:
        start_as: the user that the process is started as; None is the same. ``before`` may change it.
        scope: its SAFE_GPU_SCOPE.
        before, after: are called in it before and after the claim.
        says: the variable whose value it says in place of the GPUs.
    """

    def start(
        uid: int, nb_gpus: int = 1, *, start_as=None, scope="", before=bool, after=bool, says="", **options: Any
    ) -> Any:
        def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
            os.environ["SAFE_GPU_SCOPE"] = scope
            before()
            owner = claim(nb_gpus, **options)
            after()
            say(os.environ[says] if says else owner.devices_taken)
            listen()

        return as_user(work, uid=uid if start_as is None else start_as)

    return start
