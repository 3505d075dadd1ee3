"""The state directory: made once for everybody, refused where it is a trap."""

import errno
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from support.findings import finding

from safe_gpu.coordination.files import shared_directory
from safe_gpu.coordination.files import state_dir as state_dir_module
from safe_gpu.coordination.files.state_dir import StateDir, write_all
from safe_gpu.coordination.state_dir import FileSystem, file_system_of, state_dir_path
from safe_gpu.errors import StateDirError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as other users")
not_for_root = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_default_path_and_a_relative_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SAFE_GPU_DIR", raising=False)
    assert state_dir_path() == "/tmp/safe-gpu"
    monkeypatch.setenv("SAFE_GPU_DIR", "")
    assert state_dir_path() == "/tmp/safe-gpu"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SAFE_GPU_DIR", "here")
    with pytest.raises(StateDirError, match="SAFE_GPU_DIR=here is relative"):
        state_dir_path()


def test_a_folder_of_ones_own_in_it_is_not_opened_up(tmp_path: Path) -> None:
    """SAFE_GPU_DIR=~, where somebody keeps a folder `queue`, and claimed here before."""
    home = tmp_path / "home"
    (home / "queue").mkdir(mode=0o700, parents=True)
    (home / "queue" / "letter").touch()
    (home / "host.lock").touch()
    home.chmod(0o700)
    with StateDir(str(home)) as root, StateDir("queue", root), StateDir("leases", root):
        pass
    assert mode_of(home) == mode_of(home / "queue") == 0o700
    assert mode_of(home / "leases") == 0o1777  # made here


def test_a_first_use_that_was_killed_before_its_chmod_is_completed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    StateDir(str(tmp_path / "state")).close()
    assert mode_of(tmp_path / "state") == 0o1777


@pytest.mark.parametrize("level", ["root", "leases", "file"])
def test_a_symbolic_link_is_never_followed(state_dir: Path, tmp_path: Path, level: str) -> None:
    target = tmp_path / "target"
    if level == "file":
        target.write_text("precious")
        (state_dir / "leases").mkdir(parents=True)
        (state_dir / "leases" / "a.lock").symlink_to(target)
    else:
        target.mkdir()
        if level == "leases":
            state_dir.mkdir()
        (state_dir if level == "root" else state_dir / level).symlink_to(target)
    with (
        pytest.raises(StateDirError, match=r"symbolic link.*SAFE_GPU_DIR") as caught,
        StateDir(str(state_dir)) as root,
        StateDir("leases", root) as leases,
    ):
        leases.open_or_create("a.lock")
    assert str(state_dir) in str(caught.value)
    assert target.is_dir() or target.read_text() == "precious"


def test_a_file_in_its_place_or_a_missing_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateDirError, match="is not a directory"):
        StateDir(str(tmp_path / "file"))
    with pytest.raises(StateDirError, match=f"{tmp_path}/none does not exist"):
        StateDir(str(tmp_path / "none" / "state"))


def test_a_fifo_in_the_place_of_a_lock_file_is_refused_unopened(state_dir: Path, monkeypatch) -> None:
    with StateDir(str(state_dir)) as root:
        os.mkfifo(state_dir / "host.lock")
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", None)
            with pytest.raises(StateDirError, match="not a regular file: ask its owner"):
                root.open("host.lock")


def test_a_file_that_may_be_somebodys_from_elsewhere_is_refused(state_dir: Path, tmp_path: Path) -> None:
    """A record would be written over somebody's file, linked or moved here from elsewhere."""
    (tmp_path / "thesis.tex").write_text("precious")
    with StateDir(str(state_dir)) as root, StateDir("leases", root) as leases:
        try:
            os.link(tmp_path / "thesis.tex", state_dir / "leases" / "a.lock")
        except OSError:
            pytest.skip("the two directories are on different file systems")
        for mode in (0o644, 0o600, 0o667, 0o4666):
            (tmp_path / "thesis.tex").chmod(mode)
            with pytest.raises(StateDirError, match=rf"a\.lock has 2 names \(hard links\) and mode {mode:04o}"):
                leases.open_or_create("a.lock")
        os.unlink(tmp_path / "thesis.tex")
        with pytest.raises(StateDirError, match=r"a\.lock has mode 4666 in place of 0666"):
            leases.open_or_create("a.lock")


def test_a_second_link_to_one_of_our_files_locks_nobody_out(state_dir: Path, open_tmp: Path, as_user) -> None:
    """Everybody may link a file of mode 0666, also where fs.protected_hardlinks is 1, and it stays for ever."""
    with StateDir(str(state_dir)) as root:
        os.close(root.open_or_create("host.lock"))
        neighbour = as_user(lambda say, listen: say(os.link(state_dir / "host.lock", open_tmp / "x")), uid=54321)
        assert neighbour.hear() == "None"
        fd = root.open("host.lock")
        assert fd is not None
        assert os.fstat(fd).st_nlink == 2
        os.close(fd)


