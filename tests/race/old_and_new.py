"""Run by test_older_package.py where no one else's lock of the older package can be reached; see there.

    old_and_new.py SCENARIO DIRECTORY_OF_THE_OLDER_PACKAGE

It starts processes with one of the two packages each, tells them what to do, and asserts what they may do. Each process
says on its standard output what it does, a word and its arguments a line.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])

from support.processes import Child
from support.real import wait_for

MARKERS = Path(os.environ["FAKE_GPU_DIR"], "markers")

COMMON = """
import logging, os
class Steps(logging.Handler):
    def emit(self, record): say("log", record.getMessage())
logger = logging.getLogger("racer"); logger.setLevel(logging.INFO); logger.addHandler(Steps()); logger.propagate = False
gpus = [line.split()[0].partition("=")[2] for line in open(os.environ["FAKE_GPU_DIR"] + "/gpus")]
def mine(): return [gpus[int(n)] for n in os.environ["CUDA_VISIBLE_DEVICES"].split(",")]
def mark():
    for uuid in mine():
        try: os.close(os.open(os.environ["FAKE_GPU_DIR"] + "/markers/" + uuid, os.O_CREAT | os.O_EXCL))
        except FileExistsError: say("collision", uuid)
def finish():
    mark(); say("holds", *mine()); listen(); os._exit(0)
"""
OLD = """
older = os.environ["OLDER"]
sys.path.insert(0, older)
from safe_gpu import safe_gpu
import safe_gpu as package
assert package.__file__.startswith(older)
def context(device_no):
    say("placing"); listen()
    uuid = mine()[device_no]
    os.makedirs(os.environ["FAKE_GPU_DIR"] + "/procs/" + uuid, exist_ok=True)
    open(os.environ["FAKE_GPU_DIR"] + f"/procs/{uuid}/{os.getpid()}", "w").write("1048576")
    say("placed"); return uuid
safe_gpu.claim_gpus(int(os.environ["NB_GPUS"]), context, logger)
finish()
"""
NEW = """
import safe_gpu
assert safe_gpu.__version__ >= "3"
class Context(safe_gpu.CudaPlaceholder):
    def _allocate(self, device_no):
        say("placing"); listen(); thing = super()._allocate(device_no); say("placed"); return thing
safe_gpu.claim_gpus(int(os.environ["NB_GPUS"]), Context(), logger, timeout=100, affinity=None)
finish()
"""


class Process(Child):
    """A claim by one of the two packages."""

    def __init__(self, code: str, nb_gpus: int = 1) -> None:
        super().__init__(COMMON + code, env={"OLDER": sys.argv[2], "NB_GPUS": str(nb_gpus)})
        self.gpus: list[str] = []

    def until(self, *words: str) -> list[str]:
        """Its words up to the line that begins with these."""
        while True:
            said = self.hear().split()
            assert said[0] != "collision", f"collision on {said[1]}"
            if said[: len(words)] == list(words):
                return said

    def place(self) -> None:
        """From its placeholder to GPUs that it holds."""
        self.tell()
        self.until("placed")

    def hold(self) -> None:
        self.gpus = self.until("holds")[1:]

    def has_the_lock_open(self) -> bool:
        found = []
        for descriptor in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(os.readlink(descriptor))
        return "gpu-lock-magic" in " ".join(found)

    def waits_for_a_posix_lock(self) -> bool:
        with open("/proc/locks") as file:
            return any("->" in line and "POSIX" in line and f" {self.pid} " in line for line in file)


def check_apart(processes: list[Process]) -> None:
    held = [uuid for process in processes for uuid in process.gpus]
    assert len(held) == len(set(held)), held
    assert {marker.name for marker in MARKERS.iterdir()} == set(held)


def side_by_side() -> None:
    """Ours are all in their placeholders together, while an old one, come later, is kept out."""
    first = Process(OLD)  # makes the lock file, which is how its package is noticed
    first.until("placing")
    first.place()
    first.hold()
    ours = [Process(NEW) for _ in range(4)]
    for process in ours:
        process.until("placing")  # none of them has been told to go on, and yet all of them come here
    late = Process(OLD)
    late.until("log", "acquiring", "lock")
    wait_for(late.waits_for_a_posix_lock, "wait for the lock")
    for process in ours:
        process.place()
    for process in ours:
        process.hold()
    late.until("placing")
    late.place()
    late.hold()
    check_apart([first, late, *ours])


def kept_out() -> None:
    """While an old one is between its look and its context, ours wait, and then take other GPUs."""
    old = Process(OLD, 3)
    old.until("placing")
    ours = [Process(NEW) for _ in range(3)]
    for process in ours:
        process.until("log", "lock", "released")  # it has a lease, of a GPU that the old one has chosen already
    for process in ours:
        wait_for(process.has_the_lock_open, "look at the lock")
    for _ in range(3):
        old.place()
    for process in ours:
        process.until("placing")
        process.place()
    old.hold()
    for process in ours:
        process.hold()
    check_apart([old, *ours])


def rush() -> None:
    """Eight GPUs and eight processes, half old and half new, at once: everybody gets one."""
    for _ in range(2):
        processes = [Process(code) for code in (OLD, NEW) * 4]
        for process in processes:
            process.tell()
        for process in processes:
            process.hold()
        check_apart(processes)
        for process in processes:
            process.kill()
        for marker in MARKERS.iterdir():
            marker.unlink()


MARKERS.mkdir()
{"side_by_side": side_by_side, "kept_out": kept_out, "rush": rush}[sys.argv[1]]()
print("as it should be")
