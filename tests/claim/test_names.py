"""A claim keeps its GPUs on the whole host, whatever becomes of the state directory."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu import NotEnoughGpusError
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination import state_dir as warnings
from safe_gpu.coordination.leases import lease as leases
from safe_gpu.coordination.name_table import read_names
from safe_gpu.coordination.state_dir import FileSystem

ELSEWHERE = "claimed: its lease file is not in this state directory (a private /tmp, or it was removed)"
CLAIM = """
import os, safe_gpu
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # of the test's own claim
def claim(nb_gpus, **options):
    return safe_gpu.GPUOwner(nb_gpus, safe_gpu.NoPlaceholder(), affinity=None, **{"timeout": 0, **options})
def attempt(nb_gpus=1, **options):
    try:
        owner = claim(nb_gpus, **options)
    except safe_gpu.NotEnoughGpusError as err:
        return "refused"
    return owner.devices_taken
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One simulated host; where its processes are has nothing to do with state directories."""
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "state"))
    return tmp_path


def other_dir(host: Path) -> dict[str, str]:
    return {"SAFE_GPU_DIR": str(host / "other")}


def held(host: Path) -> set[str]:
    prefix = names.simulated_prefix(str(host / "host"))
    return {name.removeprefix(prefix) for name in read_names() if name.startswith(prefix)}


def test_two_state_directories_do_not_book_twice(host: Path, child: Any) -> None:
    other = child(CLAIM + "say(claim(3).devices_taken); listen()", env=other_dir(host))
    assert other.hear() == "[0, 1, 2]"
    with claim(5) as owner:
        assert owner.devices_taken == [3, 4, 5, 6, 7]
    with pytest.raises(NotEnoughGpusError, match="6 GPUs asked for, 5 free") as caught:
        claim(6)
    reasons = [verdict.reason for verdict in caught.value.verdicts]
    assert reasons == [ELSEWHERE] * 3 + [""] * 5
    assert held(host) == {verdict.gpu.uuid for verdict in caught.value.verdicts[:3]}, "the refused hold none"


def test_a_state_directory_that_was_removed(host: Path, child: Any) -> None:
    with claim(2) as owner:
        shutil.rmtree(host / "state")
        other = child(CLAIM + "say(attempt(7)); say(attempt(6)); listen()")
        assert other.hear() == "refused"
        assert other.hear() == "[2, 3, 4, 5, 6, 7]"
        assert safe_gpu.get_free_gpus() == []
    assert len(owner.devices_taken) == 0


def test_who_looks_is_told_so(host: Path, child: Any) -> None:
    from safe_gpu.status.gather import gather

    other = child(CLAIM + "say(claim(1).devices_taken); listen()", env=other_dir(host))
    assert other.hear() == "[0]"
    assert not (host / "state").exists()
    for _ in range(2):  # before there is a state directory here, and after
        first, second, *_rest = gather().gpus
        assert (first.state, first.reason.partition("; its lease is in ")[0]) == ("claimed", ELSEWHERE)
        assert first.claim is not None
        assert first.claim.command == Path(sys.executable).name, "no arguments, which may hold a password"
        assert first.claim is not None
        assert first.claim.pid == other.pid
        assert (second.state, second.claim) == ("free", None)
        assert safe_gpu.get_free_gpus() == ["1", "2", "3", "4", "5", "6", "7"]
    assert (host / "state").exists()


def test_who_only_waits_takes_no_name(host: Path, child: Any) -> None:
    from safe_gpu.claim.free import wait_for_gpus

    assert [gpu.index for gpu in wait_for_gpus(8, timeout=0)] == list(range(8))
    other = child(CLAIM + "say(claim(1).devices_taken); listen()", env=other_dir(host))
    assert other.hear() == "[0]"
    with pytest.raises(NotEnoughGpusError):
        wait_for_gpus(8, timeout=0)
    assert len(held(host)) == 1


def test_a_waiter_gets_what_the_other_directory_gives_back(host: Path, child: Any, eventually: Any) -> None:
    holder = child(CLAIM + "owner = claim(8); say('holds'); listen(); owner.release_gpus(); listen()")
    assert holder.hear() == "holds"
    waiter = child(CLAIM + "say(attempt(8, timeout=60))", env=other_dir(host))
    eventually(lambda: (host / "other" / "queue" / "1.ticket").exists())
    holder.tell()
    assert waiter.hear() == "[0, 1, 2, 3, 4, 5, 6, 7]"


def test_a_child_that_lives_on_holds_the_lease_and_not_the_name(host: Path, child: Any) -> None:
    work = "owner = claim(1)\nif os.fork(): os._exit(0)\nsay('alone'); listen()"
    orphan = child(CLAIM + work)
    assert orphan.hear() == "alone"
    orphan.process.wait(30)
    assert held(host) == set()
    with pytest.raises(NotEnoughGpusError, match="8 GPUs asked for, 7 free"):
        claim(8)
    orphan.tell()


@pytest.mark.parametrize("removed", [True, False])
def test_a_scope_is_found_by_name(host: Path, child: Any, removed: bool) -> None:
    """The lease files are gone, or the claim inside has another state directory (a container without a mount)."""
    with claim(2, delegate=True) as owner:
        if removed:
            shutil.rmtree(host / "state")
        inside = child(
            CLAIM + "one = claim(1); say(one.devices_taken); listen()", env={} if removed else other_dir(host)
        )
        assert inside.hear() == "[0]"
        assert {name.rpartition(".")[2] for name in held(host) if name.endswith("inner")} == {"inner"}
        second = child(CLAIM + "say(attempt(2)); say(attempt(1))", env={"SAFE_GPU_DIR": str(host / "third")})
        assert second.hear() == "refused"
        assert second.hear() == "[1]"
        assert len(owner.gpus) == 2


def test_an_inner_claim_outlives_its_outer_one(host: Path, child: Any) -> None:
    inner = "if not os.fork(): claim(1); say(os.getpid()); signal.pause()\nlisten()"
    outer = child(CLAIM + "import signal\nowner = claim(1, delegate=True)\n" + inner)
    inside = int(outer.hear())
    outer.kill()
    shutil.rmtree(host / "state")
    try:
        with claim(7) as owner:
            assert owner.devices_taken == [1, 2, 3, 4, 5, 6, 7]
        with pytest.raises(NotEnoughGpusError):
            claim(8)
    finally:
        os.kill(inside, signal.SIGKILL)


@pytest.mark.parametrize("removed", [True, False])
def test_no_claim_begins_inside_one_that_ends_just_then(
    host: Path, child: Any, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """It has found the outer claim, which then ends, and another state directory gets the GPU before the inner name is
    bound."""
    ends = "owner = claim(1, delegate=True); say(owner._claim.token); listen(); owner.release_gpus(); say('ended')"
    outer = child(CLAIM + ends)
    other = child(CLAIM + "listen(); say(claim(1).devices_taken); listen()", env=other_dir(host))
    monkeypatch.setenv("SAFE_GPU_SCOPE", outer.hear())
    if removed:
        shutil.rmtree(host / "state")
    bind, seen = names.take_name, []

    def bind_late(name: str) -> Any:
        if ".inner" in name and not seen:
            outer.tell()
            seen.append(outer.hear())
            other.tell()
            seen.append(other.hear())
        return bind(name)

    monkeypatch.setattr(names, "take_name", bind_late)
    with claim(1) as owner:
        assert seen == ["ended", "[0]"]
        assert owner.devices_taken == [1]


@pytest.mark.parametrize(("delegate", "order"), [(True, ["name"] * 3 + ["lease"]), (False, ["name", "lease"])])
def test_names_are_freed_before_the_lease(
    host: Path, monkeypatch: pytest.MonkeyPatch, delegate: bool, order: list[str]
) -> None:
    """Else others of this directory would find a free lease, and be refused by the name."""
    owner, freed = claim(1, delegate=delegate), []
    for kind, word in ((names.SocketName, "name"), (leases.Lease, "lease")):
        release = kind.release
        monkeypatch.setattr(
            kind, "release", lambda self, word=word, release=release: (freed.append(word), release(self))
        )
    owner.release_gpus()
    assert freed == order


def in_namespace(space: str, mount: str, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a namespace of its own, after a mount."""
    enter = ["unshare", *space.split(), "sh", "-c"]
    if subprocess.run([*enter, mount], capture_output=True).returncode:
        pytest.skip("needs root, to make namespaces")
    return subprocess.run(
        [*enter, f'{mount} && exec "$0" -c "$1"', sys.executable, CLAIM + code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(safe_gpu.__file__).parents[1]), **environment},
    )


