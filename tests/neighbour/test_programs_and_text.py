"""What a neighbour chooses. Root with a user's environment runs no program of his, and is told what to do instead. Text
of the kernel in which there are names of his forges no line and no column, and ends no claim. What is shown is plain
text of bounded length, and stands in no advice, which root may follow."""

import ast
import json
import os
import re
import selectors
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.hostile import TRICK, assert_plain, assert_shown_safely

import safe_gpu

NEIGHBOUR = 4711

needs_root = pytest.mark.skipif(not api.programs.is_root(), reason="needs root, to be the victim, and to mount")

CODE = """
import os
from safe_gpu import SafeGpuError, wrap_command
from safe_gpu.cli.hosts import run_ssh, ssh_to
from safe_gpu.drivers import open_driver
from safe_gpu.schedulers.gpu_count import number_for_job
try:
    print({})
except (SafeGpuError, OSError) as err:
    print(err)
"""
STATUS = CODE.format("open_driver().snapshot()")
NUMBER = CODE.format("number_for_job(os.environ)")
WRAP = CODE.format("wrap_command(['train'], gpu=0, mode=None, memory='preferred', check=True)")
JOB = {"SGE_TASK_ID": "undefined", "JOB_ID": "1234", "SGE_ROOT": "", "SGE_ARCH": "", "SGE_BINARY_PATH": ""}


def write(program: Path, script: str) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@needs_root
@pytest.mark.parametrize(
    ("name", "code", "variable", "environment"),
    [
        ("nvidia-smi", STATUS, "PATH", {"SAFE_GPU_DRIVER": "nvidia-smi"}),
        ("qstat", NUMBER, "PATH", JOB),
        ("bin/qstat", NUMBER, "SGE_ROOT", JOB),
        ("numactl", WRAP, "PATH", {}),
        ("true", WRAP, "PATH", {}),
        ("timeout", CODE.format("run_ssh(['/bin/true']).err"), "PATH", {}),
        ("ssh", CODE.format("run_ssh(ssh_to('gpu1', 'true')).err"), "PATH", {}),
        ("qstat", NUMBER, "SGE_BINARY_PATH", JOB),
    ],
)
def test_root_runs_no_program_of_a_neighbour(
    open_tmp: Path, state_dir: Path, child: Any, name: str, code: str, variable: str, environment: dict[str, str]
) -> None:
    place, mark = open_tmp / "his", open_tmp / "mark"
    program = place / name
    write(program, f": > {mark}")
    os.chown(place, NEIGHBOUR, NEIGHBOUR)
    write(open_tmp / "roots" / "numactl" if name == "true" else open_tmp / "roots" / "other", 'shift; exec "$@"')
    environment = {"SAFE_GPU_DRIVER": "simulated:dgx-a100", **environment, "PATH": str(open_tmp / "roots")}
    environment[variable] = f"{place}:{environment['PATH']}" if variable == "PATH" else str(place)
    said = child(code, env=environment).finish()
    assert not mark.exists()
    assert (
        f"{program} is not run as root, because other users can change {place}: put a {program.name} that only root "
        "can change on PATH"
    ) in said


