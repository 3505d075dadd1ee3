"""A host: what is read of other programs and processes there, its GPUs, their vendors, and times reserved for some."""

import argparse
import ctypes
import fcntl
import math
import os
import re
import selectors
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.forks import in_child

PTRACE_SEIZE = 0x4206

# The first process of a PID namespace, when it ends, closes its files, ends the others there, and waits until all of
# them have been waited for. One that is traced from outside waits for its tracer.
NAMESPACE = """
import ctypes, fcntl, os, signal, sys
if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID
    say("cannot"), listen()
locked, lock = os.pipe()
first = os.fork()
if not first:
    file = open(PATH, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    if not os.fork():
        signal.pause()
    os.write(lock, b"!")
    signal.pause()
os.read(locked, 1)
say(first)
listen()
"""


IN_NEW_NAMESPACE = """
import ctypes, os
from safe_gpu.host.procfs import pid_namespace
own = pid_namespace()
if ctypes.CDLL(None).unshare(0x20000000):  # CLONE_NEWPID, of the children to come
    say("cannot"), listen()
out, into = os.pipe()
if not os.fork():
    os.write(into, str(pid_namespace()).encode())
    os._exit(0)
say(os.read(out, 99).decode()), say(own), say(pid_namespace())
"""


def test_a_forked_child_may_be_in_another_pid_namespace(child: Callable[..., Any]) -> None:
    started = child(IN_NEW_NAMESPACE)
    theirs = started.hear()
    if theirs == "cannot":
        pytest.skip("no PID namespaces for this user")
    before, after = started.hear(), started.hear()
    assert theirs.isdigit()
    assert before == after != theirs


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_an_emulator_hides_when_a_process_began(tmp_path: Path) -> None:
    """As qemu-user does by a file of its own in the place of /proc/self/stat."""
    (tmp_path / "stat").write_text(f"{os.getpid()} (python) R {' '.join(['0'] * 49)}\n")

    def emulated() -> tuple[int | None, int | None]:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x20000) == 0  # CLONE_NEWNS
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
        before = api.procfs.start_time(os.getpid())
        source, target = os.fsencode(tmp_path / "stat"), f"/proc/{os.getpid()}/stat".encode()
        assert libc.mount(source, target, None, 0x1000, None) == 0  # MS_BIND
        return before, api.procfs.start_time(os.getpid())

    before, now = in_child(emulated)
    assert now == before
    assert before


def test_the_process_of_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result()
        assert thread != os.getpid()
        assert api.procfs.thread_group(thread) == os.getpid()
    assert api.procfs.thread_group(os.getpid()) == os.getpid()
    assert api.procfs.thread_group(1 << 40) is None


def test_a_process_that_is_held_while_it_exits(tmp_path: Path, child: Callable[..., Any], eventually: Any) -> None:
    """Its locks are free, and it has not ended: nobody waits for it in vain, nobody takes it for a stranger."""

    def is_free() -> bool:
        with open(path) as file, suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB) is None
        return False

    path = tmp_path / "lock"
    started = child(NAMESPACE.replace("PATH", repr(str(path))))
    heard = started.hear()
    if heard == "cannot":
        pytest.skip("no PID namespaces for this user")
    first = int(heard)
    try:
        eventually(lambda: len(api.procfs.descendants(first)) == 1)
        (traced,) = api.procfs.descendants(first)
        ptrace = ctypes.CDLL(None).ptrace
        ptrace.argtypes = [ctypes.c_long] * 4
        if ptrace(PTRACE_SEIZE, traced, 0, 0):
            pytest.skip("no ptrace here")
        assert not api.procfs.is_exiting(first)
    finally:
        os.kill(first, signal.SIGKILL)
    try:
        eventually(is_free)
        assert api.procfs.is_exiting(first)
        assert not api.procfs.has_ended(first)
    finally:
        os.waitid(os.P_PID, traced, os.WEXITED)
    eventually(lambda: api.procfs.has_ended(first))
    assert api.procfs.is_exiting(first), "a zombie"


