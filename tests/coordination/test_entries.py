"""Entries: real locks of real processes and users, deaths at every system call, and files that a neighbour made."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.actor import Actor
from support.entries import remove_entry
from support.forks import CAN_TRACE, each_point
from support.processes import mounted

USER, NEIGHBOUR = 4711, 4712
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to play other users")
CLAIM = {"gpus": {"GPU-a": None}}


@pytest.fixture
def claims(open_tmp: Path) -> Iterator[api.Directory]:
    with api.Directory(str(open_tmp), "claims") as directory:
        yield directory


@pytest.fixture(params=["OFD", "flock"])
def locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of lock: of a kernel that has those of open file descriptions, and of one that has not."""
    if request.param == "flock":
        monkeypatch.setattr(api.locks, "ofd_locks", lambda: False)
    return str(request.param)


def held_by_another(directory: api.Directory) -> tuple[Actor, str]:
    """A process that holds an entry, and the entry's name."""
    holder = Actor(lambda line: (line.send(api.make_entry(directory, 1, CLAIM, by_children=True)[0]), line.recv()))
    return holder, holder.hear()


def look(directory: api.Directory) -> list[api.Entry]:
    return api.Entries(directory).look()


def place(directory: api.Directory, name: str, content: bytes = b"", mode: int = 0o644) -> Path:
    path = Path(directory.path) / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


# What an entry says


def test_an_entry_is_read_as_it_was_written(claims: api.Directory) -> None:
    """One of a later version counts by the keys that are known."""
    said = {
        "gpus": {"GPU-a": 20 << 30, "GPU-b": None}, "parts": {"GPU-a": 3}, "display": True, "token": "t", "inside": "i",
        "pid": 7, "start": 8, "pidns": 9, "host": "gpu1", "job": "4711.3", "command": "train", "since": 1.5,
        "until": 2.5, "queued": 0.5,
    }  # fmt: skip
    name, held = api.make_entry(claims, 12, {**said, "cpus": [1]}, by_children=True)
    (found,) = look(claims)
    assert {key: getattr(found, key) for key in said} == said
    assert (found.number, found.name, found.uid, found.version) == (12, name, os.geteuid(), 1)
    assert found.more == {"waited": None, "of": None}
    assert (Path(claims.path) / name).stat().st_mode & 0o7777 == 0o644
    remove_entry(claims, name, held)
    assert os.listdir(claims.fd) == []
    _, held = api.make_entry(claims, 1, {**CLAIM, "v": 7, "since": "soon", "new": {}}, by_children=True)
    (found,) = look(claims)
    assert (found.version, dict(found.gpus), found.since) == (7, {"GPU-a": None}, None)
    held.release()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 9999, b"\xff", b'{"v": 1}', b'{"v": 1, "gpus": ["a"]}', b'{"gpus": {"a": 1}, "nb_gpus": 1}',
    ],
)  # fmt: skip
def test_nonsense_is_ignored_and_reported(claims: api.Directory, content: bytes) -> None:
    path = place(claims, "1.00000000000000aa", content)
    entries = api.Entries(claims)
    with path.open("r+b") as file:
        api.entry.lock(file.fileno())
        assert entries.look() == []
        assert list(entries.ignored) == [path.name]


# Who lives


def test_an_entry_that_is_dead_stays_dead(claims: api.Directory, locks: str) -> None:
    """Whatever lock a neighbour, or its own user, takes on it now."""
    name, held = api.make_entry(claims, 1, CLAIM, by_children=True)
    entries = api.Entries(claims)
    assert [one.name for one in entries.look()] == [name]
    assert api.is_alive(claims, name)
    held.release()
    assert entries.look() == []
    assert not api.is_alive(claims, name)
    with (Path(claims.path) / name).open() as file:
        if locks == "OFD":
            fcntl.flock(file, fcntl.LOCK_EX)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, api.locks._QUESTION)
        assert look(claims) == []
    assert [entries.recheck(one) for one in (name, "2.0000000000000000")] == [None, None], "the other was never there"
    unfinished = place(claims, f".{'0' * 16}")  # it may be about to get its name
    assert entries.look() == []
    entries.remove_dead()
    assert os.listdir(claims.fd) == [unfinished.name]


