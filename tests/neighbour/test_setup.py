"""``safe-gpu setup``: what is root's no neighbour removes or closes, and root is led to change nothing elsewhere."""

import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.cli import admin as command_of_setup
from safe_gpu.coordination.closed import drained_gpus
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry, remove_entry
from safe_gpu.coordination.holders import living_claims

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose directory it is")

ANNA, BEN, ATTACKER = 4711, 4712, 65534

GPU = "GPU-5c89852c"


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
def host(open_tmp: Path, state_dir: Path, ask: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host(open_tmp, ask)
    monkeypatch.setenv("SAFE_GPU_POLICY", str(host.config))
    monkeypatch.setattr(command_of_setup, "RULE", str(host.rule))
    monkeypatch.setattr(command_of_setup, "_SYSTEMD", ("/",))
    return host


def entry(place: Path, part: str = "claims", number: int = 1) -> Callable[..., None]:
    """Hold a GPU, or wait for it, until told."""

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        with Directory(str(place), part) as directory:
            said = {"gpus": {GPU: None}} if part == "claims" else {"gpus": [GPU], "nb_gpus": 1}
            name, held = make_entry(directory, number, said, by_children=True)
            say("made")
            listen()
            remove_entry(directory, name, held)
            say("removed")
            listen()

    return work


def dead_entry(say: Callable[[object], None], listen: Callable[[], str]) -> None:
    """Leave an entry as a process that was killed does."""
    with Directory(os.environ["SAFE_GPU_DIR"], "claims") as directory:
        make_entry(directory, 7, {"gpus": {GPU: None}}, by_children=True)[1].release()
    say("left")


# What it makes


def test_a_dry_run_prints_what_a_run_does_and_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")  # there is none, as in the build of an image
    monkeypatch.setenv("PATH", str(host.place))
    before = host.tree()
    *would, last = host.done("--dry-run")
    assert last == "nothing was changed (--dry-run)"
    assert host.tree() == before
    *did, last = host.done()
    assert did == would
    assert last == f"nothing is left to do: the state directory {host.path} is root's"
    parts = ("", "claims", "queue", "faults", "history", "host.lock")
    assert [line.split()[1] for line in did] == [
        *(str(host.path / part) for part in parts), str(host.rule), str(host.config)
    ]  # fmt: skip
    assert sorted(path.name for path in host.path.iterdir()) == sorted(parts[1:])
    for path, (mode, uid, _) in host.tree().items():
        if Path(path).is_relative_to(host.path):
            assert (mode, uid) == (0o41777 if stat.S_ISDIR(mode) else 0o100666, 0), path
    assert host.config.read_text() == f"[host]\nstate_dir = {host.path}\n"
    before = host.tree()
    assert host.done() == [last]
    assert host.done("--dry-run") == ["nothing was changed (--dry-run)"]
    assert host.tree() == before
    (host.path / "faults").rmdir()
    assert host.done() == [f"make {host.path}/faults", last]


def test_the_rule_makes_the_same_again(host: Host) -> None:
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("there is no systemd-tmpfiles")
    host.done()
    shutil.rmtree(host.path)
    subprocess.run(["systemd-tmpfiles", "--create", host.rule], check=True, timeout=60)
    assert host.done() == [f"nothing is left to do: the state directory {host.path} is root's"]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config", "[default]\nmax_gpus = 1\n", "to do: write state_dir = {path} below [host] in {config}"),
        ("config", "[host]\nstate_dir = /srv/other\n", "to do: write state_dir = {path} below [host] in {config}"),
        ("rule", "x /tmp/safe-gpu\n", "has other lines: remove it"),
    ],
)
def test_files_of_the_administrator_are_left_alone(host: Host, file: str, text: str, words: str) -> None:
    path: Path = getattr(host, file)
    path.parent.mkdir()
    path.write_text(text)
    done = host.run()
    assert done.returncode == 1
    assert words.format(path=host.path, config=host.config) in done.stdout
    assert path.read_text() == text


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
        ("{}/a\nd x", "write an absolute path"),
        ("{}/missing/state", "there is no directory"),
        ("{}/anna/state", "users other than root can change"),
        ("{}/file", "is no directory with mode 1777"),
        ("{}/link", "is no directory with mode 1777"),
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
    host.done()
    assert as_user(entry(host.path), uid=ANNA).hear() == "made"
    before = host.tree()
    assert as_user(attack, uid=ATTACKER).hear() == "[]"
    assert host.tree() == before
    assert [one.uid for one in living_claims()] == [ANNA]


# What others made


