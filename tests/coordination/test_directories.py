"""The state directory and those in it: they appear finished, are the same for everybody, stay while they are in
use, and are refused where they are a trap."""

import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.claims import claim
from support.findings import finding
from support.forks import CAN_TRACE, each_point
from support.processes import mounted
from support.real import long

FIRST, SECOND = 54321, 54322

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")


def test_the_default_path_and_a_relative_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SAFE_GPU_DIR", raising=False)
    assert api.state_dir_path() == "/tmp/safe-gpu"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFE_GPU_DIR", "here")
    with pytest.raises(api.StateDirError, match="SAFE_GPU_DIR=here is relative"):
        api.state_dir_path()


@needs_root
def test_who_can_remove_the_entries_of_another_user(tmp_path: Path) -> None:
    """The owner of a directory can remove what is in it, sticky bit or not. Root can anyhow."""
    claims = tmp_path / "claims"
    claims.mkdir()
    for owner, owner_of_claims, remover in (
        (0, 0, None),
        (FIRST, 0, None),
        (SECOND, 0, SECOND),
        (0, SECOND, SECOND),
        (FIRST, SECOND, SECOND),
    ):
        os.chown(tmp_path, owner, -1)
        os.chown(claims, owner_of_claims, -1)
        assert api.remover_of(str(tmp_path), FIRST) == remover
    assert api.remover_of(str(tmp_path / "missing"), FIRST) is None


# How they are made


def make_all(path: Path) -> None:
    with api.SharedDirectory(str(path)) as root, api.Directory(root, "claims"):
        os.close(root.open_known(api.HOST_LOCK, make=True)[0])


@long
@needs_root
@pytest.mark.skipif(not CAN_TRACE, reason="cannot trace processes here")
def test_a_directory_whose_maker_is_killed_at_any_step_is_open_to_others(open_tmp: Path, as_user: Any) -> None:
    paths = [open_tmp / "0"]

    def make() -> None:
        os.umask(0o077)
        os.setresuid(FIRST, FIRST, FIRST)
        make_all(paths[-1])

    def work(say: Any, listen: Any) -> None:
        make_all(paths[-1])
        say("works")

    for stop in each_point(make):
        assert as_user(work, uid=SECOND).hear() == "works", f"killed at {stop}"
        paths.append(open_tmp / str(len(paths)))
    assert len(paths) > 10


def test_those_who_come_together_get_the_same_directory(tmp_path: Path) -> None:
    """One that is empty is not replaced: who has it open could make nothing in it."""

    def make(path: Path, start: Barrier) -> tuple[int, int]:
        start.wait()
        with api.SharedDirectory(str(path)) as directory:
            return directory.file

    with ThreadPoolExecutor(4) as pool:
        for number in range(300):
            files = {*pool.map(make, [tmp_path / str(number)] * 4, [Barrier(4)] * 4)}
            assert len(files) == 1, number


@pytest.mark.parametrize("calls", ["renameat2", "rename"])
def test_whoever_is_faster_keeps_the_name(state_dir: Path, monkeypatch: pytest.MonkeyPatch, calls: str) -> None:
    if calls == "rename":  # an older C library
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: object())
    api.make_directory(str(state_dir), str(state_dir), None)
    (state_dir / "precious").touch()
    api.make_directory(str(state_dir), str(state_dir), None)
    assert os.listdir(state_dir) == ["precious"]
    assert os.listdir(state_dir.parent) == ["state"]


def test_the_mode_of_one_that_was_there_stays(tmp_path: Path) -> None:
    """SAFE_GPU_DIR=~, where somebody keeps a folder `queue`, and claimed here before."""
    home = tmp_path / "home"
    (home / "queue").mkdir(mode=0o700, parents=True)
    (home / "faults").mkdir(mode=0o755)
    (home / "queue" / "letter").touch()
    home.chmod(0o700)
    for part in api.PARTS:
        api.Directory(str(home), part).close()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "queue", home / "faults", home / "claims")]
    assert modes == [0o700, 0o700, 0o755, 0o1777]  # the last one was made here


# What is refused


