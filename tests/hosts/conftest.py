"""Hosts of one machine: real sshds on the loopback interface, each with a state directory and simulated GPUs."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import filelock
import pytest
from support import api
from support.gpus import PACKAGE_ROOT
from support.processes import free_port, program
from support.real import REQUIRED, unavailable

SBIN = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


class Hosts:
    """Starts sshds, which end with the test. Their names are those of an ssh configuration that only this ssh has."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = directory / "ssh_config"
        self._mark = f"SAFE_GPU_TEST_HOSTS={directory}".encode()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        program(directory / "bin" / "ssh", f'exec {shutil.which("ssh")} -F {self.config} "$@"')
        program(directory / "remote" / "safe-gpu", f'exec {sys.executable} -m safe_gpu "$@"')
        for key in ("host", "user", "stranger"):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key)]
            subprocess.run(words, check=True, timeout=30)
        self.config.write_text(
            "Match all\n  GlobalKnownHostsFile /dev/null\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  StrictHostKeyChecking yes\n  UserKnownHostsFile {directory}/known_hosts\n  HostName 127.0.0.1\n"
            f"  HostKeyAlias gpu\n  ControlPath none\n"
        )
        (directory / "known_hosts").write_text(f"gpu {(directory / 'host.pub').read_text()}")

    def environment(self, name: str) -> dict[str, str]:
        """What commands on a host find, whoever starts them."""
        return {
            **{name: value for name, value in os.environ.items() if name.startswith("SAFE_GPU_")},
            "SAFE_GPU_TEST_HOSTS": str(self.directory),
            "SAFE_GPU_DIR": str(self.directory / name),
            "PYTHONPATH": f"{PACKAGE_ROOT}:{Path(filelock.__file__).parents[1]}",  # for another interpreter
            "PATH": f"{self.directory}/remote:/usr/bin:/bin",
        }

    def up(self, name: str, *, as_well: str = "", forced: str = "", key: str = "user", env: Any = None) -> None:
        """Start the host, with a forced command (which finds the real one in SSH_ORIGINAL_COMMAND) or other variables.

        Args:
            as_well: a second name of it.
            key: with which ssh comes: "user" or "stranger".
        """
        port = free_port()
        variables = {**self.environment(name), **(env or {})}
        settings = " ".join(f'"{key}={value}"' for key, value in variables.items())
        file = self.directory / f"sshd_{name}"
        file.write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {self.directory}/host\nPidFile none\nUsePAM no\n"
            f"StrictModes no\nAuthorizedKeysFile {self.directory}/user.pub\nPermitRootLogin prohibit-password\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nSetEnv {settings}\n"
            + f"ForceCommand {forced}\n"
            * bool(forced)
        )
        words = [shutil.which("sshd", path=SBIN) or "", "-D", "-e", "-f", str(file)]
        self._daemons[name] = daemon = subprocess.Popen(words, stderr=subprocess.PIPE)
        assert daemon.stderr is not None
        said = b""
        while b"Server listening" not in said:
            line = daemon.stderr.readline()
            assert line, said.decode()
            said += line
        self.known(f"{name} {as_well}", port, key)

    def known(self, names: str, port: int, key: str = "user") -> None:
        """Let ssh know how to reach names."""
        lines = f"Host {names}\n  Port {port}\n  IdentityFile {self.directory}/{key}\n"
        self.config.write_text(lines + self.config.read_text())

    def down(self, name: str) -> None:
        """End the daemon; its connections stay."""
        with self._daemons.pop(name) as daemon:
            daemon.terminate()

    def connections(self) -> list[int]:
        """The processes of sshd that serve the connections."""
        daemons = [one.pid for one in self._daemons.values()]
        below = [pid for daemon in daemons for pid in api.procfs.descendants(daemon)]
        return [pid for pid in below if (api.procfs.command_of(pid) or "").startswith("sshd")]

    def processes(self) -> list[int]:
        """What runs on them: without a terminal nothing ends with its connection."""
        return [pid for pid in api.procfs.pids() if self._mark in (api.read_start(f"/proc/{pid}/environ") or b"")]

    def end(self) -> None:
        """End them all, and what runs on them."""
        for name in list(self._daemons):
            self.down(name)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """No host is up yet; see :class:`Hosts`."""
    if not REQUIRED:
        pytest.skip("needs SAFE_GPU_REQUIRE_REAL=1, as it takes long")
    if os.geteuid() != 0:
        unavailable("needs root, for sshd")
    if missing := [name for name in ("ssh", "ssh-keygen", "sshd") if shutil.which(name, path=SBIN) is None]:
        unavailable(f"needs {' and '.join(missing)} (OpenSSH)")
    separation = Path("/run/sshd")
    made = not separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    with TemporaryDirectory() as directory:
        hosts = Hosts(Path(directory))
        monkeypatch.setenv("PATH", f"{directory}/bin:{os.environ['PATH']}")
        yield hosts
        hosts.end()
    if made:
        separation.rmdir()


@pytest.fixture
def remote(hosts: Hosts, command: Any) -> Any:
    """A command as a user of one of the hosts starts it there: ``remote("gpu1", "run", ...)``."""
    return lambda name, *words, **options: command.start(*words, env=hosts.environment(name), **options)


@pytest.fixture
def hold(remote: Any) -> Any:
    """Have so many GPUs of a host held: ``hold("gpu1", 3)``."""

    def start(name: str, number: int) -> None:
        script = ("sh", "-c", "echo up; read x")
        assert remote(name, "run", "-n", number, "--", *script, stdin=subprocess.PIPE).stdout.readline() == "up\n"

    return start
