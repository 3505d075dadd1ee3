"""``safe-gpu status --host``: real sshds that answer, and each way in which a host does not."""

import json
import os
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from support.processes import free_port
from support.terminals import Terminal

from safe_gpu.cli import hosts as asking


def lines_of(text: str) -> dict[str, str]:
    """Host -> what stands behind its name."""
    rows = (line.partition(" ") for line in text.splitlines())
    return {name: " ".join(rest.split()) for name, _, rest in rows if name.startswith("gpu")}


def test_a_line_for_each_host(hosts: Any, remote: Any, ask: Any, user: str) -> None:
    hosts.up("gpu1", as_well="gpu1-ib")
    hosts.up("gpu2", env={"SAFE_GPU_DRIVER": "simulated:laptop"})
    remote("gpu1").hold(3)
    waiter = remote("gpu1").start("run", "-n", 8, "--", "true")
    assert "waiting" in waiter.stderr.readline()
    done = ask("status", "--host", "gpu2,gpu1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "6 of 9 GPUs free on 2 of 2 hosts, 1 waiting"
    rows = lines_of(done.stdout)
    assert list(rows) == ["gpu2", "gpu1"]
    assert rows["gpu1"].startswith("5 of 8 NVIDIA A100-SXM4-80GB 1 ")
    assert rows["gpu1"].endswith(f" {user} 3")
    assert rows["gpu2"].startswith("1 of 1 ")
    assert list(lines_of(ask("status", "--host", "gpu2 gpu1", "--sort", "free").stdout)) == ["gpu1", "gpu2"]
    verbose = ask("status", "--host", "gpu1", "-v").stdout
    assert "\ngpu1:\n" in verbose
    assert "Waiting, first come first served:" in verbose
    both = ask("status", "--host", "gpu1,gpu1-ib").stdout
    assert both.startswith("5 of 8 GPUs free on 1 of 1 host, 1 waiting\n")
    assert lines_of(both)["gpu1-ib"] == "the same host as gpu1"
    document = json.loads(ask("status", "--host", "gpu1,gpu1-ib", "--json").stdout)
    assert document["schema"] == 2
    assert [list(one) for one in document["hosts"].values()] == [["status"], ["status", "same_as"]]
    assert document["hosts"]["gpu1"]["status"]["queue"][0]["nb_gpus"] == 8


UNUSUAL: dict[str, tuple[dict[str, Any], str]] = {
    "gpu1": ({}, "8 of 8 NVIDIA A100-SXM4-80GB"),
    "gpu-refusing": ({"key": "stranger"}, "a password is asked for, or your key is refused (*Permission denied"),
    "gpu-banner": (
        {"forced": 'echo "Welcome to gpu3"; exec sh -c "$SSH_ORIGINAL_COMMAND"'},
        "its login files write before the JSON: 'Welcome to gpu3'; let them write on a terminal only",
    ),
    "gpu-bare": ({"env": {"PATH": "/usr/bin:/bin"}}, "has no safe-gpu on its PATH: set remote_command in [host] of"),
    "gpu-older": ({"forced": """echo '{"schema": 1}'"""}, "answers in schema 1, and this safe-gpu reads 2: update the"),
    "gpu-broken": ({"env": {"SAFE_GPU_DRIVER": "nvml"}}, "*driver"),
    "gpu-killed": ({"forced": "echo '{'; kill -9 $PPID; sleep 20"}, "Connection to 127.0.0.1 closed by remote host."),
    "gpu-slow": ({"forced": "exec sleep 20"}, "did not answer within "),
    "gpu-hostile": ({"forced": r"""printf '%s' '{"schema": "\u001b[2J"}'"""}, "answers in schema [2J, and this"),
}


def test_each_unusual_host_has_its_reason(hosts: Any, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "SECONDS", 8.0)
    for name, (how, _) in UNUSUAL.items():
        hosts.up(name, **how)
    hosts.known("gpu-down", free_port())
    reasons = {"gpu-down": "ssh: connect to host 127.0.0.1 port *Connection refused"}
    reasons |= {name: reason for name, (_, reason) in UNUSUAL.items()}
    monkeypatch.setenv("COLUMNS", "400")
    done = ask("status", "--host", ",".join(reasons))
    assert done.returncode == 1
    found = lines_of(done.stdout)
    for name, reason in reasons.items():
        assert fnmatchcase(found[name], f"{reason}*".replace("[", "[[]")), name
    assert "\x1b" not in done.stdout
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, ask("status", "--host", "gpu1,gpu-bare").stdout.splitlines())) <= 60
    assert ask("status", "--host", "gpu-down,gpu-refusing").returncode == 68
    errors = json.loads(ask("status", "--json", "--host", "gpu1,gpu-down").stdout)["hosts"]
    assert [list(one) for one in errors.values()] == [["status"], ["error"]]


def test_the_hosts_and_the_command_of_a_users_file(hosts: Any, ask: Any, tmp_path: Path) -> None:
    hosts.up("gpu1", env={"PATH": "/usr/bin:/bin"})
    file = tmp_path / ".config" / "safe-gpu" / "config.ini"
    file.parent.mkdir(parents=True)
    there = hosts.directory / "remote" / "safe-gpu"
    file.write_text(f"[host]\nhosts = gpu1\nremote_command = env PATH=/usr/bin:/bin {there}\n")
    file.chmod(0o644)
    assert lines_of(ask("status", "--all-hosts").stdout)["gpu1"].startswith("8 of 8 ")


def test_a_control_master_stays_and_is_not_waited_for(hosts: Any, ask: Any) -> None:
    hosts.up("gpu1")
    master = f"ControlPath {hosts.directory}/%h-%p\n  ControlMaster auto\n  ControlPersist 60"
    hosts.config.write_text(hosts.config.read_text().replace("ControlPath none", master))
    try:
        for _ in range(2):
            assert lines_of(ask("status", "--host", "gpu1").stdout)["gpu1"].startswith("8 of 8 ")
    finally:
        assert subprocess.run(["ssh", "-O", "exit", "gpu1"], capture_output=True, timeout=30).returncode == 0


def test_the_watch_does_not_wait_for_the_slowest(hosts: Any, remote: Any, command: Any, terminal: Terminal) -> None:
    hosts.up("gpu1")
    hosts.up("gpu-slow", forced="exec sleep 60")
    words = ("status", "--host", "gpu-slow,gpu1", "--watch", "--interval", "0.1")
    started = command.start(*words, stdin=terminal.slave, stdout=terminal.slave)
    terminal.read_until(lambda: any("8 of 8" in line for line in terminal.whole))
    assert any(line.split() == ["gpu-slow", "..."] for line in terminal.whole)
    remote("gpu1").hold(1)
    terminal.read_until(lambda: any("7 of 8" in line for line in terminal.whole))
    os.write(terminal.master, b"q")
    assert started.wait(60) == 0
    terminal.read_to_the_end()
    assert (terminal.alternate, terminal.cursor) == (False, True)