def test_a_file_lease_blocks_nobody_and_its_owner_is_named(state_dir: Path, file_lease) -> None:
    with StateDir(str(state_dir)) as root:
        os.close(root.open_or_create("host.lock"))
        file_lease(state_dir / "host.lock", 54321)
        with pytest.raises(StateDirError, match=r"host\.lock is kept under a file lease .* owner 54321, by process"):
            root.open("host.lock")


@pytest.mark.parametrize(
    ("mode", "reason"), [(0o755, "mode 0755 and belongs to uid 0"), (0o700, "is closed to user 65534")]
)
def test_a_directory_closed_by_another_user_is_named_with_its_fix(state_dir: Path, as_user, mode, reason) -> None:
    state_dir.mkdir(mode=mode)

    def work(say, listen) -> None:
        try:
            StateDir(str(state_dir))
        except StateDirError as err:
            say(err)

    said = as_user(work, uid=65534).hear()
    assert reason in said
    assert said.endswith("set SAFE_GPU_DIR to another directory")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("file", "file is not a directory: set SAFE_GPU_DIR to another directory"),
        ("file/below", "below is not a directory: set SAFE_GPU_DIR to another directory"),
        ("fifo", "fifo is not a directory: set SAFE_GPU_DIR to another directory"),
        ("link", "link is a symbolic link, which is never followed: set SAFE_GPU_DIR to another directory"),
        ("dangling", "dangling is a symbolic link, which is never followed: set SAFE_GPU_DIR to another directory"),
        ("of root", "of root has mode 0755 and belongs to uid 0, so user 65534 cannot work in it: set SAFE_GPU_DIR to"),
        ("of root/below", "below cannot be created (Permission denied): set SAFE_GPU_DIR to another directory"),
        ("closed", "closed is closed to user 65534 (Permission denied): set SAFE_GPU_DIR to another directory"),
        ("closed/below", "below is closed to user 65534 (Permission denied): set SAFE_GPU_DIR to another directory"),
        ("home", "queue is not a directory: set SAFE_GPU_DIR to another directory"),
        ("/etc/passwd", "/etc/passwd is not a directory: set SAFE_GPU_DIR to another directory"),
        ("/dev/null", "/dev/null is not a directory: set SAFE_GPU_DIR to another directory"),
        ("/proc/state", "cannot be created (No such file or directory): set SAFE_GPU_DIR to another directory"),
    ],
)
def test_no_advice_does_harm_where_a_wrong_directory_is_named(
    open_tmp: Path, as_user, monkeypatch: pytest.MonkeyPatch, named: str, said: str
) -> None:
    """Neither in the error nor by doctor: nothing is to be removed, opened to all or mounted anew."""
    monkeypatch.setattr(shared_directory, "_CREATION_PATIENCE", 0.0)
    (open_tmp / "file").touch()
    os.mkfifo(open_tmp / "fifo")
    (open_tmp / "link").symlink_to(open_tmp / "file")
    (open_tmp / "dangling").symlink_to("nowhere")
    for name, mode in (("of root", 0o755), ("closed", 0o700), ("home", 0o1777)):
        (open_tmp / name).mkdir()
        (open_tmp / name).chmod(mode)
    (open_tmp / "home" / "queue").write_text("letters to answer")
    path = str(open_tmp / named)

    def work(say, listen) -> None:
        monkeypatch.setenv("SAFE_GPU_DIR", path)
        try:
            with StateDir(path) as root, StateDir("queue", root):
                pass
        except StateDirError as err:
            say(err)
        for check in ("state directory", "file system", "history"):
            say(finding(check).fix)

    user = as_user(work, uid=65534)
    error, *fixes = (user.hear() for _ in range(4))
    assert said in error
    for text in (error, *fixes):
        assert not re.search(r"\brm\b|remove|chmod|mount|mode 1777 or|give the directory", text)


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_moment_between_anothers_mkdir_and_chmod_is_waited_out(state_dir, as_user, monkeypatch, mode: int) -> None:
    state_dir.mkdir(mode=mode)  # root's first use, stopped in the middle
    monkeypatch.setattr(shared_directory, "_CREATION_PATIENCE", 60.0)

    def work(say, listen) -> None:
        real = os.open

        def spy(*args, **kwargs):
            os.open = real
            try:
                return real(*args, **kwargs)
            finally:
                say("tried")

        os.open = spy
        StateDir(str(state_dir)).close()
        say("in")

    other = as_user(work, uid=65534)
    assert other.hear() == "tried"
    state_dir.chmod(0o1777)
    assert other.hear() == "in"


@not_for_root
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(StateDirError, match="cannot be created"):
        StateDir(str(tmp_path / "closed" / "state"))


