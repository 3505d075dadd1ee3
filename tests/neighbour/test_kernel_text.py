"""Text of the kernel in which a neighbour has chosen names: it forges no line and no column, and ends no claim."""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.affinity.placement import placement
from safe_gpu.host import procfs

VICTIM, NEIGHBOUR, VIEWER = 4711, 4712, 4713

# Of a process: 15 bytes at most. The kernel escapes only line feeds and backslashes in them.
NAMES = {
    "a carriage return": b"\rUid:\t4711\t4711",
    "a thread group": b"\rTgid:\t1",
    "no number of a thread group": b"\rTgid:\t-9e9",
    "a form feed": b"\x0cNSpid:\t7\t8",
    "a next line": b"\xc2\x85Uid:\t0\t0",
    "not UTF-8": b"\xff\rUid:\t0\xfe\t0",
    "a line feed": b"\nUid:\t4711\nTgid:",
    "the end of a name": b") Z 1 1 (",
    "CPUs": b"\rCpus_allowed_l",
}


def name_this_process(name: bytes) -> None:
    Path("/proc/self/comm").write_bytes(name)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_of_a_process_says_nothing_else_of_it(as_user: Callable[..., Any], name: bytes) -> None:
    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        say("here")
        listen()
        name_this_process(name)
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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
def test_a_name_of_a_mount_is_one_column(open_tmp: Path, child: Callable[..., Any]) -> None:
    forged = f"99\u20031\u20030:9\u2003/systemd-private-0a-evil.service-x\u2003{open_tmp}\u2003rw"
    names = [
        f"a\r{forged}",
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
        (b"0::/his\r0::/other", "/his\r0::/other"),
        (b"0::/his\x0b0::/other", "/his\x0b0::/other"),
        (b"0::/\xff\xc2\x85", os.fsdecode(b"/\xff\xc2\x85")),
        (b"1:name=x\r0::/forged:/\n0::/his", "/his"),
        (b"0::/../../his", None),
        (b"0::/..", None),
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
            elif called.split(".")[-1] in ("Popen", "run", "check_output") and {
                "text",
                "universal_newlines",
                "encoding",
            } & {*given}:
                yield called


NO_KERNEL_TEXT = {name: ["read_text"] for name in ("status/page.py", "cli/completion.py")}  # files of this package


def test_nothing_else_splits_text_into_lines() -> None:
    root = Path(safe_gpu.__file__).parent
    found = {str(path.relative_to(root)): [*reads_of_lines(path.read_text())] for path in root.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == NO_KERNEL_TEXT


NOTICED = """
text.splitlines()
f(*map(str.splitlines, x))
open(path)
open(path, 'r', encoding='utf-8')
open(path, newline='')
os.fdopen(fd)
Path(x).read_text()
Popen(x, text=True)
run(x, encoding='utf-8')
"""


def test_such_a_reading_is_noticed() -> None:
    assert [len([*reads_of_lines(line)]) for line in NOTICED.split("\n")[1:-1]] == [1] * 9
    assert [*reads_of_lines("open(p, 'rb'); open(p, newline='\\n'); os.open(p, 0); here.open(p); t.split('\\n')")] == []