def test_a_child_that_outlives_its_parent_keeps_a_claim(claims: api.Directory, locks: str, eventually: Any) -> None:
    def work(line: Any) -> None:
        for number, by_children in ((1, True), (2, False)):
            api.make_entry(claims, number, CLAIM, by_children=by_children)
        line.send(os.fork() or signal.pause())
        line.recv()

    parent = Actor(work)
    child = parent.hear()
    parent.end()
    try:
        eventually(lambda: [one.number for one in look(claims)] == [1])
    finally:
        os.kill(child, signal.SIGKILL)
    eventually(lambda: look(claims) == [])


def test_a_forked_child_gives_nothing_back_and_keeps_nothing_that_was_released(
    claims: api.Directory, locks: str
) -> None:
    name, held = api.make_entry(claims, 1, CLAIM, by_children=True)
    child = Actor(lambda line: (line.send(remove_entry(claims, name, held)), line.recv()))
    assert child.hear() is None
    assert api.is_alive(claims, name)
    child.end()
    copy = Actor(lambda line: (line.send("up"), line.recv()))
    assert copy.hear() == "up"
    held.release()
    assert not api.is_alive(claims, name)
    copy.end()


# Sleeping


@pytest.mark.parametrize("seconds", [None, 600.0])
def test_a_sleeper_wakes_when_the_process_is_killed(claims: api.Directory, locks: str, seconds: float | None) -> None:
    holder, name = held_by_another(claims)
    with ThreadPoolExecutor(1) as threads:
        sleep = threads.submit(api.sleep_until_dead, claims, name, seconds)
        assert not wait([sleep], 0.1).done
        holder.end()
        sleep.result(60)
    assert not api.is_alive(claims, name)


def test_a_handler_that_raises_reaches_the_program_of_a_sleeper(claims: api.Directory, locks: str) -> None:
    """TimeoutError is an OSError, as a lock that cannot be had is."""
    name, held = api.make_entry(claims, 1, CLAIM, by_children=False)

    def work(line: Any) -> None:
        signal.signal(signal.SIGALRM, Mock(side_effect=TimeoutError("an alarm of the program's own")))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            api.sleep_until_dead(claims, name, 600.0)
        except TimeoutError as err:
            line.send(str(err))

    sleeper = Actor(work)
    assert sleeper.hear() == "an alarm of the program's own"
    sleeper.end()
    held.release()


# Deaths


@pytest.mark.skipif(not CAN_TRACE, reason="cannot trace processes here")
def test_death_at_any_system_call_leaves_no_living_entry(claims: api.Directory, monkeypatch) -> None:
    """Killed while it makes, keeps across exec, or removes an entry; the next look of its user removes what is left."""
    monkeypatch.setattr(api.entries, "UNFINISHED_FOR", -1.0)

    def work() -> None:
        name, held = api.make_entry(claims, api.Entries(claims).next_number, CLAIM, by_children=True)
        api.keep_across_exec([held])
        remove_entry(claims, name, held)

    points = 0
    for _ in each_point(work):
        points += 1
        entries = api.Entries(claims)
        assert entries.look() == []
        assert entries.ignored == {}
        entries.remove_dead()
        assert os.listdir(claims.fd) == []
    assert points > 20


def test_on_other_file_systems(tmp_path: Path) -> None:
    """A tmpfs, and an overlay on it, since it cannot lie on another overlay, as of a container."""
    with mounted(tmp_path / "below") as below:
        look_at_an_entry(below)
        lower, upper, work = (below / name for name in ("lower", "upper", "work"))
        for directory in (lower, upper, work):
            directory.mkdir()
        with mounted(below / "state", "overlay", f"lowerdir={lower},upperdir={upper},workdir={work}") as state:
            look_at_an_entry(state)