def test_a_process_exits_when_its_last_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is a zombie already, and the other may still free memory of a GPU, or live on."""
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    for flags, exits in ((4, True), (0x400044, True), (0x400040, False)):

        def stat(path: str, limit: int = 0, flags: int = flags) -> bytes:
            state, flag = ("Z", 4) if path.endswith(f"/proc/{os.getpid()}/stat") else ("D", flags)
            return f"1 (a b) {state}{' 0' * 5} {flag}{' 0' * 10} 2".encode()

        with monkeypatch.context() as patch:
            patch.setattr(api.procfs, "read_start", stat)
            assert (api.procfs.is_exiting(os.getpid()), api.procfs.has_ended(os.getpid())) == (exits, False)
    stop.set()
    other.join()


@pytest.mark.parametrize(
    ("offset", "seconds"),
    [
        (b"monotonic 0 0\nboottime 7 500000000\n", 7.5),
        (b"boottime -5 0\n", -5),
        (b"boottime 7 x\n", 0),
        (b"boottime x 0\n", 0),
        (b"boottime 7\n", 0),
        (None, 0),
    ],
)
def test_a_start_in_another_time_namespace(offset: bytes | None, seconds: float, monkeypatch: Any) -> None:
    """A line that makes no sense counts as none."""
    offsets = {"/proc/self/timens_offsets": offset}
    monkeypatch.setattr(api.procfs, "read_start", lambda path, limit: offsets.get(path))
    recorded = 100_000
    shown = recorded + int(seconds * os.sysconf("SC_CLK_TCK"))
    assert api.procfs.is_start(recorded, 7, shown)
    assert not api.procfs.is_start(recorded, 7, shown + 10)


@pytest.mark.parametrize(("told", "unknown"), [(b"65533\n", 65533), (None, 65534)])
def test_who_stands_for_all_whom_a_user_namespace_does_not_know(told: bytes | None, unknown: int, monkeypatch) -> None:
    files = {"/proc/self/uid_map": b"0 1000 1\n", "/proc/sys/kernel/overflowuid": told}
    monkeypatch.setattr(api.procfs, "read_start", lambda path, limit: files.get(path))
    is_unknown = api.procfs.is_unknown_user.__wrapped__  # without its cache
    assert [uid for uid in (0, 1000, 65533, 65534) if is_unknown(uid)] == [unknown]


def test_a_program_is_not_waited_for_beyond_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    select, waited = selectors.DefaultSelector.select, []

    def noted(selector: selectors.DefaultSelector, timeout: float) -> Any:
        waited.append(timeout)
        return select(selector, timeout)

    monkeypatch.setattr(selectors.DefaultSelector, "select", noted)
    with pytest.raises(api.programs.TooLate):
        api.programs.output_of(["/bin/sleep", "60"], env={}, timeout=0.02, most=9)
    assert waited
    assert max(waited) <= 0.02


UNIFIED = "/sys/fs/cgroup"
OLDER = "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (
            {"/proc/self/cgroup": "0::/a/b", f"{UNIFIED}/a/b/memory.max": "max", f"{UNIFIED}/a/b/memory.current": "5"},
            None,
        ),
        ({"/proc/self/cgroup": "0::/a/b", f"{UNIFIED}/a/memory.max": "90", f"{UNIFIED}/a/memory.current": "30"}, 60),
        ({"/proc/self/cgroup": "0::/", f"{UNIFIED}/memory.max": "90", f"{UNIFIED}/memory.current": "99"}, 0),
        (
            {
                "/proc/self/cgroup": "3:cpu,memory:/job\n0::/",
                f"{OLDER}/memory.limit_in_bytes": "1000",
                f"{OLDER}/memory.usage_in_bytes": "0",
                f"{OLDER}/job/memory.limit_in_bytes": "100",
                f"{OLDER}/job/memory.usage_in_bytes": "80",
                f"{OLDER}/job/memory.stat": "cache 9\ninactive_file 20\nactive_file 30\n",
            },
            70,
        ),
    ],
)
def test_the_memory_that_a_cgroup_leaves(files: dict[str, str], left: int | None, monkeypatch: Any) -> None:
    """Of all cgroups above; the page cache is given back."""
    monkeypatch.setattr(api.procfs, "read_start", lambda path, limit=0: files.get(path, "").encode())
    assert api.procfs.memory_left_in_cgroup() == left


def test_the_start_of_a_file(tmp_path: Path) -> None:
    path, fifo = str(tmp_path / "file"), str(tmp_path / "fifo")
    data = b"0123456789" * 20_000
    Path(path).write_bytes(data)
    assert api.read_bytes(path) == data[: 1 << 16]
    assert [api.read_start(path, limit) for limit in (0, 3, 100_000)] == [b"", b"012", data[:100_000]]
    assert len(api.read_bytes("/dev/zero", 200_000)) == 200_000
    os.mkfifo(fifo)
    assert api.read_start(fifo) == b"", "it does not block"
    writer = os.open(fifo, os.O_RDWR)
    assert api.read_start(fifo) == b"", "nor with a writer that writes nothing"
    os.write(writer, b"some")
    assert api.read_start(fifo, 2) == b"so"
    os.close(writer)


def test_what_cannot_be_read_leaves_no_descriptor(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for path in (str(tmp_path / "missing"), str(tmp_path), "with\0NUL", "/proc/self/mem"):
        assert api.read_start(path) is None
        with pytest.raises((OSError, ValueError)):
            api.read_bytes(path)
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        api.open_to_read(str(tmp_path / "link"), os.O_NOFOLLOW)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_lease_does_not_block(tmp_path: Path) -> None:
    """The kernel would wait for the holder of the lease, for 45 seconds."""
    path = tmp_path / "file"
    kept = signal.signal(signal.SIGIO, signal.SIG_IGN)
    with open(path, "wb") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError):
            api.read_bytes(str(path))
    signal.signal(signal.SIGIO, kept)


INTERRUPTED = """
import os, signal
from safe_gpu.host.foreign_files import read_start
raised = 0
class Interrupt(BaseException): pass
def handler(*_):
    global raised
    raised += 1
    raise Interrupt