FOR_ALL = ": set SAFE_GPU_DIR, for all users, to another directory"
NO_DIRECTORY = f" is not a directory, or it is a symbolic link, which is never followed{FOR_ALL}"


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("file", f"file{NO_DIRECTORY}"),
        ("of root", f"of root has mode 0755 and belongs to uid 0, so user 65534 cannot work in it{FOR_ALL}"),
        ("closed", f"closed is closed to user 65534 (Permission denied){FOR_ALL}"),
        ("home", f"queue{NO_DIRECTORY}"),
        ("/proc/state", f"cannot be created (No such file or directory){FOR_ALL}"),
    ],
)
def test_no_advice_does_harm_where_a_wrong_directory_is_named(
    open_tmp: Path, as_user, monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    """Neither in the error nor by doctor: nothing is to be removed, opened to all or mounted anew."""
    (open_tmp / "file").touch()
    for name, mode in (("of root", 0o755), ("closed", 0o700), ("home", 0o1777)):
        (open_tmp / name).mkdir()
        (open_tmp / name).chmod(mode)
    (open_tmp / "home" / "queue").write_text("letters to answer")
    path = str(open_tmp / named)

    def work(say, listen) -> None:
        monkeypatch.setenv("SAFE_GPU_DIR", path)
        try:
            api.Directory(path, "queue").close()
        except api.StateDirError as err:
            say(err)
        for check in ("state directory", "file locks", "SAFE_GPU variables"):
            say(finding(check).fix)

    user = as_user(work, uid=65534)
    error, *fixes = (user.hear() for _ in range(4))
    assert said in error
    for text in (error, *fixes):
        assert not re.search(r"\brm\b|remove|chmod|mount|mode 1777 or|give the directory", text)


@needs_root
def test_a_read_only_file_system(tmp_path: Path) -> None:
    said = f"is on a read-only file system{FOR_ALL}"
    with mounted(tmp_path / "ro", options="ro") as mount:
        with pytest.raises(api.StateDirError, match=said):
            api.SharedDirectory(str(mount / "state"))
        with pytest.raises(api.StateDirError, match=said):
            api.Directory(str(mount), "claims")


def test_a_network_file_system_is_refused(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.directory, "file_system_at", lambda path, device: api.FileSystem("fuse.sshfs"))
    with pytest.raises(api.StateDirError, match=r"network file system \(fuse.sshfs\).*SAFE_GPU_DIR"):
        api.SharedDirectory(str(state_dir))


# host.lock


@pytest.fixture
def root(state_dir: Path) -> Iterator[api.SharedDirectory]:
    with api.SharedDirectory(str(state_dir)) as directory, api.Directory(directory, "claims"):
        yield directory


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.mknod(path, stat.S_IFSOCK | 0o666)])
def test_what_is_no_file_is_refused(state_dir: Path, root: api.SharedDirectory, make: Callable[[Path], None]) -> None:
    make(state_dir / api.HOST_LOCK)
    for flags in (api.OPEN_FILE, api.OPEN_FILE | os.O_WRONLY):
        with pytest.raises(api.StateDirError, match="ask its owner"):
            root.open_known(api.HOST_LOCK, flags, make=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("rm -r state; ln -s target state", "symbolic link.*SAFE_GPU_DIR"),
        ("rm -r state/claims; ln -s ../target state/claims", "symbolic link.*SAFE_GPU_DIR"),
        ("ln -s ../thesis state/host.lock", "symbolic link.*SAFE_GPU_DIR"),
        ("chmod 644 thesis; ln thesis state/host.lock", r"host\.lock has 2 names \(hard links\) and mode 0644"),
        ("touch state/host.lock; chmod 4666 state/host.lock", r"host\.lock has mode 4666 in place of 0666"),
    ],
)
def test_what_may_be_somebodys_from_elsewhere_is_refused(open_tmp: Path, root: object, make: str, said: str) -> None:
    """It would be locked, by everybody here."""
    (open_tmp / "target").mkdir()
    (open_tmp / "thesis").write_text("precious")
    subprocess.run(make, shell=True, check=True, cwd=open_tmp)
    with pytest.raises(api.StateDirError, match=said) as caught:
        make_all(open_tmp / "state")
    assert str(open_tmp / "state") in str(caught.value)
    assert (os.listdir(open_tmp / "target"), (open_tmp / "thesis").read_text()) == ([], "precious")


def test_a_second_link_to_it_locks_nobody_out(
    state_dir: Path, open_tmp: Path, root: api.SharedDirectory, as_user
) -> None:
    """Everybody may link a file of mode 0666, also where fs.protected_hardlinks is 1, and it stays for ever."""
    os.close(root.open_known(api.HOST_LOCK, make=True)[0])
    neighbour = as_user(lambda say, listen: say(os.link(state_dir / api.HOST_LOCK, open_tmp / "x")), uid=FIRST)
    assert neighbour.hear() == "None"
    fd = root.open_known(api.HOST_LOCK, make=True)[0]
    assert os.fstat(fd).st_nlink == 2
    os.close(fd)


