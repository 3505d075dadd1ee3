"""Text in which a neighbour has chosen names. That of the kernel forges no line and no column, and ends no claim. What
is shown is plain text of bounded length, and stands in no advice, which root may follow."""

import ast
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import TRICK, assert_plain, assert_shown_safely

import safe_gpu
from safe_gpu.affinity.placement import placement
from safe_gpu.coordination.directory import PARTS, Directory
from safe_gpu.doctor import CheckedHost, run_checks
from safe_gpu.doctor.state import directory
from safe_gpu.host import procfs
from safe_gpu.status.facts import HostStatus, WaiterStatus
from safe_gpu.status.metrics import render_metrics

NEIGHBOUR = 4711

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to give files away")

# Of a process: 15 bytes at most. The kernel escapes only line feeds and backslashes in them.
NAMES = {
    "a carriage return": b"\rUid:\t4711\t4711",
    "a thread group": b"\rTgid:\t1",
    "a form feed": b"\x0cNSpid:\t7\t8",
    "a next line": b"\xc2\x85Uid:\t0\t0",
    "not UTF-8": b"\xff\rUid:\t0\xfe\t0",
    "a line feed": b"\nUid:\t4711\nTgid:",
    "the end of a name": b") Z 1 1 (",
    "CPUs": b"\rCpus_allowed_l",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_of_a_process_says_nothing_else_of_it(as_user: Callable[..., Any], name: bytes) -> None:
    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        say("here")
        listen()
        Path("/proc/self/comm").write_bytes(name)
        say("named")
        listen()

    def said() -> tuple[object, ...]:
        (thread,) = placement(pid).processes[0].threads
        facts = (procfs.real_uid_of, procfs.family_of, procfs.thread_group, procfs.parent_of, procfs.start_time)
        states = (procfs.is_stopped, procfs.is_running, procfs.has_ended, procfs.is_exiting)
        return *(ask(pid) for ask in facts), *(ask(pid) for ask in states), thread.cpus_allowed, thread.mems_allowed

    process = as_user(work, uid=NEIGHBOUR)
    pid = process.pid
    assert process.hear() == "here"
    before = said()
    assert before[:4] == (NEIGHBOUR, (NEIGHBOUR, (pid, *procfs.ancestors(pid))), pid, os.getpid())
    process.tell()
    assert process.hear() == "named"
    assert (procfs._read(f"/proc/{pid}/comm").rstrip(b"\n"), said()) == (name[:15], before)
    assert pid in procfs.descendants(os.getpid())
    assert placement(pid).processes[0].threads[0].name.isprintable()


# Makes mounts of a neighbour's, as fusermount(1) does: for each, what the package says of a directory below it.
MOUNTS = r"""
import ctypes, json, mmap, os, sys
from safe_gpu.affinity.placement import placement
from safe_gpu.host.procfs import file_system_of
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):  # CLONE_NEWNS, MS_REC | MS_PRIVATE
    print("cannot", flush=True), os._exit(0)
place, told = os.fsencode(sys.argv[1]), os.path.join(sys.argv[1], "told")
os.mkdir(told)
before = file_system_of(os.open(told, os.O_PATH))
for name in sys.argv[2:]:
    point = os.path.join(place, os.fsencode(name))
    os.makedirs(point)
    if libc.mount(os.fsencode(name), point, b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), name)
    os.mkdir(os.path.join(point, b"below"))
    seen = file_system_of(os.open(os.path.join(point, b"below"), os.O_PATH))
    file = os.path.join(point, b" bind:7 N7=7 kernelpagesize_kB=4\r7f00 bind:7 anon=7 N7=7777777 kernelpagesize_kB=4")
    with open(file, "wb+") as opened:
        opened.truncate(4096)
        pages = mmap.mmap(opened.fileno(), 4096)
        pages[0] = 1
    process = placement().processes[0]
    print(json.dumps([seen.kind, len(seen.point) > len(place), 7 in (process.memory or {}),
                      file_system_of(os.open(told, os.O_PATH)) == before]))
"""


@needs_root
def test_a_name_of_a_mount_is_one_column(open_tmp: Path, child: Callable[..., Any]) -> None:
    forged = f"99\u20031\u20030:9\u2003/systemd-private-0a-evil.service-x\u2003{open_tmp}\u2003rw"
    names = [
        f"c\x1c{forged}",
        f"d\x85{forged}",
        f"e\n{forged}",
        "f\r99\r1\r0:9\r/\r/\rrw",
        "g - ext4 /dev/sda rw",
        "h\t\\040 - ",
        os.fsdecode(b"\xff\r\xfe"),
    ]
    prelude = f"import sys; sys.argv[1:] = {[str(open_tmp), *names]!r}\n"
    said = child(prelude + MOUNTS).finish()
    if said == "cannot\n":
        pytest.skip("nothing can be mounted here")
    found = {name: json.loads(line) for name, line in zip(names, said.split("\n"), strict=False)}
    assert found == {name: ["tmpfs", True, False, True] for name in names}


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (b"0::/his\x0b0::/other", "/his\x0b0::/other"),
        (b"0::/\xff\xc2\x85", os.fsdecode(b"/\xff\xc2\x85")),
        (b"1:name=x\r0::/forged:/\n0::/his", "/his"),
        (b"0::/../../his", None),
    ],
)
def test_a_name_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, line: bytes, asked: str | None) -> None:
    files = {"/proc/7/cgroup": line + b"\n", f"/sys/fs/cgroup{asked}/cgroup.events": b"populated 1\nfrozen 1\n"}
    read: list[str] = []
    monkeypatch.setattr(procfs, "read_start", lambda path, limit: read.append(path) or files.get(path))
    assert procfs.is_stopped(7) == (asked is not None)
    assert [path for path in read if path.startswith("/sys")] == (
        [f"/sys/fs/cgroup{asked}/cgroup.events"] * bool(asked)
    )