@pytest.mark.parametrize(
    ("part", "uid", "mode", "why"),
    [
        (".", ANNA, 0o1777, "belongs to 4711"),
        (".", 0, 0o755, "is no directory with mode 1777"),
        ("queue", ANNA, 0o1777, "belongs to 4711"),
        ("history", 0, 0o700, "is no directory with mode 1777"),
        ("host.lock", ANNA, 0o666, "belongs to 4711"),
        ("host.lock", 0, 0o600, "is no file with mode 0666 and one name"),
    ],
)
def test_what_setup_did_not_make_is_refused(host: Host, part: str, uid: int, mode: int, why: str) -> None:
    """Nothing of it is changed. Once it is moved away, as the error says, all is made."""
    host.done()
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


@pytest.mark.parametrize("what", ["link", "names", "pipe"])
def test_another_thing_in_place_of_host_lock(host: Host, what: str) -> None:
    host.done()
    lock, secret = host.path / "host.lock", host.place / "secret"
    secret.write_text("precious")
    secret.chmod(0o666)
    lock.unlink()
    {"link": lock.symlink_to, "names": lock.hardlink_to, "pipe": lambda _: os.mkfifo(lock)}[what](secret)
    before = host.tree()
    done = host.run()
    assert (done.returncode, f"{lock} is no file with mode 0666 and one name" in done.stderr) == (73, True)
    assert host.tree() == before


def test_gpus_that_another_directory_closes_are_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the word of its owner, which does not count for root's directory."""
    other = host.place / "anna"
    other.mkdir()
    (other / "closed").write_text(f"{GPU} - - - a fan is broken\n")
    for path in (other, other / "closed"):
        os.chown(path, ANNA, ANNA)
    with monkeypatch.context() as patch:
        patch.setenv("SAFE_GPU_DIR", str(other))
        assert drained_gpus() == {GPU: "drained by 4711: a fan is broken"}
        done = host.run()
    assert done.returncode == 1
    assert f"to do: {other}/closed closes GPUs, and does not count in {host.path}: close" in done.stdout
    assert drained_gpus() == {}
    host.done()


# Where GPUs are claimed or waited for


TOLD = {"claims": GPU, "queue": "1 waiter"}


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("part", TOLD)
def test_it_refuses_while_somebody_claims_or_waits(host: Host, as_user: Any, part: str, remove: bool) -> None:
    """In the directory that is to be removed, or in the one that is used now."""
    if remove:
        host.done()
    holder = as_user(entry(host.path, part), uid=ANNA)
    assert holder.hear() == "made"
    before = host.tree()

    def run() -> subprocess.CompletedProcess[str]:
        return host.run("--remove") if remove else host.run(path=host.place / "new")

    done = run()
    assert done.returncode == 75
    assert f"GPUs are claimed or waited for in {host.path}: {TOLD[part]}: " in done.stderr
    assert host.tree() == before
    holder.tell()
    assert holder.hear() == "removed"
    assert run().returncode == 0


# Removal


def test_removal_leaves_no_trace_of_what_it_made(host: Host, as_user: Any) -> None:
    before = host.tree()
    assert as_user(dead_entry, uid=ANNA).hear() == "left"
    assert host.done("--remove") == [f"left, since setup did not write it: {host.path}"], "it is Anna's"
    shutil.rmtree(host.path)
    assert host.tree() == before
    host.done()
    assert as_user(dead_entry, uid=ANNA).hear() == "left"
    *would, last = host.done("--remove", "--dry-run")
    assert last == "nothing was changed (--dry-run)"
    assert os.listdir(host.path / "claims") != []
    assert host.done("--remove") == would == [f"remove {path}" for path in (host.config, host.rule, host.path)]
    host.rule.parent.rmdir()
    assert host.tree() == before
    assert host.done("--remove") == []


def test_removal_leaves_what_others_wrote_and_names_it(host: Host, as_user: Any) -> None:
    host.done()
    assert as_user(dead_entry, uid=ANNA).hear() == "left"
    kept = [host.config, host.config.parent / "closed"]
    kept += [host.path / name for name in ("claims/1.txt", "faults/notes", "history/2026-11.jsonl", "notes.txt")]
    gone = [host.path / name for name in (f"faults/{GPU}.4711", f"history/{GPU}.seen", "history/.x")]
    for path in (*kept[1:], *gone):
        path.write_text("of use")
    directory = host.path / "history/.made"
    directory.mkdir()
    kept.insert(-2, directory)
    host.config.write_text(host.config.read_text() + "vendor = nvidia\n")
    would = [line for line in host.done("--remove", "--dry-run") if line.startswith("left")]
    left = [line for line in host.done("--remove") if line.startswith("left")]
    assert would == left == [f"left, since setup did not write it: {path}" for path in kept]
    assert {path for path in host.path.rglob("*") if path.is_file()} == {*kept[2:]} - {directory}