signal.signal(signal.SIGALRM, handler)
before = len(os.listdir("/proc/self/fd"))
while raised < 300:
    try:
        signal.setitimer(signal.ITIMER_REAL, 20e-6 + raised % 50 * 1e-6)
        while True:
            read_start(PATH)
    except Interrupt:
        pass
say(len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.parametrize("path", ["/proc/self/stat", "/dev/null"])
def test_an_interrupt_leaves_no_descriptor(child: Callable[..., Any], path: str) -> None:
    """An exception of a signal handler may come after any call, and here it comes after each at some time."""
    assert child(INTERRUPTED.replace("PATH", repr(path))).hear() == "0"


@pytest.mark.parametrize(
    ("call", "ask"),
    [
        ("pwd.getpwuid", lambda: api.procfs.user_name(987_654)),
        ("pwd.getpwnam", lambda: api.config.uid_of("nobody-has-this-name")),
        ("grp.getgrnam", lambda: api.config.gid_of("no-group-has-this-name")),
    ],
)
def test_an_interrupt_in_the_midst_of_a_user_database_is_not_lost(
    call: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.11 these functions replace the exception of a handler where there is no such user."""

    def look_up(key: object) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise KeyError(key)

    monkeypatch.setattr(call, look_up)
    with pytest.raises(KeyboardInterrupt):
        ask()


def test_names_of_program_and_script() -> None:
    for line, shown in (
        ("./train --password 1234", "train"),
        ("python train.py --password 1234", "python train.py"),
        ("/home/anna/v/bin/python3.11 -u -W ignore -Xdev /home/anna/train.py 1234", "python3.11 train.py"),
        ("python3.14t train.py 1234", "python3.14t train.py"),
        ("python3.15d -m train 1234", "python3.15d -m train"),
        ("python -Im train 1234", "python -m train"),
        ("bash -o pipefail -c 1234", "bash"),
        ("env PASSWORD=1234 python train.py", "env"),
    ):
        assert api.program_names(line.split()) == shown


def test_the_whole_command_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    line, own = ["sh", "-c", "echo 1234", "x" * 300], api.own_command()
    assert "tests/" not in own
    assert api.command_for_record(line) == "sh"
    monkeypatch.setenv("SAFE_GPU_RECORD_COMMAND", "full")
    assert api.command_for_record(line) == ("sh -c echo 1234 " + "x" * 300)[:200]
    words = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert api.own_command() == os.fsdecode(b" ".join(words))[:200]


# Times in which GPUs are reserved

HOUR = 3600.0
NINE = time.mktime((2026, 11, 26, 9, 0, 0, 0, 0, -1))
COURSE = api.Window(NINE, NINE + 3 * HOUR, ("GPU-0", "GPU-1"), "group:course", "practical course", "root")


def test_when_a_request_may_begin() -> None:
    for start, hold_for, spans, expected in (
        (0, 10, ((10, 20),), 0),  # it ends as the other begins
        (0, 11, ((10, 20),), 20),
        (0, 5, ((3, 20), (22, 30)), 30),  # too little time between two
        (0, 5, ((3, 20), (4, 9)), 20),  # one within another
        (0, math.inf, ((api.UNSAID, api.UNSAID + 1),), 0),  # it does not say how long, a day before
        (0, None, ((api.UNSAID - 1, api.UNSAID),), api.UNSAID),
    ):
        assert api.first_open(start, hold_for, spans) == expected


def test_what_binds_a_claim() -> None:
    for now, hold_for, closed in (
        (NINE - HOUR, HOUR, False),
        (NINE - HOUR, HOUR + 1, True),
        (NINE - api.UNSAID, None, False),
        (NINE, 1, True),
        (NINE + 3 * HOUR, None, False),
        (0.0, None, False),  # the clock fell back to 1970
    ):
        found = api.why_reserved([COURSE], now, hold_for)
        assert sorted(found) == (["GPU-0", "GPU-1"] if closed else [])
        for why in found.values():
            assert why.startswith("reserved by root for group course from Thu 2026-11-26 09:00 to 12:00: practical")


def test_instances_and_order() -> None:
    earlier = api.Window(1, 2, ("GPU-1",))
    gpus = [api.Gpu(0, "GPU-0"), api.Gpu(0, "MIG-0", mig_parent="GPU-0"), api.Gpu(1, "GPU-1"), api.Gpu(2, "GPU-2")]
    course = (COURSE.begin, COURSE.end)
    assert api.spans_of([COURSE, earlier], gpus) == {"GPU-0": (course,), "MIG-0": (course,), "GPU-1": ((1, 2), course)}


def test_lines_are_read_as_they_were_written() -> None:
    first, two_days = COURSE._replace(begin=1), COURSE._replace(end=NINE + 30 * HOUR)
    for window in (COURSE._replace(whom="", reason=""), COURSE._replace(whom="user:anna"), two_days):
        lines = [api.drain_line("GPU-1", "a fan"), api.drain_line("GPU-2", ""), "", *first.lines, *window.lines]
        assert api.parse_closed(lines, "root") == ({"GPU-1": "a fan", "GPU-2": ""}, (first, window), [])


def test_a_line_that_says_nothing_closes_nothing_and_others_count() -> None:
    for line in (
        "GPU-0", "GPU-0 a fan", " - - - a fan", "GPU-0 - 2 -", "GPU-0 1 -", "GPU-0 1 2", "GPU-0 x 2 -", "GPU-0 2 1 -",
        "GPU-0 -5 1 -", "GPU-0 nan 2 -", "GPU-0 1 inf -", "GPU-0 1 1e300 -", "GPU-0 1 2 anna", "GPU-0 1 2 user:",
    ):  # fmt: skip
        lines = [api.drain_line("GPU-1", "a fan"), line, *COURSE.lines]
        assert api.parse_closed(lines, "root") == ({"GPU-1": "a fan"}, (COURSE,), [line])


# A GPU that the driver cannot reach

NEVER_CHANGES = {
    *("index", "uuid", "name", "pci_bus_id", "numa_node", "vendor", "tiles"),
    *("mig_parent", "mig_instance", "place", "partition", "mode"),
}
POLLED = {
    *("memory_total", "memory_used", "memory_free", "counts_reserved", "memory_shared", "memory_beside"),
    *("utilization", "temperature", "fan", "power", "power_limit", "nvlink_peers", "illness"),
    *("compute_mode", "display_active", "mig_enabled", "divided"),
    *("processes", "process_error", "processes_supported", "processes_private", "unusable", "lost"),
}


def test_a_gpu_out_of_reach_keeps_what_never_changes() -> None:
    """A field that is added to it belongs to one of the two."""
    assert set(api.Gpu._fields) == NEVER_CHANGES | POLLED, "write each field into one of the two sets of this file"
    known = api.Gpu(**{field: object() for field in api.Gpu._fields})
    gone = known.unreachable("gone")
    assert [field for field in NEVER_CHANGES if getattr(gone, field) is not getattr(known, field)] == []
    told = {"processes": None, "process_error": "gone", "unusable": "gone", "lost": True}
    expected = api.Gpu(0, "")._replace(**told)
    assert [field for field in POLLED if getattr(gone, field) != getattr(expected, field)] == []


# The table of vendors

PAGE = Path(__file__).parents[1] / "safe_gpu" / "README.md"


@pytest.mark.parametrize("key", api.VENDORS)
def test_a_row_is_whole(key: str) -> None:
    vendor = api.VENDORS[key]
    assert api.find_preset(vendor.preset).vendors == (key,)
    uuids = [device.uuid for name in api.PRESETS for device in api.find_preset(name).devices if device.vendor == key]
    for uuid in [*uuids, *([f"{vendor.by_place}0000:05:00.0"] if vendor.by_place else [])]:
        assert [api.vendor_of(uuid), api.vendor_of_name(uuid)] == [key, key]
        assert api.parse_request(only=uuid).driver["prefer"] == key
    assert vendor.library in {runtime.title for runtime in (api.CUDA, api.HIP, api.IntelDriver)}
    assert all(
        name.startswith(tuple(p for one in api.VENDORS.values() for p in one.prefixes)) for name in vendor.variables
    )
    assert set(vendor.variables) <= set(api.hide_all())
    parser = argparse.ArgumentParser()
    api.add_vendor(parser, "")
    assert parser.parse_args(["--vendor", key.upper()]).vendor == key


def test_the_page_names_every_driver_and_simulated_host() -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| `SAFE_GPU_DRIVER` |"))
    drivers, hosts = row.split("`simulated:`")
    assert re.findall(r"`([^`]*)`", hosts) == list(api.PRESETS)
    named = re.findall(r"`([^`]*)`", drivers.split("|")[2])
    assert named == ["auto", *(name for one in api.VENDORS.values() for name in one.drivers)]
    assert all(f"({one.title})" in drivers for key, one in api.VENDORS.items() if key != api.FIRST)
