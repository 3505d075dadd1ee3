"""``safe-gpu setup``: what is root's no neighbour removes or closes, and root is led to change nothing elsewhere."""

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import own_network

import safe_gpu
from safe_gpu.cli import setup as command_of_setup
from safe_gpu.cli import setup as host_files
from safe_gpu.coordination.closed import drained_gpus
from safe_gpu.coordination.leases.file_names import inner_name, lease_name, leases_of
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.drivers import open_drivers
from safe_gpu.drivers.presets import preset

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose directory it is")

ANNA, BEN, ATTACKER = 4711, 4712, 65534


class Host:
    """A host whose state directory is ``path``; ``run`` is ``safe-gpu setup`` for it."""

    def __init__(self, place: Path, ask: Callable[..., subprocess.CompletedProcess[str]]) -> None:
        self.place, self.path, self._ask = place, place / "state", ask
        self.config, self.rule = place / "etc" / "config.ini", place / "rules" / "safe-gpu.conf"

    def run(self, *options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self._ask("setup", "--state-dir", path or self.path, *options)

    def done(self, *options: str) -> list[str]:
        """The lines of a run that leaves nothing to do."""
        done = self.run(*options)
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    def tree(self) -> dict[str, tuple[int, int, int]]:
        """Everything there, by its path -> mode, owner and inode."""
        found = ((path, path.lstat()) for path in sorted(self.place.rglob("*")))
        return {str(path): (one.st_mode, one.st_uid, one.st_ino) for path, one in found}


@pytest.fixture
def host(open_tmp: Path, state_dir: Path, ground: Any, ask: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(open_tmp, ask)
    monkeypatch.setenv("SAFE_GPU_POLICY", str(host.config))
    (open_tmp / "simulated").mkdir()
    (open_tmp / "simulated").chmod(0o1777)
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "simulated"))
    monkeypatch.setattr(host_files, "RULE", str(host.rule))
    monkeypatch.setattr(command_of_setup, "_SYSTEMD", ("/",))
    return host


def claim(**options: Any) -> list[int]:
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, **options) as owner:
        return owner.devices_taken