def look_at_an_entry(place: Path) -> None:
    with api.Directory(str(place), "claims") as claims:
        (holder, name), entries = held_by_another(claims), api.Entries(claims)
        for _ in range(2):
            assert [one.name for one in entries.look()] == [name]
        holder.end()
        assert entries.look() == []
        entries.remove_dead()
        assert os.listdir(claims.fd) == []


# Numbers


@pytest.mark.parametrize(
    ("names", "number"),
    [("", 1), ("1 7", 8), ("5 999999999999999999", 6), ("9999999", 10**7), ("10000002 01 +3 -1 1e3", 1)],
)
def test_the_next_number(claims: api.Directory, names: str, number: int) -> None:
    for name in names.split():
        place(claims, f"{name}.00000000000000aa")
    entries = api.Entries(claims)
    entries.look()
    assert entries.next_number == number
    for name in names.split()[-1:]:
        os.unlink(f"{name}.00000000000000aa", dir_fd=claims.fd)
    entries.look()
    assert entries.next_number == (2 if names == "1 7" else 6 if names[0:1] == "5" else 1)


# A neighbour


HOSTILE = {
    "symbolic link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "writable by its group": lambda path: path.chmod(0o664),
    "setuid": lambda path: path.chmod(0o4646),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_entry_is_ignored(claims: api.Directory, kind: str) -> None:
    path = place(claims, "1.00000000000000aa", json.dumps({"v": 1, **CLAIM}).encode())
    with path.open("r+b") as file:
        api.entry.lock(file.fileno())
        for mode in (0o600, 0o400, 0o755):  # nobody hides a claim by chmod -R
            path.chmod(mode)
            assert len(look(claims)) == 1
        HOSTILE[kind](path)
        assert look(claims) == []


def test_only_the_owner_of_an_entry_can_change_it(claims: api.Directory, as_user: Any) -> None:
    """A neighbour can neither write nor lock nor remove an entry, nor let a dead one live."""
    name, held = api.make_entry(claims, 1, CLAIM, by_children=True)
    _, dead = api.make_entry(claims, 2, CLAIM, by_children=True)
    dead.release()
    path = claims.path

    def attack(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        told = set()
        for one in (f"{path}/{name}" for name in os.listdir(path)):
            fd = os.open(one, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_SH)
            for act, *arguments in (
                (api.entry.lock, fd),
                (os.open, one, os.O_RDWR),
                (os.unlink, one),
                (os.rename, one, f"{path}/3.{'0' * 16}"),
                (os.chmod, one, 0o666),
            ):
                with pytest.raises(OSError) as refused:
                    act(*arguments)
                told.add(errno.errorcode[refused.value.errno])
        say(" ".join(sorted(told)))
        listen()

    assert as_user(attack, uid=USER).hear() == "EACCES EBADF EPERM"
    assert [one.name for one in look(claims)] == [name]
    remove_entry(claims, name, held)


def test_an_entry_with_many_names_counts_once_and_outlives_each(claims: api.Directory, monkeypatch) -> None:
    name, held = api.make_entry(claims, 1, CLAIM, by_children=False)
    for number in range(2, 30):
        os.link(Path(claims.path) / name, Path(claims.path) / f"{number}.{'0' * 16}")
    entries = api.Entries(claims)
    assert [one.name for one in entries.look()] == [name]
    assert [one.name for one in entries.look()] == [name]
    for number in range(1, 29):
        os.unlink(entries.look()[0].name, dir_fd=claims.fd)
        assert [one.number for one in entries.look()] == [number + 1]
    held.release()
    assert entries.look() == []


@pytest.fixture
def on_ext4(tmp_path: Path) -> Iterator[api.Directory]:
    """The claims on a file system that gives the inode number of a removed file to the next one."""
    image = tmp_path / "image"
    image.touch()
    os.truncate(image, 8 << 20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("needs mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with (
        mounted(tmp_path / "ext4", "ext4", "loop", source=image) as place,
        api.Directory(str(place), "claims") as directory,
    ):
        yield directory


def make_of(directory: api.Directory, uid: int, number: int, said: Mapping[str, Any] = CLAIM) -> tuple[str, api.Held]:
    """A living entry of that user."""
    name, held = api.make_entry(directory, number, said, by_children=False)
    os.fchown(held.fd, uid, uid)
    return name, held


def inode_of(directory: api.Directory, name: str) -> int:
    return os.stat(name, dir_fd=directory.fd).st_ino


@needs_root
@pytest.mark.parametrize("is_known", [True, False])
def test_an_inode_number_that_comes_again_with_the_claim_of_another_user_hides_nobody(
    on_ext4: api.Directory, is_known: bool
) -> None:
    """A neighbour puts another file in the place of its own, whose number another user's claim gets."""
    name, held = make_of(on_ext4, NEIGHBOUR, 1)
    entries = api.Entries(on_ext4)
    if is_known:
        assert [one.name for one in entries.look()] == [name]
    before = inode_of(on_ext4, name)
    other, held_too = make_of(on_ext4, NEIGHBOUR, 2, {"gpus": {"GPU-b": None}})
    os.rename(other, name, src_dir_fd=on_ext4.fd, dst_dir_fd=on_ext4.fd)
    held.release()
    honest, held_by_victim = make_of(on_ext4, USER, 3)
    assert inode_of(on_ext4, honest) == before
    replaced, found = entries.look()
    assert (replaced.name, replaced.uid, [*replaced.gpus]) == (name, NEIGHBOUR, ["GPU-b"])
    assert (found.name, found.uid) == (honest, USER)
    for one in (held_too, held_by_victim):
        one.release()


@pytest.mark.parametrize("asked", [None, ()])
@pytest.mark.parametrize("is_known", [True, False])
def test_an_inode_number_that_comes_again_while_names_are_listed_hides_nobody(
    on_ext4: api.Directory, is_known: bool, asked: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first claim of a user ended after its name was listed, and the second one got its number at once."""
    first, held = api.make_entry(on_ext4, 1, CLAIM, by_children=False)
    entries = api.Entries(on_ext4)
    if is_known:
        assert [one.name for one in entries.look()] == [first]
    before = inode_of(on_ext4, first)
    made: list[api.Held] = []

    def end_and_make() -> None:
        remove_entry(on_ext4, first, held)
        made.append(api.make_entry(on_ext4, 2, {"gpus": {"GPU-b": None}}, by_children=False)[1])
        assert inode_of(on_ext4, second) == before

    def stat(path: Any, **options: Any) -> os.stat_result:
        status = real(path, **options)
        if not made and path == first:
            end_and_make()
        return status

    real, second = os.stat, f"2.{'0' * 16}"
    monkeypatch.setattr(os, "urandom", bytes)  # so that its name is known before
    monkeypatch.setattr(on_ext4, "names", lambda **options: {first, second})
    if is_known:
        end_and_make()
    else:
        monkeypatch.setattr(os, "stat", stat)
    assert [(one.name, [*one.gpus]) for one in entries.look(asked)] == [(second, ["GPU-b"])]
    made[0].release()


def test_what_has_the_wrong_type_counts_as_missing_and_a_share_as_all(claims: api.Directory) -> None:
    said = {"gpus": {"GPU-a": "1", "GPU-b": 0, "a\nb": None, "x" * 101: None}, "parts": {"GPU-a": 1 << 40}, "pid": 1e9}
    _, held = api.make_entry(claims, 1, {**said, "token": None, "inside": None, "x": [{}] * 999}, by_children=False)
    (found,) = look(claims)
    assert (dict(found.gpus), dict(found.parts), found.pid) == ({"GPU-a": None, "GPU-b": None}, {}, 0)
    assert (found.token, found.inside, "x" in found.more) == ("", "", False)
    held.release()


OF_ANOTHER_KIND: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("token", "inside", "host", "job", "command"), (None, 1, True, [], {}, ["t"])),
    **dict.fromkeys(("pid", "start", "pidns", "nb_gpus", "v"), (None, "1", 1.0, True, -1, [], {}, 10**40)),
    **dict.fromkeys(("since", "until", "queued", "waited"), ("1", True, -1, [], {}, 1e40)),
    **dict.fromkeys(("parts", "pieces", "modes"), (None, 1, "GPU-a", [], ["GPU-a"], [["GPU-a", 1]])),
    **dict.fromkeys(("display", "labels", "of"), (None, "true", -1.0, {})),
}


@pytest.mark.parametrize("key", OF_ANOTHER_KIND)
def test_a_value_of_another_kind_is_as_if_it_were_missing(key: str) -> None:
    def read(said: dict[str, Any]) -> api.Entry:
        return api.Entry.read(f"1.{'0' * 16}", USER, (1, 1), json.dumps({**CLAIM, **said}).encode())

    for value in OF_ANOTHER_KIND[key]:
        assert read({key: value}) == read({}), value
    for share in ("1", 0, -1, 1.5, True, [], {}, 1 << 61):
        assert read({"gpus": {"GPU-a": share}}).gpus == {"GPU-a": None}, "all of it"


def test_a_lock_of_a_part_of_the_file_is_none(claims: api.Directory) -> None:
    path = place(claims, "1.00000000000000aa", json.dumps({"v": 1, **CLAIM}).encode())
    with path.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, api.locks._STRUCT.pack(fcntl.F_WRLCK, os.SEEK_SET, 1, 0, 0))
        assert look(claims) == []


def test_of_a_dead_file_with_many_names_one_is_opened(claims: api.Directory, monkeypatch) -> None:
    first = place(claims, "1.00000000000000aa", b"{}")
    for number in range(2, 100):
        os.link(first, Path(claims.path) / f"{number}.{'0' * 16}")
    opened, real = [], api.entries.open_to_read
    monkeypatch.setattr(api.entries, "open_to_read", lambda *about: opened.append(about) or real(*about))
    entries = api.Entries(claims)
    assert (entries.look(), len(opened), entries.next_number) == ([], 1, 100)


def test_what_this_user_cannot_open_is_ignored(claims: api.Directory, monkeypatch) -> None:
    """A file of mode 0600, or root's chmod go-rwx of a claim, whose doors keep its GPUs."""
    name, held = api.make_entry(claims, 1, CLAIM, by_children=False)
    entries = api.Entries(claims)
    with monkeypatch.context() as closed:
        closed.setattr(api.entries, "open_to_read", Mock(side_effect=PermissionError(errno.EACCES, "closed")))
        assert entries.look() == []
        assert entries.ignored == {name: "closed"}
    assert [one.name for one in entries.look()] == [name], "it is asked again"
    held.release()


def test_no_entry_vouches_for_a_part_that_pieces_have(claims: api.Directory) -> None:
    """Who takes a share would come beside a piece that another state directory has."""
    said = {"gpus": {"GPU-a": 1, "MIG-b": None, "MIG-c": None}, "modes": {"GPU-b": "CPX" * 9, "GPU-x": "CPX"}}
    pieces = {"GPU-a": ["GPU-a"], "GPU-b": ["MIG-b", "MIG-x", [], 7], "GPU-c": "MIG-c", "x" * 101: []}
    parts = {"GPU-a": 40, "MIG-b": 32, "MIG-c": 31, "GPU-b": 63, "GPU-c": 32, "GPU-x": 0}
    _, held = api.make_entry(claims, 1, {**said, "pieces": pieces, "parts": parts}, by_children=False)
    (found,) = look(claims)
    assert dict(found.parts) == {"MIG-c": 31, "GPU-b": 63}
    assert dict(found.pieces) == {"GPU-a": ("GPU-a",), "GPU-b": ("MIG-b",), "GPU-c": ()}, "of the last it has all"
    assert {name: len(mode) for name, mode in found.modes.items()} == {"GPU-b": 8}
    held.release()


def test_an_entry_that_is_too_large_is_neither_made_nor_counted(claims: api.Directory, monkeypatch) -> None:
    with pytest.raises(api.StateDirError, match="is larger than 32768"):
        api.make_entry(claims, 1, {**CLAIM, "x": "y" * (32 << 10)}, by_children=False)
    most = {f"GPU-{number:08x}-0000-0000-0000-000000000000": None for number in range(256)}
    _, held = api.make_entry(claims, 1, {"gpus": most, "parts": dict.fromkeys(most, 31)}, by_children=False)
    assert len(look(claims)[0].gpus) == 256
    monkeypatch.setattr(api.listing, "LARGEST", 10)
    assert look(claims) == []
    held.release()


def test_an_entry_of_too_many_values_is_ignored(claims: api.Directory) -> None:
    """Each takes a hundred times its bytes of memory. An entry with all that there is of 256 pieces has fewer."""
    many = [[{}] * 2048, [[]] * 1100, [1.5] * 2048, {str(key): 0 for key in range(2048)}]
    made = [api.make_entry(claims, number, {**CLAIM, "x": x}, by_children=True)[1] for number, x in enumerate(many)]
    pieces = [f"AMD-0000:{number:02x}:00.0-{number % 8}" for number in range(256)]
    of_gpus = {f"GPU-{number}": pieces[8 * number : 8 * number + 8] for number in range(32)}
    said = {
        "gpus": dict.fromkeys(pieces), "pieces": of_gpus, "modes": dict.fromkeys(of_gpus, "CPX"),
        "parts": {**dict.fromkeys(pieces, 31), **dict.fromkeys(of_gpus, 63)}, "labels": ["0:0"] * 256,
        "command": "," * 200, "job": "," * 200,
    }  # fmt: skip
    _, held = api.make_entry(claims, 9, said, by_children=True)
    entries = api.Entries(claims)
    assert [one.number for one in entries.look()] == [9]
    assert [*entries.ignored.values()] == 4 * ["nonsense: more than 2048 values"]
    for one in (held, *made):
        one.release()


# Bounds by owner


def numbers(entries: api.Entries) -> list[int]:
    return [one.number for one in entries.look()]


@needs_root
@pytest.mark.parametrize(("bound", "value"), [("MOST_BYTES", 95), ("MOST_FILES", 2)])
def test_what_a_user_has_beyond_a_bound_is_ignored_and_refuses_nobody_else(
    claims: api.Directory, bound: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [make_of(claims, 0 if number == 1 else USER, number) for number in range(1, 7)]
    monkeypatch.setattr(api.listing, bound, value)
    monkeypatch.setattr(api.listing, "LARGEST", 50)
    entries = api.Entries(claims)
    assert numbers(entries) == [1, 2, 3]
    assert {*entries.ignored} == {name for name, _ in made[3:]}
    entries.refuse_if_full()
    with monkeypatch.context() as as_user:
        as_user.setattr(os, "geteuid", lambda: USER)
        with pytest.raises(api.StateDirError, match="as many files of yours as count"):
            entries.refuse_if_full()
    for number in (2, 3, 6):
        remove_entry(claims, *made[number - 1])
    assert numbers(entries) == [1, 4, 5], "of those left they count"
    assert entries.ignored == {}
    made[3][1].release()
    assert numbers(entries) == [1, 5]
    made[4][1].release()
    made[0][1].release()


@needs_root
def test_one_behind_a_bound_counts_when_what_was_too_large_before_it_is_gone(
    claims: api.Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.listing, "MOST_BYTES", 100)
    small, large = {"gpus": {}}, {"gpus": {}, "x": "y" * 100}
    made = [make_of(claims, USER, number, said) for number, said in enumerate((small, large, small), 1)]
    entries = api.Entries(claims)
    assert numbers(entries) == [1]
    remove_entry(claims, *made[1])
    assert numbers(entries) == [1, 3]
    for _, held in made:
        held.release()


@needs_root
def test_dead_entries_of_ones_own_refuse_no_claim_and_are_told(claims: api.Directory, monkeypatch) -> None:
    monkeypatch.setattr(api.listing, "MOST_FILES", 3)
    monkeypatch.setattr(api.entries, "MOST_DEAD", 2)
    for number in range(1, 9):
        make_of(claims, USER, number)[1].release()
    _, held = make_of(claims, USER, 9)
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    entries = api.Entries(claims)
    entries.refresh()
    entries.make_room()
    assert numbers(entries) == [9]
    assert sorted(one.number for one in entries.remove_dead()) == [*range(1, 9)]
    held.release()


@needs_root
def test_more_names_of_one_user_than_are_looked_at_refuse_no_claim_of_others(
    claims: api.Directory, monkeypatch
) -> None:
    monkeypatch.setattr(api.listing, "MOST_FILES", 5)
    neighbours = [make_of(claims, NEIGHBOUR, number)[1] for number in range(1, 60)]
    _, held = make_of(claims, USER, 60)
    for one in neighbours[:40]:
        one.release()
    opened, real = [], api.entries.open_to_read
    monkeypatch.setattr(api.entries, "open_to_read", lambda *about: opened.append(about) or real(*about))
    entries = api.Entries(claims)
    assert [one.uid for one in entries.look()] == [USER]
    assert len(opened) == 6
    assert entries.next_number == 61
    (sentence,) = entries.sentences_on_ignored()
    assert re.search(rf"/6\.[0-9a-f]+ of {NEIGHBOUR} is ignored \(its owner .*\), as do 53 more$", sentence)
    for one in (held, *neighbours[40:]):
        one.release()


@needs_root
def test_a_link_to_a_file_of_somebody_else_counts_towards_no_bound_of_his(claims: api.Directory, monkeypatch) -> None:
    """With fs.protected_hardlinks everybody can link a file that he may write."""
    monkeypatch.setattr(api.listing, "MOST_FILES", 1)
    _, held = make_of(claims, USER, 9)
    others = place(claims, "letter", mode=0o666)
    os.chown(others, USER, USER)
    for number in range(1, 9):
        os.link(others, Path(claims.path) / f"{number}.{'0' * 16}")
    entries = api.Entries(claims)
    assert numbers(entries) == [9]
    assert {*entries.ignored.values()} == {"others may write it: mode 0666"}
    held.release()


@needs_root
def test_all_who_look_agree_whenever_they_began(claims: api.Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of users with more than counts come and go, and get further names."""
    seed = random.randrange(10**6)
    chosen = random.Random(seed)
    monkeypatch.setattr(api.listing, "MOST_FILES", 4)
    monkeypatch.setattr(api.listing, "MOST_BYTES", 600)
    one_who_looks_again = api.Entries(claims)
    held: list[api.Held] = []

    def make() -> None:
        said = {"gpus": {}, "x": "y" * chosen.choice((1, 200, 500))}
        held.append(make_of(claims, chosen.choice((USER, NEIGHBOUR)), chosen.randrange(30), said)[1])

    def end() -> None:
        held.pop(chosen.randrange(len(held))).release()

    def remove() -> None:
        os.unlink(chosen.choice(os.listdir(claims.fd)), dir_fd=claims.fd)

    def link() -> None:
        name = f"{chosen.randrange(30)}.{chosen.randrange(1 << 60):016x}"
        os.link(chosen.choice(os.listdir(claims.fd)), name, src_dir_fd=claims.fd, dst_dir_fd=claims.fd)

    make()
    for step in range(400):
        chosen.choice((make, make, end, remove, link) if len(held) > 1 and os.listdir(claims.fd) else (make,))()
        one_who_looks_again.look()
        again = [(one.name, one.uid, one.file) for one in one_who_looks_again.look()]
        anew = api.Entries(claims)
        assert again == [(one.name, one.uid, one.file) for one in anew.look()], (seed, step)
        assert one_who_looks_again.next_number == anew.next_number, (seed, step)
    for one in held:
        one.release()


@pytest.mark.parametrize("lives", [True, False])
def test_of_many_names_of_a_file_one_is_opened_and_another_if_that_goes(
    claims: api.Directory, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, held = api.make_entry(claims, 1, CLAIM, by_children=False)
    for number in (2, 3):
        os.link(Path(claims.path) / name, Path(claims.path) / f"{number}.{'0' * 16}")
    opened, real = [], api.entries.open_to_read
    monkeypatch.setattr(api.entries, "open_to_read", lambda *about: opened.append(about[0]) or real(*about))
    entries = api.Entries(claims)
    assert [one.name for one in entries.look()] == opened == [name]
    os.unlink(name, dir_fd=claims.fd)
    if not lives:
        held.release()
    assert [one.number for one in entries.look()] == ([2] if lives else [])
    assert opened[1:] == [f"2.{'0' * 16}"]
    assert entries.next_number == 4
    held.release()


# A host in trouble


@pytest.mark.parametrize("call", ["open", "write", "fchmod"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO])
def test_an_entry_that_cannot_be_made_leaves_no_file(claims: api.Directory, monkeypatch, call: str, code: int) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(api.entry.os, call, Mock(side_effect=OSError(code, os.strerror(code))))
        with pytest.raises(api.StateDirError, match=r"SAFE_GPU_DIR|ulimit") as raised:
            api.make_entry(claims, 1, CLAIM, by_children=True)
    assert raised.value.errno == code
    assert os.listdir(claims.fd) == []


def test_no_claim_is_left_out_where_it_cannot_be_read(claims: api.Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    _, held = api.make_entry(claims, 1, CLAIM, by_children=True)
    entries = api.Entries(claims)
    for code in (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM):
        with monkeypatch.context() as patch:
            patch.setattr(api.entries, "open_to_read", Mock(side_effect=OSError(code, "trouble")))
            with pytest.raises(api.StateDirError) as raised:
                entries.look()
        assert raised.value.errno == code
    assert len(entries.look()) == 1
    held.release()


def test_an_entry_that_is_removed_while_it_is_made_is_made_anew(
    claims: api.Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, real = [], os.rename

    def rename(source: str, target: str, **options: int) -> None:
        if len(removed) < 3:
            removed.append(os.unlink(source, dir_fd=claims.fd))
        real(source, target, **options)

    monkeypatch.setattr(os, "rename", rename)
    name, held = api.make_entry(claims, 1, CLAIM, by_children=True)
    assert os.listdir(claims.fd) == [name]
    remove_entry(claims, name, held)
    monkeypatch.setattr(os, "rename", lambda source, *more, **at: [os.unlink(source, dir_fd=claims.fd), real("x", "y")])
    with pytest.raises(api.StateDirError, match="removed at once"):
        api.make_entry(claims, 1, CLAIM, by_children=True)
    assert os.listdir(claims.fd) == []


def test_threads_make_entries_side_by_side(claims: api.Directory) -> None:
    """POSIX locks would be those of the process, and lost with any descriptor of the file."""

    def work(number: int) -> tuple[str, Any]:
        for _ in range(20):
            name, held = api.make_entry(claims, number, CLAIM, by_children=True)
            assert name in [one.name for one in look(claims)]
            remove_entry(claims, name, held)
        return api.make_entry(claims, number, CLAIM, by_children=True)

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(work, range(1, 5)))
    assert sorted(one.number for one in look(claims)) == [1, 2, 3, 4]
    for name, held in made:
        remove_entry(claims, name, held)
    assert look(claims) == []


def test_dead_entries_are_removed_by_their_owner_or_root(claims: api.Directory, as_user: Any) -> None:
    name, held = api.make_entry(claims, 1, CLAIM, by_children=True)
    held.release()
    state = os.path.dirname(claims.path)

    def left(directory: api.Directory) -> list[str]:
        entries = api.Entries(directory)
        entries.look()
        entries.remove_dead()
        return os.listdir(directory.fd)

    def work(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        with api.Directory(state, "claims") as directory:
            api.make_entry(directory, 2, CLAIM, by_children=True)[1].release()
            say(*left(directory))

    assert as_user(work, uid=USER).hear() == name
    place(claims, f".{'0' * 16}")
    assert left(claims) == [f".{'0' * 16}"]  # it may be about to get its name
