"""``safe-gpu status --host``: which hosts are meant, what is sent to them, what their answers say; ``run --host``.

Most answers are made up; real sshds give the others, and each way in which a host does not answer.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api
from support.processes import free_port, program
from support.real import long
from support.terminals import Terminal

USER = api.user_name(os.geteuid())
LAPTOP = {"SAFE_GPU_DRIVER": "simulated:laptop"}  # one GPU


def status(*states: str, **more: Any) -> dict[str, Any]:
    """The document of a host with GPUs in these states; claimed ones are anna's."""
    gpus = [
        {"vendor": "nvidia", "index": n, "uuid": f"GPU-{n}", "name": "NVIDIA L4", "state": state, "state_shown": state,
         "reason": "it fell off the bus", "shares": [], "memory_total": 100,
         "claim": {"user": "anna"} if state == "claimed" else None}
        for n, state in enumerate(states)
    ]  # fmt: skip
    return {"schema": 2, "host": "gpu1", "state_dir": "/tmp/safe-gpu", "gpus": gpus, "queue": [], **more}


def answer(*states: str, **more: Any) -> api.Answer:
    return api.read_answer(api.SshResult(0, json.dumps(status(*states, **more)), ""))


def test_what_is_no_name_is_refused(run_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = " gpu1  anna@gpu2.example.org,gpu1 [::1] fe80::1%eth0 10.0.0.1 "
    assert api.host_names(names) == ("gpu1", "anna@gpu2.example.org", "[::1]", "fe80::1%eth0", "10.0.0.1")
    for name in ("-oProxyCommand=x", "anna@-x", "gpu\x1b[2J", "`id`@gpu1"):
        with pytest.raises(ValueError, match="is not the name of a host"):
            api.host_names(name)
        assert run_here("status", f"--host={name}").returncode == 2
        monkeypatch.setenv("SAFE_GPU_HOSTS", name)
        assert run_here("status", "--all-hosts").returncode == 2


@pytest.fixture
def files(tmp_path: Path, rules: Any) -> Any:
    """Write the file of the user, and root's: what they say of the other hosts."""

    def write(user: str, root: str, mode: int = 0o644) -> dict[str, str]:
        file = tmp_path / ".config" / "safe-gpu" / "config.ini"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(user)
        file.chmod(mode)
        policy = str(rules(root))
        return {"HOME": str(tmp_path), "SAFE_GPU_POLICY": policy, **LAPTOP}

    return write


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose the policy must be")
def test_whose_hosts_count(files: Any) -> None:
    ours, roots = "[host]\nhosts = a, b\n", "[host]\nhosts = c\nremote_command = /opt/safe-gpu -x\n"
    environ = files(ours, roots)
    assert api.known_hosts(environ) == ("a", "b")
    assert api.known_hosts({**environ, "SAFE_GPU_HOSTS": "d"}) == ("d",)
    assert api.setting_of_hosts("remote_command", environ) == "/opt/safe-gpu -x"
    assert api.known_hosts(files("", roots, 0o600)) == ("c",)


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        ("[host]\nhosts = a\n", 0o664, "mode 644 at most: chmod 644"),
        ("[host]\nhosts = -x\n", 0o644, ":2: '-x' is not the name"),
        ("[host]\nstate_dir = /x\n", 0o644, "state_dir is for root's file; here hosts and remote_command count"),
    ],
)
def test_a_wrong_file_of_the_user(files: Any, text: str, mode: int, told: str) -> None:
    with pytest.raises(api.PolicyError, match=told):
        api.known_hosts(files(text, "", mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_another_users_file_chooses_no_command(files: Any, tmp_path: Path) -> None:
    environ = files("[host]\nremote_command = ./evil\n", "")
    os.chown(tmp_path / ".config" / "safe-gpu" / "config.ini", 65534, 65534)
    with pytest.raises(api.PolicyError, match="a file of your own"):
        api.setting_of_hosts("remote_command", environ)


def test_without_known_hosts_and_for_what_is_about_one_host_the_way_is_told(
    run_here: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run_here("status", "--all-hosts")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SAFE_GPU_HOSTS=gpu1,gpu2" in done.stderr
    for words in (("--host", "gpu1", "--free"), ("--host", "gpu1", "--user", "anna"), ("--sort", "free")):
        assert run_here("status", *words).returncode == 2
    for words in (("--timeout", 5), ("-n", "job")):
        assert run_here("run", "--host", "gpu1", *words, "--", "true").returncode == 2


WORDS = ["a b", "it's", '!x !! \\! $HOME `id` "q"', "\\", "\\\\n\\'", "", "*?[x]~ #;&|<>(){}^%", "é", "-n"]


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish"])
def test_any_login_shell_reads_the_same(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    line = api.for_any_shell(f'printf "[%s]" {shlex.join(WORDS)}')
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("".join(f"[{word}]" for word in WORDS), "")


MIG = {"vendor": "nvidia", "name": "x", "state_shown": "", "reason": "", "shares": [], "claim": None, "memory_total": 1}
DIVIDED = {**MIG, "index": 0, "uuid": "GPU-1", "state": "unusable", "reason": api.MIG_IS_ON}
PART = {**MIG, "index": 0, "uuid": "MIG-1", "state": "free"}
SHARED = {**MIG, "index": 0, "uuid": "GPU-1", "state": "claimed", "memory_total": 4, "claim": {},
          "shares": [{"user": "ben", "share": 1}, {"user": None, "share": 2}]}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "cells", "broken"),
    [
        (answer("free", "display", "busy"), ["2 of 3", "NVIDIA L4", "", "", ""], ()),
        (answer(gpus=[DIVIDED, PART]), ["1 of 1", "x MIG instance", "", "", ""], ()),
        (answer(gpus=[SHARED, {**SHARED, "name": "y"}]), ["0 of 2", "1 x x, 1 x y", "", "", "? 1, ben 0.5"], ()),
    ],
)
def test_figures(given: api.Answer, cells: list[str], broken: tuple[str, ...]) -> None:
    assert given.figures is not None
    assert (list(given.figures.cells.values()), given.figures.broken) == (cells, broken)


@pytest.mark.parametrize(
    ("code", "out", "err", "told"),
    [
        (124, "", "", "did not answer within 10 s"),
        (255, "", "x\nHost key verification failed.\r\n", "its key is not known here; run ssh to it once by hand"),
        (0, '{"schema": 2}', "", "its answer cannot be read: KeyError: 'gpus'"),
    ],
)
def test_why_there_are_no_figures(code: int, out: str, err: str, told: str) -> None:
    one = api.read_answer(api.SshResult(code, out, err))
    assert one.status is None
    assert one.error.startswith(told)


@pytest.mark.parametrize("banner", ["", "Welcome to gpu3\n", 'no line break, and a brace {"schema": 1}'])
def test_login_files_may_print(banner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Any) -> None:
    """A shell runs what ssh is given, behind what its login files print, and so do two commands of ``-v``."""
    document = json.dumps(status("free", "claimed"))
    program(tmp_path / "ssh", f'printf %s {shlex.quote(banner)}; for last; do :; done; eval "$last"')
    program(tmp_path / "safe-gpu", f'case "$*" in *--json) echo {shlex.quote(document)} ;; *) echo its own table; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = run_here("status", "--host", "gpu3", "-v")
    assert (done.returncode, lines_of(done.stdout)["gpu3"]) == (0, "1 of 2 NVIDIA L4 anna 1")
    assert done.stdout.endswith("gpu3:\nits own table\n")


def test_an_answer_without_a_mark_is_read_too() -> None:
    """As of a command that ignores what it is asked for."""
    document = json.dumps(status("free"))
    assert api.read_answer(api.SshResult(0, f"{document}\na table", "")).text == "\na table"
    other = api.read_answer(api.SshResult(0, f"Welcome\n{document}", ""))
    assert (other.status, other.error.partition(";")[0]) == (
        None,
        "something else answers than safe-gpu status: 'Welcome'",
    )


LEAVES = st.none() | st.booleans() | st.floats() | st.text(max_size=9)
JSON = st.recursive(LEAVES, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=4)


@settings(max_examples=60)
@given(st.fixed_dictionaries(dict.fromkeys(status(), JSON)), st.sampled_from(["gpus", "queue", "host"]))
def test_a_hostile_answer_is_an_answer(hostile: dict[str, Any], key: str) -> None:
    for told in (hostile, {**status("free", "claimed"), key: hostile[key]}, {**hostile, "schema": 2}):
        one = api.read_answer(api.SshResult(0, json.dumps(told), ""))
        text = api.render_hosts(api.in_display_order({"gpu1": one}, False), width=80, color=False)
        assert all(line.isprintable() for line in text.split("\n"))
        json.dumps(api.document({"gpu1": one}))


def test_the_table() -> None:
    answers = {
        "gpu1": answer("free", "claimed", "unusable"),
        "gpu2": api.Answer(error="did not answer within 10 s"),
        "gpu4": answer("free", "free", host="gpu4", queue=[{"since": 4e9, "user": "emil"}]),
        "gpu5": answer("free", "free", host="gpu4"),
    }
    assert [
        line.split()
        for line in api.render_hosts(api.in_display_order(answers, False), width=80, color=False).split("\n")
    ] == [
        "3 of 5 GPUs free on 2 of 3 hosts, 1 waiting".split(),
        [],
        "HOST FREE GPU WAITING LONGEST HELD BY".split(),
        "gpu1 1 of 3 NVIDIA L4 anna 1".split(),
        "GPU 2: it fell off the bus".split(),
        "gpu2 did not answer within 10 s".split(),
        "gpu4 2 of 2 NVIDIA L4 1 0s".split(),
        "gpu5 the same host as gpu4".split(),
    ]
    assert list(api.in_display_order(answers, True)) == ["gpu4", "gpu1", "gpu2", "gpu5"]


def lines_of(text: str) -> dict[str, str]:
    """Host -> what stands behind its name."""
    rows = (line.partition(" ") for line in text.splitlines())
    return {name: " ".join(rest.split()) for name, _, rest in rows if name.startswith("gpu")}


def test_a_line_for_each_host(hosts: Any, remote: Any, hold: Any, run_here: Any) -> None:
    hosts.up("gpu1", as_well="gpu1-ib")
    hosts.up("gpu2", env=LAPTOP)
    hold("gpu1", 3)
    waiter = remote("gpu1", "run", "-n", 8, "--", "true")
    assert "waiting" in waiter.stderr.readline()
    done = run_here("status", "--host", "gpu2,gpu1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "6 of 9 GPUs free on 2 of 2 hosts, 1 waiting"
    rows = lines_of(done.stdout)
    assert list(rows) == ["gpu2", "gpu1"]
    assert rows["gpu1"].startswith("5 of 8 NVIDIA A100-SXM4-80GB 1 ")
    assert rows["gpu1"].endswith(f" {USER} 3")
    assert list(lines_of(run_here("status", "--host", "gpu2 gpu1", "--sort", "free").stdout)) == ["gpu1", "gpu2"]
    verbose = run_here("status", "--host", "gpu1", "-v").stdout
    assert "\ngpu1:\n" in verbose
    assert "Waiting, first come first served:" in verbose
    both = run_here("status", "--host", "gpu1,gpu1-ib").stdout
    assert both.startswith("5 of 8 GPUs free on 1 of 1 host, 1 waiting\n")
    assert lines_of(both)["gpu1-ib"] == "the same host as gpu1"
    document = json.loads(run_here("status", "--host", "gpu1,gpu1-ib", "--json").stdout)
    assert [list(one) for one in document["hosts"].values()] == [["status"], ["status", "same_as"]]
    assert document["hosts"]["gpu1"]["status"]["queue"][0]["nb_gpus"] == 8


UNUSUAL: dict[str, tuple[dict[str, Any], str]] = {
    "gpu1": ({}, "8 of 8 NVIDIA A100-SXM4-80GB"),
    "gpu-refusing": ({"key": "stranger"}, "a password is asked for, or your key is refused (*Permission denied"),
    "gpu-banner": (
        {"forced": 'echo "Welcome to gpu3"; exec sh -c "$SSH_ORIGINAL_COMMAND"'},
        "8 of 8 NVIDIA A100-SXM4-80GB",
    ),
    "gpu-other": (
        {"forced": 'echo "Welcome to gpu3"'},
        "something else answers than safe-gpu status: 'Welcome to gpu3'; look at remote_command, and at command= in",
    ),
    "gpu-bare": ({"env": {"PATH": "/usr/bin:/bin"}}, "has no safe-gpu on its PATH: set remote_command in [host] of"),
    "gpu-older": ({"forced": """echo '{"schema": 1}'"""}, "answers in schema 1, and this safe-gpu reads 2: update the"),
    "gpu-broken": ({"env": {"SAFE_GPU_DRIVER": "nvml"}}, "*driver"),
    "gpu-killed": ({"forced": "echo '{'; kill -9 $PPID; sleep 20"}, "Connection to 127.0.0.1 closed by remote host."),
    "gpu-slow": ({"forced": "exec sleep 20"}, "did not answer within "),
    "gpu-hostile": ({"forced": r"""printf '%s' '{"schema": "\u001b[2J"}'"""}, "answers in schema [2J, and this"),
}


def test_each_unusual_host_has_its_reason(hosts: Any, run_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.hosts, "SECONDS", 8.0)
    for name, (how, _) in UNUSUAL.items():
        hosts.up(name, **how)
    hosts.known("gpu-down", free_port())
    reasons = {"gpu-down": "ssh: connect to host 127.0.0.1 port *Connection refused"}
    reasons |= {name: reason for name, (_, reason) in UNUSUAL.items()}
    monkeypatch.setenv("COLUMNS", "400")
    done = run_here("status", "--host", ",".join(reasons))
    assert done.returncode == 1
    found = lines_of(done.stdout)
    for name, reason in reasons.items():
        assert fnmatchcase(found[name], f"{reason}*".replace("[", "[[]")), name
    assert "\x1b" not in done.stdout
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, run_here("status", "--host", "gpu1,gpu-bare").stdout.splitlines())) <= 60
    assert run_here("status", "--host", "gpu-down,gpu-refusing").returncode == 68
    errors = json.loads(run_here("status", "--json", "--host", "gpu1,gpu-down").stdout)["hosts"]
    assert [list(one) for one in errors.values()] == [["status"], ["error"]]


def test_the_hosts_and_the_command_of_a_users_file(hosts: Any, run_here: Any, tmp_path: Path) -> None:
    hosts.up("gpu1", env={"PATH": "/usr/bin:/bin"})
    file = tmp_path / ".config" / "safe-gpu" / "config.ini"
    file.parent.mkdir(parents=True)
    there = hosts.directory / "remote" / "safe-gpu"
    file.write_text(f"[host]\nhosts = gpu1\nremote_command = env PATH=/usr/bin:/bin {there}\n")
    file.chmod(0o644)
    assert lines_of(run_here("status", "--all-hosts").stdout)["gpu1"].startswith("8 of 8 ")


def test_a_control_master_stays_and_is_not_waited_for(hosts: Any, run_here: Any) -> None:
    hosts.up("gpu1")
    master = f"ControlPath {hosts.directory}/%h-%p\n  ControlMaster auto\n  ControlPersist 60"
    hosts.config.write_text(hosts.config.read_text().replace("ControlPath none", master))
    try:
        for _ in range(2):
            assert lines_of(run_here("status", "--host", "gpu1").stdout)["gpu1"].startswith("8 of 8 ")
    finally:
        assert subprocess.run(["ssh", "-O", "exit", "gpu1"], capture_output=True, timeout=30).returncode == 0


def test_the_watch_does_not_wait_for_the_slowest(hosts: Any, hold: Any, command: Any, terminal: Terminal) -> None:
    hosts.up("gpu1")
    hosts.up("gpu-slow", forced="exec sleep 60")
    words = ("status", "--host", "gpu-slow,gpu1", "--watch", "--interval", "0.1")
    started = command.start(*words, stdin=terminal.slave, stdout=terminal.slave)
    terminal.read_until(lambda: any("8 of 8" in line for line in terminal.whole))
    assert any(line.split() == ["gpu-slow", "..."] for line in terminal.whole)
    hold("gpu1", 1)
    terminal.read_until(lambda: any("7 of 8" in line for line in terminal.whole))
    os.write(terminal.master, b"q")
    assert started.wait(60) == 0
    terminal.read_to_the_end()
    assert (terminal.alternate, terminal.cursor) == (False, True)


# ``safe-gpu run --host``: one host claims, whatever becomes of the connections.
# Some of these have real sshds; others an ssh that runs its script here, as the host that it is to reach.


@pytest.fixture
def free(hosts: Any, command: Any) -> Callable[[str], int]:
    """How many GPUs of a host are free, by its own status."""

    def count(name: str, **env: str) -> int:
        gpus = json.loads(command.run("status", "--json", env={**hosts.environment(name), **env}).stdout)["gpus"]
        return sum(gpu["state"] in ("free", "display") for gpu in gpus)

    return count


def test_the_one_with_the_most_free_gpus_in_this_directory(
    hosts: Any, command: Any, free: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.up("gpu1", env=LAPTOP)
    hosts.up("gpu2")
    odd = tmp_path / "it's a !\n\\place"
    odd.mkdir()
    monkeypatch.setenv("PWD", "/elsewhere")
    script = 'printf "%s|" "$PWD" "$1" "$CUDA_VISIBLE_DEVICES" "$(cat)" "$SAFE_GPU_DIR"'
    script += "; echo bad >&2; exit 7"
    words = ("run", "--host", "gpu1,gpu2", "--", "sh", "-c", script, "sh", "a  'b'\n!")
    given = tmp_path / "stdin"
    given.write_text("stdin")
    with given.open() as stdin:
        done = command.run(*words, cwd=odd, stdin=stdin)
    printed = f"{odd}|a  'b'\n!|0|stdin|{hosts.directory}/gpu2|"
    assert (done.returncode, done.stdout, done.stderr) == (7, printed, "bad\n")
    assert (free("gpu1", **LAPTOP), free("gpu2")) == (1, 8)


def test_nobody_has_enough(hosts: Any, remote: Any, hold: Any, command: Any) -> None:
    hosts.up("gpu1", env=LAPTOP, as_well="gpu1-ib")
    hosts.up("gpu2")
    hosts.known("gpu3", free_port())
    hold("gpu2", 7)
    waiter = remote("gpu2", "run", "-n", 4, "--", "true")
    assert "waiting" in waiter.stderr.readline()
    done = command.run("run", "--host", "gpu1,gpu1-ib,gpu2,gpu3", "-n", 2, "--", "true")
    assert (done.returncode, done.stdout) == (75, "")
    *_, first, gpu1, gpu2, ib, gpu3 = done.stderr.splitlines()
    assert "run --host does not wait" in first
    assert gpu1.startswith("  gpu1: ")
    assert ib == "  gpu1-ib: the same host as gpu1"
    assert gpu2 == f"  gpu2: 1 of 8 GPUs free, 1 waiting: {USER}"
    assert gpu3.endswith("Connection refused")
    assert command.run("run", "--host", "gpu3", "--", "true").returncode == 68
    assert command.run("run", "--host", "gpu2", "-n", 9, "--", "true").returncode == 78


def test_a_directory_that_is_not_there_is_no_claim(hosts: Any, command: Any, tmp_path: Path) -> None:
    hosts.up("gpu1")
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir('{gone}'); os.environ['PWD'] = '/'; from safe_gpu.cli import hosts as run"
    code += f"; os.getcwd = lambda: '{gone}'; from safe_gpu.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "run", "--host", "gpu1", "--", "touch", str(tmp_path / "ran")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, f"there is no directory {gone}\n" in done.stderr) == (126, True)
    assert not (tmp_path / "ran").exists()
    assert not (hosts.directory / "gpu1").exists()


def test_a_signal_before_the_claim_makes_none(hosts: Any, command: Any, free: Any, tmp_path: Path) -> None:
    """The safe-gpu of that host says when it is to claim, waits then, and tells what the real one says at its end."""
    up, go, end = (tmp_path / name for name in ("up", "go", "end"))
    for path in (up, go, end):
        os.mkfifo(path)
    real = f'{hosts.directory}/remote/safe-gpu "$@"'
    wait = f"echo > {up}; read x < {go}; exec {real} > {end} 2>&1"
    program(tmp_path / "slow" / "safe-gpu", f'case "$*" in *--pending*) {wait};; esac\nexec {real}')
    hosts.up("gpu1", env={"PATH": f"{tmp_path}/slow:/usr/bin:/bin"})
    started = command.start("run", "--host", "gpu1", "--", "touch", tmp_path / "ran")
    assert up.read_text() == "\n"
    started.terminate()
    assert started.wait(60) == 143
    go.write_text("\n")
    assert "has ended its ssh" in end.read_text()
    assert (free("gpu1"), (tmp_path / "ran").exists()) == (8, False)


def test_no_other_host_is_tried_where_the_connection_breaks_after_the_claim(
    hosts: Any, command: Any, free: Any, tmp_path: Path, eventually: Any
) -> None:
    """The command runs on there and keeps its GPU."""
    hosts.up("gpu1")
    hosts.up("gpu2", env=LAPTOP)
    script = f"echo once >> {tmp_path}/log; echo up; exec sleep 600"
    started = command.start("run", "--host", "gpu1,gpu2", "--", "sh", "-c", script)
    assert started.stdout.readline() == "up\n"
    for pid in hosts.connections():
        os.kill(pid, signal.SIGKILL)
    assert (started.wait(60), free("gpu1")) == (255, 7)
    assert (tmp_path / "log").read_text() == "once\n"


def test_on_a_terminal(hosts: Any, free: Any, terminal: Terminal) -> None:
    hosts.up("gpu1")
    code = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "from safe_gpu.cli import main; sys.exit(main(sys.argv[1:]))"
    script = "trap 'echo got it; exit 5' INT; tty; stty size; echo up; while :; do sleep 0.1; done"
    words = [sys.executable, "-c", code, "run", "--host", "gpu1", "--", "sh", "-c", script]
    with subprocess.Popen(words, stdin=terminal.slave, stdout=terminal.slave, stderr=terminal.slave) as started:
        terminal.read_until("up\r\n")
        os.write(terminal.master, b"\x03")
        terminal.read_until("got it\r\n")
        assert started.wait(60) == 5
    assert "24 80" in terminal.raw
    assert "safe-gpu: on gpu1" in terminal.raw
    assert "safe-gpu: got GPU 0" in terminal.raw
    assert free("gpu1") == 8


# Where "breaks-HOST" is there, the connection breaks before the claim; "late" tells what waits there then. Where
# "killed-HOST" is there, ssh is killed before the claim.
SSH = """
while [ "$1" != -- ]; do shift; done
export SAFE_GPU_DIR={0}/state-$2 SAFE_GPU_DRIVER=simulated:$(cat {0}/driver-$2) PATH={1}:/usr/bin:/bin
pending=$(echo "$3" | grep -o '/tmp/safe-gpu-run-[0-9a-f]*' | head -1)
[ -z "$pending" ] || echo $pending >> {0}/made
case "$3" in *--pending*) if [ -e {0}/breaks-$2 ]; then mkdir $pending; echo $pending > {0}/late; exit 255; fi;; esac
case "$3" in *--pending*) if [ -e {0}/killed-$2 ]; then mkdir $pending; kill -9 $$; fi;; esac
eval "$3"
"""


@pytest.fixture
def there(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of two hosts, "a" with eight GPUs and "b" with one."""
    program(tmp_path / "bin" / "ssh", SSH.format(tmp_path, command.path.parent))
    (tmp_path / "driver-a").write_text("dgx-a100")
    (tmp_path / "driver-b").write_text("laptop")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hosts_that_take_long_are_told_of(there: Path, monkeypatch: Any, eventually: Any) -> None:
    """First all of them, then those that are missing. They answer when they may, here once that has been told."""
    monkeypatch.setattr(api.awaiting, "FIRST", 0.05)
    monkeypatch.setattr(api.awaiting, "LATE", 0.1)
    slow = f"while [ ! -e {there}/answer ]; do sleep 0.01; done; safe-gpu status --json"
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            (there / "answer").touch()

    found = api.hosts.statuses_of(("a", "b"), slow, tell)
    assert [one.figures.total for one in found.values() if one.figures] == [8, 1]
    first, late = told
    assert first.startswith("waiting for ssh to a, b since ")
    assert late == f"still {first}: each has 10 s for its answer"


def test_many_hosts_are_not_all_named_and_quiet_names_none(there: Path, command: Any) -> None:
    program(there / "bin" / "ssh", f"while [ ! -e {there}/answer ]; do sleep 0.2; done; exit 255")
    words = ("run", "--host", "a,b,c,d,e", "--", "true")
    loud, quiet = command.start(*words), command.start(words[0], "-q", *words[1:])
    assert loud.stderr.readline().startswith("safe-gpu: waiting for ssh to a, b, c and 2 more since ")
    (there / "answer").touch()
    for started in (loud, quiet):
        assert started.stderr.readline().startswith("safe-gpu: no host has enough free GPUs now")
        started.communicate(timeout=60)


@pytest.mark.parametrize(
    ("words", "code", "tried"),
    [
        ((), 0, "a\n"),
        (("--model", "4070"), 0, "b\n"),  # 78 on the other one
        pytest.param(("-n", 9), 78, "", marks=long),
    ],
)
def test_the_first_that_claims(command: Any, there: Path, words: tuple[object, ...], code: int, tried: str) -> None:
    script = f'echo "${{SAFE_GPU_DIR##*-}}" >> {there}/ran; exit $0'
    for own in (75, 255) if words == () else (0,):
        (there / "ran").write_text("")
        done = command.run("run", "--host", "b,a", *words, "--", "sh", "-c", script, own)
        assert (done.returncode, (there / "ran").read_text()) == (code or own, tried), done.stderr
    assert not any(map(os.path.exists, (there / "made").read_text().split())), "a directory was left behind"


def test_what_comes_late_on_a_broken_connection_runs_nothing(command: Any, there: Path, dgx: Any) -> None:
    """The first host is asked to give up, and only then the next one is tried."""
    (there / "breaks-a").touch()
    done = command.run("run", "--host", "a,b", "--", "sh", "-c", 'echo "${SAFE_GPU_DIR##*-}"')
    assert (done.returncode, done.stdout) == (0, "b\n"), done.stderr
    pending = (there / "late").read_text().strip()
    late = command.run("run", "--pending", pending, "--", "echo", "ran")
    assert (late.returncode, late.stdout) == (2, "")
    assert "run --host has ended its ssh" in late.stderr
    assert dgx.claimed() == []
    os.mkdir(pending)
    assert command.run("run", "--pending", pending, "--", "echo", "ran").stdout == "ran\n"
    assert not os.path.exists(pending)


def test_an_ssh_that_is_killed_counts_as_in_a_shell(command: Any, there: Path) -> None:
    (there / "killed-b").touch()
    done = command.run("run", "--host", "b", "--", "true")
    assert done.returncode == 128 + signal.SIGKILL
    assert "  b: exit code 137" in done.stderr.splitlines()


def test_a_directory_keeps_the_name_by_which_it_was_entered(command: Any, there: Path) -> None:
    """Its links may lead elsewhere on the other host."""
    link = there / "link"
    link.symlink_to(there)
    done = command.run("run", "--host", "a", "--", "sh", "-c", "echo $PWD", env={"PWD": str(link)})
    assert done.stdout == f"{link}\n"