def claims(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Hold a GPU until told; say which, or why not."""
    try:
        owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, only=0)
    except safe_gpu.NotEnoughGpusError:
        say("refused")
        return
    say(owner.devices_taken)
    listen()
    owner.release_gpus()
    say("released")
    listen()


def first(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Make every lease file that is missing."""
    with HostLock(time.monotonic() + 30) as locked:
        for name in leases_of(gpu.uuid for gpu in preset("dgx-a100").gpus()):
            os.close(locked.leases.open_or_create(name))
    say("made")


# What it makes


def test_a_dry_run_prints_what_a_run_does_and_changes_nothing(host: Host, ground: Any) -> None:
    before = host.tree()
    *would, last = host.done("--dry-run")
    assert last == "nothing was changed (--dry-run)"
    assert host.tree() == before
    *did, last = host.done()
    assert did == would
    assert last == f"nothing is left to do: the state directory {host.path} is root's"
    leases = {f"{host.path}/leases/{name(uuid)}" for uuid in ground.uuids for name in (lease_name, inner_name)}
    made = {line.split()[1] for line in did}
    assert made == {str(host.path / part) for part in ("", "leases", "queue", "history", "host.lock")} | leases | {
        str(host.rule), str(host.config)
    }  # fmt: skip
    for path, (mode, uid, _) in host.tree().items():
        if Path(path).is_relative_to(host.path):
            assert (mode, uid) == (0o41777 if stat.S_ISDIR(mode) else 0o100666, 0), path
    assert host.config.read_text() == f"[host]\nstate_dir = {host.path}\n"
    before = host.tree()
    assert host.done() == [last]
    assert host.done("--dry-run") == ["nothing was changed (--dry-run)"]
    assert host.tree() == before


def test_the_rule_makes_the_same_again(host: Host) -> None:
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("there is no systemd-tmpfiles")
    host.done()
    shutil.rmtree(host.path)
    subprocess.run(["systemd-tmpfiles", "--create", host.rule], check=True, timeout=60)
    assert host.done() == [f"nothing is left to do: the state directory {host.path} is root's"]


def test_devices_that_come_later(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is split into instances, and a host gets its driver after its image was built."""
    with monkeypatch.context() as image:
        image.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
        image.setenv("PATH", str(host.place))
        done = host.run()
        assert done.returncode == 0
        assert "no GPU driver works here, so no lease files are made" in done.stderr
        assert os.listdir(host.path / "leases") == []
    host.done()
    assert len(os.listdir(host.path / "leases")) == 16
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mig-h100")
    host.done()
    names = os.listdir(host.path / "leases")
    assert [name for name in names if name.startswith("MIG-")]
    assert all(name in host.rule.read_text() for name in names if name.startswith("MIG-"))


def test_gpus_of_all_vendors(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    host.done()
    gpus = [gpu for driver in open_drivers()[0] for gpu in driver.snapshot().gpus]
    assert len({gpu.vendor for gpu in gpus}) == 2
    assert sorted(os.listdir(host.path / "leases")) == sorted(leases_of([gpu.uuid for gpu in gpus]))


@pytest.mark.parametrize("text", ["[default]\nmax_gpus = 1\n", "[host]\nstate_dir = /srv/other\n"])
def test_settings_of_the_administrator_are_left_alone(host: Host, text: str) -> None:
    host.config.parent.mkdir()
    host.config.write_text(text)
    done = host.run()
    assert done.returncode == 1
    assert f"to do: write state_dir = {host.path} below [host] in {host.config}" in done.stdout
    assert host.config.read_text() == text


def test_a_rule_of_the_administrator_is_left_alone(host: Host) -> None:
    host.rule.parent.mkdir()
    host.rule.write_text("x /tmp/safe-gpu\n")
    assert "has other lines: remove it" in host.run().stdout
    assert host.rule.read_text() == "x /tmp/safe-gpu\n"


def test_only_root(host: Host, as_user: Any) -> None:
    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        from safe_gpu.cli.commands import main

        say(main(["setup", "--state-dir", str(host.path)]))

    assert as_user(work, uid=ANNA).hear() == "78"
    assert not host.path.exists()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("relative", "write an absolute path"),
        ("/", "write an absolute path"),
        ("{}/a b", "write an absolute path"),
        ("{}/a\nd x", "write an absolute path"),
        ("{}/missing/state", "there is no directory"),
        ("{}/anna/state", "users other than root can change"),
        ("{}/file", "is not a directory"),
        ("{}/link", "is a symbolic link"),
    ],
)
def test_places_that_are_refused(host: Host, path: str, words: str) -> None:
    (host.place / "file").touch()
    (host.place / "anna").mkdir()
    os.chown(host.place / "anna", ANNA, ANNA)
    (host.place / "link").symlink_to("anna")
    before = host.tree()
    done = host.run(path=path.format(host.place))  # type: ignore[arg-type]
    assert (done.returncode, words in done.stderr) == (73, True), done
    assert host.tree() == before


# What it protects


def everything_of(host: Host) -> list[Path]:
    return [host.path, *host.path.rglob("*"), host.rule, host.config]


def attack(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Remove, rename, close and replace all that can be reached."""
    top = Path(os.environ["SAFE_GPU_DIR"])
    done = []
    for path in [*sorted(top.rglob("*"), reverse=True), top]:
        for what in (
            lambda one: one.chmod(0o600),
            lambda one: os.chown(one, ATTACKER, ATTACKER),
            lambda one: one.rename(one.with_suffix(".moved")),
            lambda one: one.rmdir() if one.is_dir() else one.unlink(),
        ):
            try:
                what(path)
                done.append(str(path))
            except OSError:
                pass
    say(done)


def test_a_neighbour_can_neither_remove_nor_close_it(host: Host, as_user: Any) -> None:
    """Claims without names have nothing but these files: each is in a network namespace of its own."""
    host.done()
    assert as_user(first, uid=ATTACKER).hear() == "made"
    with own_network():
        anna = as_user(claims, uid=ANNA)
        assert anna.hear() == "[0]"
    before = {path: path.lstat().st_ino for path in everything_of(host) if path.lstat().st_uid == 0}
    assert as_user(attack, uid=ATTACKER).hear() == "[]"
    assert {path: path.lstat().st_ino for path in everything_of(host) if path.lstat().st_uid == 0} == before
    with own_network():
        assert as_user(claims, uid=BEN).hear() == "refused"
        anna.tell()
        assert anna.hear() == "released"
        assert as_user(claims, uid=BEN).hear() == "[0]"


# What others made


def make_all(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Claim, and drain a GPU where this user owns the directory."""
    from safe_gpu.cli.commands import main

    say([claim(), main(["drain", "3", "--reason", "a fan is broken"]), main(["drain", "4", "--until", "+1h"])])


@pytest.mark.parametrize(
    ("part", "uid", "mode", "why"),
    [
        (".", ANNA, 0o1777, "belongs to 4711"),
        (".", ANNA, 0o700, "belongs to 4711"),
        (".", 0, 0o755, "has mode 0755 and is not empty"),
        ("leases", BEN, 0o1777, "belongs to 4712"),
        ("queue", ANNA, 0o1777, "belongs to 4711"),
        ("history", 0, 0o700, "has mode 0700 and is not empty"),
        ("host.lock", ANNA, 0o666, "belongs to 4711"),
    ],
)
def test_a_directory_that_root_did_not_make_is_refused(host: Host, part: str, uid: int, mode: int, why: str) -> None:
    """Nothing of it is changed. Once it is moved away, as the error says, all is made."""
    claim()
    for path in (host.path, *host.path.rglob("*")):
        os.chown(path, 0, 0)
    (host.path / part).chmod(mode)
    os.chown(host.path / part, uid, uid)
    before = host.tree()
    for options in ([], ["--dry-run"]):
        done = host.run(*options)
        assert (done.returncode, done.stdout) == (73, ""), done
        assert f"{os.path.normpath(host.path / part)} {why}: name another directory, or " in done.stderr
    assert host.tree() == before
    move = done.stderr.partition("(")[2].partition(")")[0]
    assert move == f"mv {host.path} {host.path}.old"
    subprocess.run(move, shell=True, check=True)
    host.done()


@pytest.mark.parametrize("what", ["of another user", "link", "names", "mode", "pipe"])
def test_a_lease_that_is_not_root_s_is_named_and_left(host: Host, ground: Any, what: str) -> None:
    """As of a device that is newer than the last setup."""
    host.done()
    lease, secret = host.path / "leases" / lease_name(ground.uuids[1]), host.place / "secret"
    secret.write_text("precious")
    lease.unlink()
    if what == "link":
        lease.symlink_to(secret)
    elif what == "names":
        secret.chmod(0o666)
        lease.hardlink_to(secret)
    elif what == "pipe":
        os.mkfifo(lease)
    else:
        lease.touch()
        lease.chmod(0o600 if what == "mode" else 0o666)
        os.chown(lease, *((0, 0) if what == "mode" else (BEN, BEN)))
    before = host.tree()
    done = host.run()
    why = "belongs to 4712" if what == "of another user" else "is no file with mode 0666 and one name"
    again = f"run safe-gpu setup --state-dir {host.path} again"
    assert done.returncode == 1
    assert done.stdout == f"to do: {lease} {why}: while nobody claims that GPU, remove it, and {again}\n"
    assert host.tree() == before
    lease.unlink()
    host.done()


def test_gpus_that_another_directory_closes_are_named(
    host: Host, as_user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the word of its owner, which does not count for root's directory."""
    with monkeypatch.context() as patch:
        patch.setenv("SAFE_GPU_DIR", str(host.place / "anna"))
        assert as_user(make_all, uid=ANNA).hear() == "[[0], 0, 0]"
        done = host.run()
    assert done.returncode == 1
    for name in ("drained", "windows"):
        assert f"to do: {host.place}/anna/{name} closes GPUs, and does not count in {host.path}: close" in done.stdout
    assert drained_gpus() == {}
    host.done()


# Drains


@pytest.mark.parametrize(("uid", "mode"), [(BEN, 0o644), (0, 0o666), (0, 0o1777)])
def test_a_drain_that_is_ignored_is_told(host: Host, ask: Any, ground: Any, uid: int, mode: int) -> None:
    claim()
    file = host.path / "drained"
    file.write_text(f"{ground.uuids[0]} because") if mode != 0o1777 else file.mkdir()
    file.chmod(mode)
    os.chown(file, uid, uid)
    assert drained_gpus() == {}
    for look in ("status", "doctor"):
        assert f"{file} " in ask(look).stdout
        assert "it is ignored, and drains no GPU" in " ".join(ask(look).stdout.split())


# Where GPUs are claimed


@pytest.mark.parametrize("how", ["by name", "by file"])
def test_it_refuses_while_gpus_are_claimed_in_another_directory(
    host: Host, as_user: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In one that this root does not know, or from a network namespace of its own."""
    here, elsewhere = host.path, host.place / "elsewhere"
    with own_network() if how == "by file" else contextlib.nullcontext():
        monkeypatch.setenv("SAFE_GPU_DIR", str(elsewhere))
        holder = as_user(claims, uid=ANNA)
        assert holder.hear() == "[0]"
    if how == "by name":
        monkeypatch.setenv("SAFE_GPU_DIR", str(here))
    done = host.run()
    assert (done.returncode, "GPUs are claimed or waited for in" in done.stderr) == (75, True)
    assert not host.path.exists()
    holder.tell()
    assert holder.hear() == "released"
    host.done()


def test_it_refuses_while_somebody_waits_in_another_directory(host: Host, ground: Any, command: Any) -> None:
    ground.occupy(*range(8))
    waiter = command.start("run", "--", "true")
    while "waiting" not in waiter.stderr.readline():
        assert waiter.poll() is None
    assert "1 waiter" in host.run(path=host.place / "new").stderr
    waiter.kill()


# Removal


def test_removal_leaves_no_trace_of_what_it_made(host: Host) -> None:
    before = host.tree()
    host.done()
    *would, last = host.done("--remove", "--dry-run")
    assert last == "nothing was changed (--dry-run)"
    assert host.path.exists()
    assert host.done("--remove") == would == [f"remove {path}" for path in (host.config, host.rule, host.path)]
    host.rule.parent.rmdir()
    assert host.tree() == before
    assert host.done("--remove") == []


def test_removal_leaves_what_others_wrote_and_names_it(host: Host, as_user: Any, ask: Any) -> None:
    host.done()
    assert as_user(lambda say, listen: say(claim(share="1GiB")), uid=ANNA).hear() == "[0]"
    ask("drain", "2")
    (host.path / "leases" / "notes.txt").touch()
    host.config.write_text(host.config.read_text() + "vendor = nvidia\n")
    would = [line for line in host.done("--remove", "--dry-run") if line.startswith("left")]
    left = [line.rpartition(": ")[2] for line in host.done("--remove") if line.startswith("left")]
    assert [line.rpartition(": ")[2] for line in would] == left
    (month,) = (host.path / "history").iterdir()
    kept = [host.config, host.config.parent / "drained", host.path / "leases" / "notes.txt", month]
    assert left == list(map(str, kept))
    assert sorted(path for path in host.path.rglob("*") if path.is_file()) == sorted(kept[2:])


@pytest.mark.parametrize("foreign", [False, True], ids=["a GPU of this host", "one that no driver names any more"])
def test_removal_is_refused_while_something_is_held(host: Host, as_user: Any, monkeypatch: Any, foreign: bool) -> None:
    host.done()
    with own_network():
        holder = as_user(claims, uid=ANNA)
        assert holder.hear() == "[0]"
    if foreign:
        monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    done = host.run("--remove")
    assert (done.returncode, f"in {host.path}: GPU-" in done.stderr) == (75, True)
    assert host.path.exists()
    assert host.config.exists()
    holder.tell()
    assert holder.hear() == "released"
    assert host.run("--remove").returncode == 0


def test_removal_leaves_a_directory_that_is_not_root_s(host: Host, as_user: Any) -> None:
    assert as_user(lambda say, listen: say(claim()), uid=ANNA).hear() == "[0]"
    before = host.tree()
    assert host.done("--remove") == [f"left, since setup did not write it: {host.path}"]
    assert host.tree() == before
