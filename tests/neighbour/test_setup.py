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
from safe_gpu.coordination.leases.drained import all_windows, drained_gpus
from safe_gpu.coordination.leases.file_names import inner_name, lease_name, leases_of
from safe_gpu.coordination.locks.host_lock import HostLock
from safe_gpu.coordination.setup import state_dir
from safe_gpu.drivers import open_drivers
from safe_gpu.drivers.presets import preset

from .conftest import exchange

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


def test_what_a_neighbour_made_first_is_taken_over_under_a_claim(host: Host, as_user: Any, ground: Any) -> None:
    assert as_user(first, uid=ATTACKER).hear() == "made"
    with own_network():
        assert as_user(claims, uid=ANNA).hear() == "[0]"
    done = host.done()
    assert f"take over {host.path} (of nobody, mode 1777)" in done
    assert f"take over {host.path}/leases/{lease_name(ground.uuids[0])} (of nobody)" in done
    assert as_user(attack, uid=ATTACKER).hear() == "[]"
    with own_network():
        assert as_user(claims, uid=BEN).hear() == "refused"


# What root is not led to change


def test_what_may_be_somebody_s_from_elsewhere_is_skipped_and_named(host: Host, as_user: Any, ground: Any) -> None:
    assert as_user(lambda say, listen: say(claim()), uid=ANNA).hear() == "[0]"
    leases = host.path / "leases"
    secret, shared = host.place / "secret", host.place / "shared"
    for path, mode in ((secret, 0o600), (shared, 0o666)):
        path.write_text("precious")
        path.chmod(mode)
        os.chown(path, BEN, BEN)
    names = [leases / lease_name(uuid) for uuid in ground.uuids]
    names[1].symlink_to(secret)
    names[2].hardlink_to(secret)
    names[3].hardlink_to(shared)
    os.mkfifo(names[4])
    shutil.copy(secret, names[5])
    names[5].chmod(0o600)
    os.chown(names[5], BEN, BEN)
    before = {path: path.lstat() for path in (secret, shared, *names[1:6])}
    done = host.run()
    assert done.returncode == 1
    for path, words in zip(
        names[1:6], ("is a link", "2 names", "2 names", "no regular file", "mode 0600"), strict=True
    ):
        (line,) = [line for line in done.stdout.splitlines() if str(path) in line]
        assert line.startswith("to do: ")
        assert words in line
        assert line.endswith(f"remove it, and run safe-gpu setup --state-dir {host.path} again")
    for path, status in before.items():
        assert (path.lstat().st_mode, path.lstat().st_uid) == (status.st_mode, status.st_uid)
    assert names[0].stat().st_uid == names[6].stat().st_uid == 0


@pytest.mark.parametrize("part", ["", "leases", "history"])
def test_a_directory_that_is_closed_and_not_empty_is_not_opened(host: Host, as_user: Any, part: str) -> None:
    assert as_user(lambda say, listen: say(claim()), uid=ANNA).hear() == "[0]"
    (host.path / part).chmod(0o700)
    done = host.run()
    assert done.returncode == 1
    way_out = "remove it" if part else "choose another --state-dir"
    assert f"{host.path / part} has mode 0700 and is not empty: {way_out}" in done.stdout
    assert (host.path / part).stat().st_mode & 0o7777 == 0o700
    assert (host.path / part).stat().st_uid == ANNA


@pytest.mark.parametrize("part", [".", "leases", "host.lock"])
@pytest.mark.parametrize("place", range(1, 13))
def test_what_its_owner_replaces_meanwhile_leads_nowhere(
    host: Host, as_user: Any, monkeypatch: pytest.MonkeyPatch, part: str, place: int
) -> None:
    """By a link to another directory, in which there is all that setup looks for, after the n-th system call."""
    victim = host.place / "victim"
    for name in (".", "leases", "queue", "history"):
        (victim / name).mkdir()
        (victim / name).chmod(0o1777)
    (victim / "host.lock").touch()
    (victim / "host.lock").chmod(0o666)
    for path in (victim, *victim.iterdir()):
        os.chown(path, BEN, BEN)
    assert as_user(lambda say, listen: say(claim()), uid=ANNA).hear() == "[0]"
    trap = host.place / "trap"
    trap.symlink_to(victim / part)
    calls: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(function.__name__)
            if len(calls) == place:
                assert exchange(host.path / part, trap) == 0
            return function(*args, **options)

        return call

    def carry_out(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            for name in ("open", "fstat", "stat", "fchown", "fchmod"):
                patch.setattr(os, name, counted(getattr(os, name)))
            state_dir.carry_out(*arguments)

    monkeypatch.setattr(command_of_setup, "carry_out", carry_out)
    assert host.run().returncode in (0, 1, 73)
    assert len(calls) >= place
    assert {path.stat().st_uid for path in (victim, *victim.iterdir())} == {BEN}


# Drains


def test_a_drain_outlives_the_change_of_the_owner(host: Host, as_user: Any, ask: Any, ground: Any) -> None:
    def drain(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        from safe_gpu.cli.commands import main

        claim()
        say(main(["drain", "3", "--reason", "a fan is broken"]))

    assert as_user(drain, uid=ANNA).hear() == "0"
    assert f"write {host.config.parent}/drained: {ground.uuids[3]} 4711: a fan is broken" in host.done()
    assert drained_gpus() == {ground.uuids[3]: "drained by root: 4711: a fan is broken"}
    with pytest.raises(safe_gpu.NotEnoughGpusError, match="a fan is broken"):
        claim(only=3)
    assert not (host.path / "drained").exists()
    assert len(host.done()) == 1
    assert ask("resume", "3").returncode == 0
    assert claim(only=3) == [3]


def test_a_window_outlives_the_change_of_the_owner(host: Host, as_user: Any, ground: Any) -> None:
    def reserve(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        from safe_gpu.cli.commands import main

        claim()
        say(main(["drain", "3", "--until", "+1h", "--reason", "dust"]))

    assert as_user(reserve, uid=ANNA).hear() == "0"
    [before] = all_windows()
    assert f"write {host.config.parent}/windows: 1 window" in host.done()
    assert all_windows() == (before._replace(by="root"),)
    assert not (host.path / "windows").exists()
    assert len(host.done()) == 1


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