@pytest.mark.parametrize("space", ["--mount", "--mount --pid --fork --mount-proc"], ids=["private /tmp", "own pids"])
def test_from_another_namespace(host: Path, child: Any, space: str) -> None:
    """The same path of the state directory, and another file system under it, as with a private /tmp."""
    (host / "state").mkdir()
    (host / "state").chmod(0o1777)
    with claim(2):
        done = in_namespace(
            space, f"mount -t tmpfs -o mode=1777 tmpfs {host / 'state'}", "print(attempt(7), attempt(6), flush=True)"
        )
        assert done.stdout.strip() == "refused [2, 3, 4, 5, 6, 7]", done.stderr


def test_where_names_cannot_be_bound_the_lease_counts(host: Path, monkeypatch, caplog) -> None:
    def refuse(name: str) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(names, "take_name", refuse)
    with claim(2) as owner:
        assert owner.devices_taken == [0, 1]
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "names cannot be bound ([Errno 1] Operation not permitted)" in record.getMessage()


def test_a_name_that_is_held_for_a_moment_is_tried_again(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child between fork and exec has a copy of a name that was freed."""
    real, refusals = names.take_name, []

    def late(name: str) -> Any:
        if not refusals:
            refusals.append(name)
            return None
        return real(name)

    monkeypatch.setattr(names, "take_name", late)
    with claim(8) as owner:
        assert len(owner.gpus) == 8
    assert len(refusals) == 1


def test_a_shared_display_has_no_name(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    with claim(1) as owner:
        assert owner.devices_taken == [0]
        assert held(host) == set()


# A container's own state directory


@pytest.mark.parametrize(
    ("kind", "point", "network", "told"),
    [
        ("overlay", "/", False, True),
        ("fuse-overlayfs", "/", False, True),
        ("overlay", "/", True, False),
        ("overlay", "/tmp", False, False),
        ("ext4", "/", False, False),
        ("", "", False, False),
    ],
)
def test_a_container_without_the_network_of_the_host_is_told_once(
    host: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str, point: str, network: bool, told: bool
) -> None:
    monkeypatch.setattr(warnings, "file_system_at", lambda path, device: FileSystem(kind, point))
    monkeypatch.setattr(warnings, "sees_network_devices", lambda: network)
    monkeypatch.setattr(warnings, "_told", set())
    warnings.doubt_of_image.cache_clear()
    claim(1).release_gpus()
    claim(1).release_gpus()
    warnings.doubt_of_image.cache_clear()
    lines = [one.getMessage() for one in caplog.records if "belongs to this container" in one.getMessage()]
    assert len(lines) == told
    assert all(f"start it with -v {host}/state:{host}/state" in line for line in lines)