def test_o_creat_is_never_used_on_a_name_that_may_exist(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fs.protected_regular answers EACCES to O_CREAT on another's file in a sticky directory, even to root."""
    with StateDir(str(state_dir)) as root:
        os.close(root.open_or_create("host.lock"))
        real = os.open

        def protected(path, flags, *args, **kwargs):
            if flags & os.O_CREAT and (state_dir / os.fspath(path)).exists():
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", protected)
        os.close(root.open_or_create("host.lock"))


@pytest.fixture(params=["unnamed files", "no unnamed files"])
def unnamed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system knows O_TMPFILE, as most do."""
    real = os.open

    def old(path, flags, *args, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *args, **kwargs)

    if request.param == "no unnamed files":
        monkeypatch.setattr(os, "open", old)
    return request.param == "unnamed files"


def test_a_file_gets_its_name_when_it_is_ready(state_dir: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool) -> None:
    seen = []
    real = os.link

    def look(source, target, **kwargs):
        seen.extend(os.listdir(state_dir))
        real(source, target, **kwargs)

    monkeypatch.setattr(os, "link", look)
    umask = os.umask(0o077)
    try:
        with StateDir(str(state_dir)) as root:
            fd = root.create("a.lock")
            assert fd is not None
            assert root.is_current("a.lock", fd)
            assert root.create("a.lock") is None
            assert os.write(fd, b"x") == 1
            os.close(fd)
    finally:
        os.umask(umask)
    assert (state_dir / "a.lock").stat().st_mode & 0o777 == 0o666
    assert (seen == ["a.lock"]) is unnamed  # a process killed there leaves nothing behind
    assert os.listdir(state_dir) == ["a.lock"]


def test_two_creators_at_once_end_with_one_file(state_dir: Path, monkeypatch: pytest.MonkeyPatch, unnamed) -> None:
    with StateDir(str(state_dir)) as root:
        real = os.link

        def outrun(source, target, **kwargs):
            monkeypatch.setattr(os, "link", real)
            os.close(root.open_or_create(target))
            return real(source, target, **kwargs)

        monkeypatch.setattr(os, "link", outrun)
        fd = root.open_or_create("host.lock")
        assert root.is_current("host.lock", fd)
        os.close(fd)
        assert os.listdir(state_dir) == ["host.lock"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_nothing(state_dir: Path, monkeypatch, code: int, unnamed) -> None:
    with StateDir(str(state_dir)) as root:

        def full(*args, **kwargs):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "link", full)
        monkeypatch.setattr(shared_directory, "rename_new", lambda source, target, parent: code)
        monkeypatch.setattr(state_dir_module, "rename_new", lambda source, target, parent: code)
        with pytest.raises(StateDirError, match="no room for") as caught:
            root.open_or_create("host.lock")
        assert caught.value.errno == code
    assert os.listdir(state_dir) == []


@needs_root
def test_a_read_only_file_system(tmp_path: Path) -> None:
    mount = tmp_path / "ro"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        said = "is on a read-only file system: set SAFE_GPU_DIR to another directory"
        with pytest.raises(StateDirError, match=said):
            StateDir(str(mount / "state"))
        with pytest.raises(StateDirError, match=said), StateDir(str(mount)) as root:
            root.open_or_create("host.lock")
    finally:
        subprocess.run(["umount", mount], check=True)


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "9p"])
def test_a_network_file_system_is_refused(state_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(state_dir_module, "file_system_at", lambda path, device: FileSystem(kind))
    with pytest.raises(StateDirError, match=rf"network file system \({kind}\).*SAFE_GPU_DIR"):
        StateDir(str(state_dir))


def test_the_file_system_is_known_by_its_mount(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    expected = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    kind = file_system_of(fd).kind
    os.close(fd)
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if not any(tmp_path.resolve().is_relative_to(point) for point in points):
        assert kind == ""  # a plain chroot
        return
    assert kind.rstrip("234") == expected.split("/")[0].rstrip("234") or expected.startswith(("UNKNOWN", "overlay"))


def test_a_replaced_file_is_noticed(state_dir: Path) -> None:
    with StateDir(str(state_dir)) as root:
        fd = root.open_or_create("host.lock")
        assert root.is_current("host.lock", fd)
        (state_dir / "host.lock").unlink()
        assert not root.is_current("host.lock", fd)
        os.close(root.open_or_create("host.lock"))
        assert not root.is_current("host.lock", fd)
        os.close(fd)


def test_a_shorter_record_replaces_a_longer_one(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "record", os.O_RDWR | os.O_CREAT)
    write_all(fd, b"a long line\n", "record")
    write_all(fd, b"short\n", "record")
    assert (tmp_path / "record").read_bytes() == b"short\n"
    os.close(fd)