def reads_of_lines(source: str) -> Iterator[str]:
    """What splits text at more than line feeds: ``splitlines``, and files and pipes read as text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("splitlines", "read_text", "TextIOWrapper"):
            yield node.attr
        elif isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {one.arg: ast.unparse(one.value) for one in node.keywords}
            if called in ("open", "io.open", "os.fdopen"):
                mode = given.get("mode") or "".join(map(ast.unparse, node.args[1:2])) or "r"
                if not re.search("[bwax]", mode) and given.get("newline") != r"'\n'":
                    yield called
            elif called.split(".")[-1] in ("Popen", "run", "check_output"):
                yield from {"text", "universal_newlines", "encoding"} & {*given}


NO_KERNEL_TEXT = {name: ["read_text"] for name in ("status/page.py", "cli/completion.py")}  # files of this package


def test_nothing_else_splits_text_into_lines() -> None:
    root = Path(safe_gpu.__file__).parent
    found = {str(path.relative_to(root)): [*reads_of_lines(path.read_text())] for path in root.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == NO_KERNEL_TEXT


NOTICED = """
text.splitlines()
f(*map(str.splitlines, x))
open(path, 'r', encoding='utf-8')
open(path, newline='')
os.fdopen(fd)
Path(x).read_text()
Popen(x, text=True)
run(x, encoding='utf-8')
"""


def test_such_a_reading_is_noticed() -> None:
    assert [len([*reads_of_lines(line)]) for line in NOTICED.split("\n")[1:-1]] == [1] * 8
    assert [*reads_of_lines("open(p, 'rb'); open(p, newline='\\n'); os.open(p, 0); here.open(p); t.split('\\n')")] == []


# What is shown


LATE = 75
CLAIM = "run -n 8 --timeout 0.2 -- true"


def test_tricks_of_text(state_dir: Path, ground: Any, child: Any, entry_of: Any, command: Any) -> None:
    """In the arguments of a holder, in entries and their names, in a ticket and in a note."""
    run = f"os.execlp('sh', {TRICK!r}, '-c', 'echo held; read x', {TRICK!r}, {TRICK * 200!r})"
    holder = child(f"import os\n{run}", says="held")
    texts = {"user": TRICK, "host": TRICK, "job": TRICK, "command": TRICK * 200, TRICK: TRICK}
    here = {"start": procfs.start_time(holder.pid), "pidns": procfs.pid_namespace(), "since": time.time() - 9}
    ground.hold(0, pid=holder.pid, **texts)
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[1]: None}, "pid": holder.pid, **here, **texts})
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[2]: 5, TRICK: None}, "parts": {TRICK: 0}, "pid": 1, "pidns": 7, **texts})
    entry_of(NEIGHBOUR, {"gpus": ground.uuids, "nb_gpus": 1, "near": TRICK, TRICK: TRICK, **texts}, part="queue")
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[3]: TRICK}, **texts})
    dead = {"gpus": {ground.uuids[4]: None}, "pid": 1, "v": 1, "since": time.time() - 9, **texts}
    (state_dir / "claims" / f"9.{'9' * 16}").write_text(json.dumps(dead))
    for part in ("claims", "queue"):
        (state_dir / part / TRICK.replace("/", "")).write_text(TRICK)
    (state_dir / "faults").mkdir()
    note = {"when": time.time(), "error": TRICK}
    (state_dir / "faults" / f"{ground.uuids[5]}.{os.geteuid()}").write_text(json.dumps(note))
    for arguments in ("status", "status --json", "history", "doctor", CLAIM, "wait -n 8 --timeout 0.2"):
        done = command.run(*arguments.split())
        text = done.stdout + done.stderr
        assert "evil" in text or "status" not in arguments
        assert_shown_safely(text)
        if arguments == CLAIM:
            assert (done.returncode, str(holder.pid) in done.stderr) == (LATE, True), "a refusal names the holders"
        if "--json" in arguments:
            assert_plain(json.loads(done.stdout))


def test_metrics_of_a_thousand_users_who_wait() -> None:
    """A neighbour with a range of user ids (subuid(5)) can wait as each of them."""
    users = ["ada"] * 5 + ["other"] * 3 + [f"u{number}" for number in range(1000)]
    queue = tuple(WaiterStatus(place, 1, user, 1, 1.0) for place, user in enumerate(users, 1))
    text = render_metrics(HostStatus("h", "nvml", "", "/s", 2.0, (), queue))
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith("safe_gpu_waiting{")]
    numbers = {labels: float(value) for labels, _, value in samples}
    assert (len(samples), sum(numbers.values())) == (100, len(users))
    assert numbers['safe_gpu_waiting{user="ada"}'] == 5
    assert numbers['safe_gpu_waiting{user="other"}'] == len(users) - 5 - 98


# What doctor advises is pasted by root: no name that a neighbour chose stands in it, and none that it can replace


@pytest.fixture
def used(state_dir: Path) -> Path:
    for part in PARTS:
        Directory(str(state_dir), part).close()
    return state_dir


@pytest.mark.parametrize("name", ["a\n; touch pwned\n", "\x1b[2J$(touch pwned)", "-rf "])
def test_names_of_others_stand_in_no_advice(used: Path, name: str) -> None:
    for part in PARTS:
        (used / part / name).symlink_to("/etc/passwd")
    for check in run_checks():
        assert "touch" not in check.fix + check.detail
        assert "-rf " not in check.fix


@needs_root
def test_the_path_of_the_state_directory_is_quoted(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_tmp / "a b; touch pwned"
    Directory(str(path), "claims").close()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    command = directory(CheckedHost()).fix.partition(": ")[2]
    assert shlex.split(command) == ["safe-gpu", "setup", "--state-dir", str(path)]


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o1777])
@pytest.mark.parametrize("broken", ["host.lock", *PARTS, "."])
def test_root_is_not_told_to_change_what_others_can_replace(used: Path, broken: str, mode: int) -> None:
    """The owner puts a symbolic link in its place before the advice is followed."""
    path = used / broken
    path.touch()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    path.chmod(mode)
    assert not {"chmod", "chown", "mv", "rm"} & {*directory(CheckedHost()).fix.split()}
