#!/usr/bin/env python3
"""Check on a host with AMD GPUs what safe_gpu takes for granted there. Run it while the GPUs are idle, and send it in.

    python tools/first_run_amd.py

It allocates a few KiB on one GPU after another. Each line says what was seen; lines that begin with DIFFERS contradict
an assumption of safe_gpu, lines that begin with "seen" answer a question on which nothing depends yet. The exit status
is the number of differences.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from safe_gpu.drivers.kfd import KfdDriver
from safe_gpu.errors import SafeGpuError
from safe_gpu.gpus.devices import Gpu, HostSnapshot
from safe_gpu.runtimes.hip import HIP
from safe_gpu.runtimes.visible_devices import render_visible
from safe_gpu.topology import files, kfd_topology

# With this variable a claim leaves ROCR_VISIBLE_DEVICES alone, so that HIP's own numbers count.
UNDER_RAY = {"RAY_RAYLET_PID": "1"}

# Does what its input says, a step a line, and answers each with a line of JSON.
CHILD = """
import ctypes, json, os, signal, sys
from safe_gpu.runtimes.hip import HIP, HipLibrary
held = []
is_open = HIP.has_opened
def load():
    HIP.load()
    return HIP.mapped_files()[0]
def start():
    HIP.load().initialize()
def hold():
    held.append(HIP.hold(0))
def free():
    held.pop().release()
def octets():
    raws = [(ctypes.c_char * 16)() for _ in range(HIP.load().count())]
    for number, raw in enumerate(raws):
        HIP.load().call("hipDeviceGetUuid", raw, ctypes.c_int(number))
    return [raw.raw.hex() for raw in raws]
def integrated():
    answers = [ctypes.c_int() for _ in range(HIP.load().count())]
    for number, answer in enumerate(answers):
        HIP.load().call("hipDeviceGetAttribute", ctypes.byref(answer), ctypes.c_int(16), ctypes.c_int(number))
    return [bool(answer.value) for answer in answers]
def fork():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        HIP.initialized_in = None  # safe_gpu itself would refuse
        try:
            HIP.hold(0)
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def copy(path):
    first = HIP.load()
    other = HipLibrary(ctypes.CDLL(path))
    return [first._handle._handle != other._handle._handle, first.count(), other.count()]
for line in sys.stdin:
    step, *arguments = json.loads(line)
    try:
        answer = globals()[step](*arguments)
    except Exception as err:
        answer = {"error": f"{type(err).__name__}: {err}"}
    print(json.dumps(answer), flush=True)
"""
PLAIN = {name: value for name, value in os.environ.items() if not name.endswith("_VISIBLE_DEVICES")}
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
PATIENCE = 10.0
IDLE_LIMIT = 1 << 30

differences = 0


def say(as_expected: bool, text: str) -> None:
    """Print what was seen, and count it if it contradicts an assumption."""
    global differences
    differences += not as_expected
    print(f"{'as expected' if as_expected else 'DIFFERS':12} {text}", flush=True)


def note(text: str) -> None:
    """Print what was seen where nothing is expected."""
    print(f"{'seen':12} {text}", flush=True)


class Child:
    """A process that uses HIP step by step."""

    def __init__(self, **variables: str) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", CHILD], env={**PLAIN, **variables}, **PIPES)
        self.pid = self._process.pid

    def do(self, *step: str) -> Any:
        """Let it do a step, wait until that is done, and return its answer, ``{"error": ...}`` if it failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{json.dumps(step)}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "the process has ended"}
        while line := self._process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:
                continue  # a library prints something
        return {"error": f"the process ended with status {self._process.wait()}"}

    def end(self, *, kill: bool = False) -> None:
        """Let it exit, or end it by SIGKILL."""
        if kill:
            self._process.kill()
        self._process.communicate()


def failed(answer: Any) -> bool:
    """Whether a step failed."""
    return isinstance(answer, dict) and "error" in answer


def on(driver: KfdDriver, pid: int) -> dict[int, int]:
    """Index -> bytes of the GPUs on which the kernel shows a process."""
    return {
        gpu.index: process.memory_used or 0
        for gpu in driver.snapshot().gpus
        for process in gpu.processes or ()
        if process.pid == pid
    }


def check_idle(snapshot: HostSnapshot) -> None:
    """How much memory does an idle GPU show as used? What does the kernel say of each GPU?"""
    for gpu, device in zip(snapshot.gpus, kfd_topology.devices(files.Files()) or (), strict=True):
        used = gpu.memory_used
        idle = used is not None and used < IDLE_LIMIT and not gpu.processes
        say(idle, f"GPU {gpu.index}: {used} bytes in use while idle")
        note(f"{gpu}")
        note(f"GPU {gpu.index} is {device}")