def test_o_creat_is_never_used_on_a_name_that_may_exist(
    state_dir: Path, root: api.SharedDirectory, monkeypatch
) -> None:
    """fs.protected_regular answers EACCES to O_CREAT on another's file in a sticky directory, even to root."""
    os.close(root.open_known(api.HOST_LOCK, make=True)[0])
    real = os.open

    def protected(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", protected)
    os.close(root.open_known(api.HOST_LOCK, make=True)[0])


def test_two_that_make_it_at_once_end_with_one_file(state_dir: Path, root: api.SharedDirectory, monkeypatch) -> None:
    real = os.link
    fast: list[int] = []

    def outrun(*args: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "link", real)
        fast.append(root.open_known(api.HOST_LOCK, make=True)[0])
        real(*args, **options)

    monkeypatch.setattr(os, "link", outrun)
    fd = root.open_known(api.HOST_LOCK, make=True)[0]
    assert os.path.samestat(os.fstat(fd), os.fstat(fast[0]))
    assert sorted(os.listdir(state_dir)) == ["claims", api.HOST_LOCK]
    for one in (fd, *fast):
        os.close(one)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_nothing(
    state_dir: Path, root: api.SharedDirectory, monkeypatch, code: int
) -> None:
    full = Mock(side_effect=OSError(code, os.strerror(code)))
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(api.StateDirError, match="no room for") as caught:
        root.open_known(api.HOST_LOCK, make=True)
    assert caught.value.errno == code
    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(api.StateDirError, match="no room for"):
        api.make_directory("queue", str(state_dir / "queue"), root.fd)
    assert os.listdir(state_dir) == ["claims"]


# Cleaners of /tmp stay out while somebody claims or waits: the real systemd-tmpfiles


TMPFILES = shutil.which("systemd-tmpfiles")


@pytest.fixture
def clean(state_dir: Path) -> Callable[[], None]:
    """Clean the directory that the state directory lies in, as systemd does to /tmp; an age of 0 makes all old."""
    if TMPFILES is None:
        pytest.skip("needs systemd-tmpfiles")
    rules = state_dir.parent / "rules.conf"
    rules.write_text(f"d {state_dir.parent} - - - 0\nx {rules}\n")

    def run() -> None:
        (state_dir.parent / "old").mkdir()
        done = subprocess.run([str(TMPFILES), "--clean", str(rules)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert not (state_dir.parent / "old").exists(), "the cleaner does its work"

    return run


def test_who_waits_keeps_cleaners_out(state_dir: Path, clean, dgx, child, eventually) -> None:
    dgx.hold(*range(8))
    waiter = child("import safe_gpu; safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), timeout=60); say('got it')")
    eventually(lambda: len(dgx.tickets()) == 1)
    before = dgx.tickets()
    clean()
    assert dgx.tickets() == before
    dgx.let_go()
    assert waiter.hear() == "got it"


@pytest.mark.parametrize(
    "rest",
    [
        "say('there'); listen()",
        "owner.keep_across_exec(); os.execv('/bin/sh', ['sh', '-c', 'echo there; read line'])",
        "if os.fork(): os._exit(0)\nsay('there'); listen()",
    ],
    ids=["the claim itself", "the command of run", "a forked child that lives on"],
)
def test_who_has_a_claim_keeps_cleaners_out(state_dir: Path, clean, child: Any, eventually: Any, rest: str) -> None:
    work = "import os, safe_gpu\nowner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None)\n"
    holder = child(work + rest)
    assert holder.hear() == "there"
    clean()
    assert len(os.listdir(state_dir / "claims")) == 1
    holder.tell()
    eventually(lambda: not api.living_claims())
    clean()
    assert not (state_dir / "host.lock").exists(), "after the claim it is cleaned"


def test_the_directory_is_locked_for_exactly_as_long_and_a_cleaner_at_work_is_not_waited_for(state_dir: Path) -> None:
    with claim(2):
        fd = os.open(state_dir, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    claim(2).release_gpus()
    os.close(fd)


# A file that is replaced


def test_a_file_is_replaced_by_all_of_its_content_or_stays(tmp_path: Path, child: Any) -> None:
    """Where there is room for its beginning alone, write(2) tells no error."""
    code = f"""
import os, resource, signal
from safe_gpu.coordination.directory import replace_file
directory = os.open({str(tmp_path)!r}, os.O_RDONLY)
replace_file(directory, "file", b"before")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
try:
    replace_file(directory, "file", bytes(1000))
except OSError as err:
    print(err.strerror)
"""
    assert child(code).finish() == "File too large\n"
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"before")]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644