@needs_root
@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("chown 4711 bin", "bin"),
        ("chown 4711 bin/nvidia-smi", "bin/nvidia-smi"),
        ("chmod 757 bin", "bin"),
        ("chmod 775 bin", "bin"),  # root's group
        ("setfacl -m u:4711:rwx bin", "bin"),
        ("mv bin roots; ln -s roots bin; chown -h 4711 bin", "bin"),  # his link, to a place of root's until root looks
        ("mv bin roots; ln -s roots his; chown -h 4711 his; ln -s his bin", "his"),
    ],
)
def test_a_place_that_others_can_change(open_tmp: Path, how: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_tmp / "bin"
    write(place / "nvidia-smi", "")
    write(open_tmp / "sure" / "nvidia-smi", "")
    environment = {"PATH": str(place)}
    assert api.programs.find_program("nvidia-smi", environment) == str(place / "nvidia-smi")
    if subprocess.run(how, shell=True, cwd=open_tmp).returncode:
        assert "setfacl" in how
        pytest.skip("needs setfacl, of the package acl, and a file system with ACLs")
    assert api.programs.others_can_change(str(place / "nvidia-smi")) == str(open_tmp / part)
    with pytest.raises(PermissionError, match=f"can change {'it' if '/' in part else open_tmp / part}: "):
        api.programs.find_program("nvidia-smi", environment)
    sure = str(open_tmp / "sure")
    assert api.programs.find_program("nvidia-smi", {"PATH": f"{place}:{sure}"}) == f"{sure}/nvidia-smi"
    assert api.programs.find_program("nvidia-smi", environment, sure) == f"{sure}/nvidia-smi"
    monkeypatch.setattr(api.programs, "is_root", lambda: False)
    assert api.programs.find_program("nvidia-smi", environment) == str(place / "nvidia-smi")


@needs_root
@pytest.mark.parametrize(("mode", "sure"), [(0o755, True), (0o777, False), (0o1777, True), (0o1775, True)])
def test_a_sticky_directory_keeps_what_is_roots(open_tmp: Path, mode: int, sure: bool) -> None:
    (open_tmp / "x").mkdir()
    (open_tmp / "x").chmod(mode)
    (open_tmp / "link").symlink_to(open_tmp / "x")
    for name in ("x", "link", "x/../link"):
        assert api.programs.others_can_change(str(open_tmp / name)) == (None if sure else str(open_tmp / "x"))
        within = None if mode == 0o755 else str(open_tmp / "x")
        assert api.programs.others_can_change(str(open_tmp / name), within=True) == within, (
            "others may make files there"
        )


@needs_root
@pytest.mark.parametrize(
    "path", ["bin", "", ".", "/proc/self/root/bin", "{tmp}/later", "{tmp}/later/../x", "{tmp}/loop"]
)
def test_paths_that_may_become_others(open_tmp: Path, path: str) -> None:
    """By another current directory, in another mount namespace, or since anybody can make what is not there yet."""
    (open_tmp / "loop").symlink_to("loop")
    assert api.programs.others_can_change(path.format(tmp=open_tmp)) is not None
    assert api.programs.others_can_change("/usr/no such directory/bin") is None


@needs_root
def test_what_a_program_gets_of_the_environment(open_tmp: Path) -> None:
    """A program of root's loads libraries, and a script runs other programs, by variables."""
    his = open_tmp / "his"
    his.mkdir()
    (open_tmp / "roots").mkdir()
    os.chown(his, NEIGHBOUR, NEIGHBOUR)
    environment = {
        "PATH": f"{his}:/usr/bin:.:{open_tmp}:/bin",
        "LD_LIBRARY_PATH": f"$ORIGIN/{his}:/usr/lib;{his}::{open_tmp}",
        "LD_AUDIT": f"{his}/audit.so",
        "GLIBC_TUNABLES": "glibc.malloc.check=3",
        "SLURM_CONF_SERVER": "his.example.org",
        "LC_CTYPE": f"../../..{his}",
    }
    kept = {"JOB_ID": "4711", "SGE_CELL": "default", "SGE_QMASTER_PORT": "6444", "LC_ALL": "C"}
    kept |= {"HOME": "/root", "SGE_ROOT": "/opt/no such", "SLURM_CONF": "/etc/slurm.conf", "TZ": "Europe/Prague"}
    his_paths = {"HOME": str(his), "SGE_ROOT": str(his), "SLURM_CONF": f"{his}/conf", "TZ": f"../../..{his}/zone"}
    sure = {f"{name}={value}" for name, value in kept.items()}
    for asked, got in (
        ({**environment, **kept}, {"PATH=/usr/bin:/bin", "LD_LIBRARY_PATH=/usr/lib", *sure}),
        ({"LD_LIBRARY_PATH": str(his), "PATH": str(his), **his_paths}, set()),
        ({"HOME": ".", "SGE_ROOT": "sge", "TZ": f":{his}/zone"}, set()),
        ({"SGE_CELL": "..", "SGE_ROOT": f"{open_tmp}/roots", "SLURM_CONF": f"{open_tmp}/roots"}, {"SGE_CELL=.."}),
    ):
        code, text, _ = api.programs.output_of(["/usr/bin/env"], env=asked, timeout=60, most=1 << 16)
        assert (code, set(text.splitlines())) == (0, got)


@needs_root
@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("exec yes", 255, "it prints without end"),
        ("sleep 600 & exec sleep 600", 124, "did not answer within 0.5 s"),
        ("sleep 600 >/dev/null & echo {}; exit 3", 3, "ends with exit code 3"),
    ],
)
def test_an_answer_of_another_host_is_bounded(
    open_tmp: Path, script: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """Of bytes and of time, whatever runs there; what is left behind is not waited for, and nothing can be asked."""
    write(open_tmp / "ssh", f"echo $$ > {open_tmp}/pid; {script}")
    monkeypatch.setattr(api.hosts, "SECONDS", 0.5 if code == 124 else 60.0)
    said = api.hosts.run_ssh([str(open_tmp / "ssh")])
    assert (said.code, told in api.hosts.read_answer(said).error) == (code, True)
    assert len(said.out) + len(said.err) < 1 << 10
    group = int((open_tmp / "pid").read_text())
    eventually(lambda: subprocess.run(f"kill -0 -{group}", shell=True, stderr=subprocess.DEVNULL).returncode)


SECRET = "hunter2"


@needs_root
@pytest.mark.parametrize("text", [SECRET, f"[host]\n{SECRET} = 1", f"[host]\nhosts = -{SECRET}"])
@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("how", ["link", "link above", "hard link"])
def test_root_shows_no_line_of_a_file_that_a_neighbour_chose(open_tmp: Path, how: str, mode: int, text: str) -> None:
    """sudo may keep HOME."""
    secret, file = open_tmp / "roots" / "config.ini", open_tmp / "his" / ".config" / "safe-gpu" / "config.ini"
    secret.parent.mkdir(mode=0o700)
    secret.write_text(text)
    secret.chmod(mode)
    if how == "link above":
        file.parents[1].mkdir(parents=True)
        file.parent.symlink_to(secret.parent)
    else:
        file.parent.mkdir(parents=True)
        {"link": os.symlink, "hard link": os.link}[how](secret, file)
    for path in file.parents[:3]:
        os.chown(path, NEIGHBOUR, NEIGHBOUR, follow_symlinks=False)
    with pytest.raises(api.PolicyError) as refused:
        api.known_hosts({"HOME": str(open_tmp / "his"), "SAFE_GPU_DRIVER": "simulated:laptop"})
    assert SECRET not in f"{refused.value} {refused.value.__cause__}"
    assert str(file) in str(refused.value)


@needs_root
def test_root_shows_no_line_of_a_file_that_a_variable_names(open_tmp: Path) -> None:
    secret = open_tmp / "shadow"
    secret.write_text(SECRET)
    for mode in (0o640, 0o644):
        secret.chmod(mode)
        with pytest.raises(api.PolicyError) as refused:
            api.host_values(str(secret))
        assert (SECRET in str(refused.value)) == (mode == 0o644)


def starts(source: str) -> set[str]:
    """What a module starts programs by."""
    names = {*"subprocess Popen system popen posix_spawn posix_spawnp execvp execvpe execlp pty".split()}
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name)
    found = " ".join(ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return names & {*re.findall(r"\w+", found)}


def test_one_runner_starts_all_programs() -> None:
    """But for the commands of users, and ssh with the terminal of one."""
    root = Path(safe_gpu.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if starts(path.read_text())}
    assert found == {"host/programs.py", "cli/hosts.py"}


def test_what_a_program_prints_at_its_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may print and end between a look at its output and one at itself."""
    select, calls, go = selectors.DefaultSelector.select, [], tmp_path / "go"

    def late(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        calls.append(timeout)
        if len(calls) > 1:
            return select(selector, timeout)
        go.touch()
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", late)
    waits = f"until [ -e {go} ]; do sleep 0.01; done; echo answer"
    output = api.programs.output_of(["/bin/sh", "-c", waits], env={}, timeout=60, most=99)
    assert (output.status, output.text) == (0, "answer\n")


# Names


# Of a process: 15 bytes at most. The kernel escapes only line feeds and backslashes in them.
NAMES = {
    "a carriage return": b"\rUid:\t4711\t4711",
    "not UTF-8": b"\xff\rUid:\t0\xfe\t0",
    "a line feed": b"\nUid:\t4711\nTgid:",
    "the end of a name": b") Z 1 1 (",
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
        (thread,) = api.placement(pid).processes[0].threads
        facts = (
            api.procfs.real_uid_of,
            api.procfs.family_of,
            api.procfs.thread_group,
            api.procfs.parent_of,
            api.procfs.start_time,
        )
        states = (api.procfs.is_stopped, api.procfs.is_running, api.procfs.has_ended, api.procfs.is_exiting)
        return *(ask(pid) for ask in facts), *(ask(pid) for ask in states), thread.cpus_allowed, thread.mems_allowed

    process = as_user(work, uid=NEIGHBOUR)
    pid = process.pid
    assert process.hear() == "here"
    before = said()
    assert before[:4] == (NEIGHBOUR, (NEIGHBOUR, (pid, *api.procfs.ancestors(pid))), pid, os.getpid())
    process.tell()
    assert process.hear() == "named"
    assert (api.read_bytes(f"/proc/{pid}/comm").rstrip(b"\n"), said()) == (name[:15], before)
    assert pid in api.procfs.descendants(os.getpid())
    assert api.placement(pid).processes[0].threads[0].name.isprintable()


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
    names = [f"c\x1c{forged}", "f\r99\r1\r0:9\r/\r/\rrw", "g\t\\040 - ext4 /dev/sda rw", os.fsdecode(b"\xff\r\xfe")]
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
        (b"1:name=x\r0::/forged:/\n0::/his", "/his"),
        (b"0::/../../his", None),
    ],
)
def test_a_name_of_a_cgroup(monkeypatch: pytest.MonkeyPatch, line: bytes, asked: str | None) -> None:
    files = {"/proc/7/cgroup": line + b"\n", f"/sys/fs/cgroup{asked}/cgroup.events": b"populated 1\nfrozen 1\n"}
    read: list[str] = []
    monkeypatch.setattr(api.procfs, "read_start", lambda path, limit: read.append(path) or files.get(path))
    assert api.procfs.is_stopped(7) == (asked is not None)
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


# What is shown


LATE = 75
CLAIM = "run -n 8 --timeout 0.2 -- true"


def test_tricks_of_text(state_dir: Path, dgx: Any, child: Any, entry_of: Any, run_here: Any) -> None:
    """In the arguments of a holder, in entries and their names, in a ticket and in a note."""
    run = f"os.execlp('sh', {TRICK!r}, '-c', 'echo held; read x', {TRICK!r}, {TRICK * 200!r})"
    holder = child(f"import os\n{run}", says="held")
    texts = {"user": TRICK, "host": TRICK, "job": TRICK, "command": TRICK * 20, TRICK: TRICK}
    here = {"start": api.procfs.start_time(holder.pid), "pidns": api.procfs.pid_namespace(), "since": time.time() - 9}
    dgx.hold(0, pid=holder.pid, **texts)
    entry_of(NEIGHBOUR, {"gpus": {dgx.uuids[1]: None}, "pid": holder.pid, **here, **texts})
    entry_of(NEIGHBOUR, {"gpus": {dgx.uuids[2]: 5, TRICK: None}, "parts": {TRICK: 0}, "pid": 1, "pidns": 7, **texts})
    entry_of(NEIGHBOUR, {"gpus": dgx.uuids, "nb_gpus": 1, "near": TRICK, TRICK: TRICK, **texts}, part="queue")
    entry_of(NEIGHBOUR, {"gpus": {dgx.uuids[3]: TRICK}, **texts})
    dead = {"gpus": {dgx.uuids[4]: None}, "pid": 1, "v": 1, "since": time.time() - 9, **texts}
    (state_dir / "claims" / f"9.{'9' * 16}").write_text(json.dumps(dead))
    for part in ("claims", "queue"):
        (state_dir / part / TRICK.replace("/", "")).write_text(TRICK)
    (state_dir / "faults").mkdir()
    note = {"when": time.time(), "error": TRICK}
    (state_dir / "faults" / f"{dgx.uuids[5]}.{os.geteuid()}").write_text(json.dumps(note))
    for arguments in ("status", "status --json", "history", "doctor", CLAIM, "wait -n 8 --timeout 0.2"):
        done = run_here(*arguments.split())
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
    queue = tuple(api.WaiterStatus(place, 1, user, 1, 1.0) for place, user in enumerate(users, 1))
    text = api.render_metrics(api.HostStatus("h", "nvml", "", "/s", 2.0, (), queue))
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith("safe_gpu_waiting{")]
    numbers = {labels: float(value) for labels, _, value in samples}
    assert (len(samples), sum(numbers.values())) == (100, len(users))
    assert numbers['safe_gpu_waiting{user="ada"}'] == 5
    assert numbers['safe_gpu_waiting{user="other"}'] == len(users) - 5 - 98


# What doctor advises is pasted by root: no name that a neighbour chose stands in it, and none that it can replace


@pytest.fixture
def used(state_dir: Path) -> Path:
    for part in api.PARTS:
        api.Directory(str(state_dir), part).close()
    return state_dir


@pytest.mark.parametrize("name", ["a\n; touch pwned\n", "\x1b[2J$(touch pwned)", "-rf "])
def test_names_of_others_stand_in_no_advice(used: Path, name: str) -> None:
    for part in api.PARTS:
        (used / part / name).symlink_to("/etc/passwd")
    for check in api.run_checks():
        assert "touch" not in check.fix + check.detail
        assert "-rf " not in check.fix


@needs_root
def test_the_path_of_the_state_directory_is_quoted(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_tmp / "a b; touch pwned"
    api.Directory(str(path), "claims").close()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    command = api.directory_check(api.CheckedHost()).fix.partition(": ")[2]
    assert shlex.split(command) == ["safe-gpu", "setup", "--state-dir", str(path)]


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o1777])
@pytest.mark.parametrize("broken", ["host.lock", *api.PARTS, "."])
def test_root_is_not_told_to_change_what_others_can_replace(used: Path, broken: str, mode: int) -> None:
    """The owner puts a symbolic link in its place before the advice is followed."""
    path = used / broken
    path.touch()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    path.chmod(mode)
    assert not {"chmod", "chown", "mv", "rm"} & {*api.directory_check(api.CheckedHost()).fix.split()}