def check_names(snapshot: HostSnapshot) -> None:
    """Does HIP number and name the GPUs as the kernel's list does, and see only those that the variables name?"""
    seen = HIP.visible_in_child(PLAIN)
    same = len(seen) == len(snapshot.gpus) and all(map(HIP.is_same, seen, snapshot.gpus))
    say(same, f"HIP shows {', '.join(seen)}; the kernel lists {', '.join(gpu.uuid for gpu in snapshot.gpus)}")
    for gpu in snapshot.gpus:
        for environ in ({}, UNDER_RAY):
            variables = render_visible([gpu], visible_as="index", snapshot=snapshot, environ=environ)
            chosen = HIP.visible_in_child({**PLAIN, **variables})
            say(len(chosen) == 1 and HIP.is_same(chosen[0], gpu), f"with {variables} HIP shows {chosen}")
    child = Child()
    octets = child.do("octets")
    digits = [gpu.uuid.removeprefix("GPU-").encode().hex() for gpu in snapshot.gpus if gpu.uuid.startswith("GPU-")]
    say(not failed(octets) and set(digits) <= set(octets), f"hipDeviceGetUuid writes the 16 digits as text: {octets}")
    integrated = child.do("integrated")
    rule = [bool(gpu.unusable) for gpu in snapshot.gpus]
    # Where all GPUs are integrated they may be claimed.
    say(
        not failed(integrated) and (integrated == rule or all(integrated)),
        f"by safe_gpu's rule these are integrated graphics beside other GPUs: {rule}; HIP says {integrated}",
    )
    child.end()


def check_start(driver: KfdDriver) -> None:
    """What does a process open and hold that has loaded HIP, and one that has started it?"""
    child = Child()
    library = child.do("load")
    say(child.do("is_open") is False, f"loading {library} opens no /dev/kfd")
    child.do("start")
    say(child.do("is_open") is True, "HIP keeps /dev/kfd open from its first call on")
    shown = on(driver, child.pid)
    say(not shown, f"a process that has only started HIP is on {shown or 'no GPU'}")
    say(child.do("fork") != 0, "a child that is forked after HIP has started cannot use it")
    child.end()
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "libamdhip64.so")
        shutil.copyfile(str(library), path)
        for title, steps in (("started", ("load", "start")), ("loaded", ("load",))):
            child = Child()
            for step in steps:
                child.do(step)
            note(f"with one copy of HIP {title}, a second one [is another copy, GPUs of one, of the other]: "
                 f"{child.do('copy', path)}")  # fmt: skip
            child.end()


def check_processes(driver: KfdDriver, gpu: Gpu) -> None:
    """Where and when does the kernel show a process that holds memory, frees it and ends?"""
    only = render_visible([gpu], visible_as="uuid", snapshot=HostSnapshot((gpu,)))
    child = Child(**only)
    child.do("hold")
    took = waited(lambda: gpu.index in on(driver, child.pid))
    say(took is not None and took < 0.5, f"GPU {gpu.index}: memory shows after {took} s")
    others = on(driver, child.pid)
    bytes_held = others.pop(gpu.index, None)
    say(not others, f"GPU {gpu.index}: {bytes_held} bytes there, and on other GPUs {others or 'none'}")
    child.do("free")
    note(f"GPU {gpu.index}: after the memory is freed, the process is on {on(driver, child.pid) or 'no GPU'}")
    killed = Child(**only)
    killed.do("hold")
    for one, end in ((child, "end"), (killed, "SIGKILL")):
        one.end(kill=one is killed)
        took = waited(lambda pid=one.pid: not on(driver, pid))  # type: ignore[misc]
        say(took is not None and took < 1, f"GPU {gpu.index}: the process is gone {took} s after its {end}")


def waited(condition: Callable[[], bool]) -> float | None:
    """Seconds until a condition holds; None if it does not in time."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            return None
        time.sleep(0.01)
    return round(time.monotonic() - began, 3)


def main() -> int:
    try:
        driver = KfdDriver()
        snapshot = driver.snapshot()
        print(f"{snapshot.driver_version}, {len(snapshot.gpus)} GPUs, user {os.geteuid()}")
        check_idle(snapshot)
        check_names(snapshot)
        check_start(driver)
        for gpu in snapshot.gpus:
            if not gpu.unusable:
                check_processes(driver, gpu)
    except SafeGpuError as err:
        print(f"safe_gpu: {err}")
        return 100
    return min(differences, 99)


if __name__ == "__main__":
    sys.exit(main())
