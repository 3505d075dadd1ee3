"""Claims whose GPU has been divided differently since: nothing of them vanishes from what people and programs look
at."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.entries import remove_entry
from support.findings import expect
from support.state import locked_host
from support.vendor_hosts import GIB, IntelHost, KfdHost

from safe_gpu import NotEnoughGpusError

CHECK = "modes of claimed GPUs"


@pytest.fixture
def nvidia(fake_gpus: Any, state_dir: Path) -> Any:
    """A host of two NVIDIA GPUs, of which nothing is divided."""
    fake_gpus.set(2)
    fake_gpus.use_nvml_here()
    return fake_gpus


def divide(host: Any, *numbers: int) -> list[str]:
    """Divide GPU 0 into MIG instances with these numbers in their names; without any turn MIG off."""
    instances = [host.uuid("MIG", number) for number in numbers]
    if instances:
        host.change(0, mig=1, instances=",".join(instances), imem=10 * GIB)
    else:
        host.change(0, mig=0)
    return instances


def lines_of(status: api.HostStatus) -> list[str]:
    return [" ".join(line.split()) for line in api.render(status, width=200, color=False).splitlines()]


def rows_of(status: api.HostStatus, word: str) -> list[list[str]]:
    """The first two columns of the rows with this word."""
    return [line.split()[:2] for line in lines_of(status) if word in line]


@pytest.fixture
def played(state_dir: Path) -> Any:
    """Called with what it says, it makes an entry of this process, without doors."""
    made = []

    def make(**said: object) -> None:
        with locked_host() as host:
            said = {**api.facts_of_this_process(None), "since": time.time(), **said}
            directory = api.Directory(str(state_dir), "claims")
            made.append((directory, *api.make_entry(directory, host.claims.next_number, said, by_children=False)))

    yield make
    for directory, name, held in made:
        remove_entry(directory, name, held)
        directory.close()


def of_an_older_version(document: dict[str, Any]) -> None:
    """Remove from a document what that version does not tell."""
    for gpu in document["gpus"]:
        del gpu["pieces"]
        for one in filter(None, [gpu["claim"], *gpu["shares"]]):
            del one["held_as"]


def test_an_instance_that_is_gone_is_told_on_the_row_of_its_gpu(nvidia: Any, run_here: Any) -> None:
    divide(nvidia, 1, 2)
    with claim(1, only="0:0") as owner:
        held, user = owner.gpus[0].uuid, api.procfs.user_name(os.geteuid())
        divide(nvidia)
        text = f"held as {held}, which is gone since the mode changed"
        for form in ((), ("-v",), ("--mine",)):
            told = " ".join(run_here("status", *form).stdout.split())
            assert f"GPU 0: {text}" in told
            assert f" {user} pid {os.getpid()} " in told
        document = json.loads(run_here("status", "--json").stdout)
        first, second = document["gpus"]
        assert (first["state"], second["state"]) == ("claimed", "free")
        assert (first["claim"]["pid"], text in first["reason"]) == (os.getpid(), True)
        assert first["claim"]["held_as"] == {"text": text, "gone": [held], "outdated": True}
        assert f"GPU 0: {text}" in api.render_page({"h": document}, now=time.time(), every=300.0, use={})
        of_an_older_version(document)
        assert text not in api.render_page({"h": document}, now=time.time(), every=300.0, use={})
        assert f'safe_gpu_claim_outdated{{gpu="0",UUID="{nvidia.uuids[0]}"' in run_here("status", "--prometheus").stdout
        assert user in run_here("history").stdout
        expect(CHECK, "warning", f"GPU 0: {text} (process {os.getpid()} of {user})", fix="drain a GPU before")
    expect(CHECK, "passed")
    assert "claim_outdated{" not in run_here("status", "--prometheus").stdout


def test_who_is_refused_for_that_is_told(nvidia: Any, played: Callable[..., None]) -> None:
    played(gpus={"MIG-x": None}, pieces={nvidia.uuids[0]: ["MIG-x"]}, pid=1, start=1)
    with pytest.raises(NotEnoughGpusError, match="held as MIG-x, which is gone since the mode changed"):
        claim(1, only="0")


def test_a_whole_gpu_whose_instances_are_shown_is_told_on_all_of_its_rows(nvidia: Any) -> None:
    with claim(1, only="0"):
        divide(nvidia, 1, 2)
        status = api.gather()
        told = "held with all of its GPU since before the mode changed"
        assert rows_of(status, f"pid {os.getpid()}") == [["0", "unusable"], ["0:0", "claimed"], ["0:1", "claimed"]]
        assert f"GPU 0:0,0:1: {told}" in lines_of(status)
        expect(CHECK, "warning", f"GPU 0:0,0:1: {told} (process {os.getpid()} of ")
        assert [one.claim and one.claim.held_as for one in status.gpus] == [
            None, *[api.HeldAs(told, outdated=True)] * 2, None,
        ]  # fmt: skip


def test_a_share_of_a_gpu_whose_instances_are_shown(nvidia: Any) -> None:
    with claim(1, only="0", share="20GiB"):
        divide(nvidia, 1)
        assert "GPU 0:0: held with a share of its GPU since before the mode changed" in lines_of(api.gather())


def test_an_instance_that_was_destroyed_while_mig_is_on(nvidia: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container it may be another one's, which the driver does not show there."""
    divide(nvidia, 1, 2)
    with claim(1, only="0:0") as owner:
        divide(nvidia, 2, 3)
        status = api.gather()
        assert [one.state for one in status.gpus] == ["unusable", "free", "free", "free"]
        monkeypatch.setattr(api.procfs, "pid_namespace", lambda: api.procfs.FIRST_PID_NAMESPACE)
        status, text = api.gather(), f"held as {owner.gpus[0].uuid}, which is gone"
        assert f"GPU 0: {text}" in lines_of(status)
        assert f"; {text}; " in f"; {status.gpus[0].reason}; "
        expect(CHECK, "warning", text)
        monkeypatch.setattr(api.procfs, "pid_namespace", lambda: 1)
        assert f"GPU 0: held as {owner.gpus[0].uuid}, which the driver does not show here" in lines_of(api.gather())
        expect(CHECK, "passed")


def test_instances_of_a_gpu_that_is_lost(nvidia: Any) -> None:
    """Nobody has changed its mode."""
    divide(nvidia, 1)
    with claim(1, only="0:0") as owner:
        nvidia.change(0, lost=1)
        assert f"GPU 0: held as {owner.gpus[0].uuid}, which the driver does not show here" in lines_of(api.gather())
        expect(CHECK, "passed")


def test_each_of_several_claims_has_a_row(nvidia: Any, played: Callable[..., None], run_here: Any) -> None:
    """The GPU is expected to be free when the last of them ends."""
    names, whole, now = divide(nvidia, 1, 2, 3), nvidia.uuids[0], time.time()
    divide(nvidia)
    played(gpus={names[0]: None}, pieces={whole: names[:1]}, job="sge:11", until=now + 3600)
    played(gpus=dict.fromkeys(names[1:]), pieces={whole: names[1:]}, job="sge:22", until=now + 7200)
    status = api.gather()
    assert rows_of(status, "2 claims") == [["0", "claimed"]]
    assert [row[0] for row in rows_of(status, " 11 ") + rows_of(status, " 22 ")] == ["piece", "piece"]
    first, second = (
        f"process {os.getpid()}: held as {names[0]}, which is gone since the mode changed",
        f"process {os.getpid()}: held as {names[1]} and 1 more, which are gone since the mode changed",
    )
    for text in (first, second):
        assert f"GPU 0: {text}" in lines_of(status)
    document = json.loads(run_here("status", "--json").stdout)
    assert [one["job"] for one in document["gpus"][0]["pieces"]] == ["sge:11", "sge:22"]
    page = api.render_page({"h": document}, now=now, every=300.0, use={})
    for text in (first, second, ">11<", ">22<"):
        assert text in page
    assert api.figures_of(document, now).cells["Held by"] == f"{api.procfs.user_name(os.geteuid())} 1"
    ticket = api.Entry.read("1.x", 0, (1, 1), json.dumps({"nb_gpus": 1, "gpus": [whole]}).encode())
    ((start, _),) = api.expected_starts([ticket], status.gpus, now)
    assert start == pytest.approx(now + 7200, abs=1)


def test_a_claim_counts_once_for_its_user(nvidia: Any, played: Callable[..., None]) -> None:
    """However many devices it keeps others off."""
    whole, other = nvidia.uuids
    played(gpus={whole: None})
    divide(nvidia, 1, 2, 3)
    ticket = api.Entry.read("1.x", os.geteuid(), (1, 1), json.dumps({"nb_gpus": 1, "gpus": [other]}).encode())
    limits = {os.geteuid(): api.Limits(max_gpus=2)}
    assert api.at_limits([ticket], api.gather().gpus, limits, time.time()) == {}
    played(gpus=dict.fromkeys(["MIG-x", "MIG-y"]), pieces={whole: ["MIG-x", "MIG-y"]})
    found = api.at_limits([ticket], api.gather().gpus, limits, time.time())
    assert found["1.x"].held == 2.0


def test_a_claim_inside_another_one_is_told_too(nvidia: Any, played: Callable[..., None]) -> None:
    whole = nvidia.uuids[0]
    played(gpus={whole: None}, token="t", job="sge:11")
    played(gpus={whole: None}, inside="t")
    divide(nvidia, 1)
    (note,) = (line for line in lines_of(api.gather()) if "inside this claim" in line)
    assert note.startswith("GPU 0,0:0: ")


def test_what_is_held_is_seen_held_under_its_own_name(nvidia: Any, state_dir: Path, played: Any) -> None:
    """So the history knows when a claim that died was last seen. Of names that no driver has told no mark is made."""
    divide(nvidia, 1)
    with claim(1, only="0:0") as owner:
        mark = state_dir / "history" / f"{owner.gpus[0].uuid}.seen"
        api.gather()
        os.utime(mark, (1.0, 1.0))
        divide(nvidia)
        played(gpus={"MIG-made-up": None}, pieces={nvidia.uuids[0]: ["MIG-made-up"]})
        assert "MIG-made-up" in " ".join(lines_of(api.gather()))
        assert mark.stat().st_mtime > 1.0
        assert not mark.with_name("MIG-made-up.seen").exists()


def test_a_claim_without_work_is_listed(nvidia: Any, run_here: Any) -> None:
    divide(nvidia, 1)
    with claim(1, only="0:0"):
        divide(nvidia)
        nvidia.change(0, util=0)
        for _ in range(2):
            run_here("status")
        assert str(os.getpid()) in run_here("history", "--idle", "--json").stdout


def test_nothing_is_idle_on_a_gpu_whose_instances_have_the_processes(played: Callable[..., None]) -> None:
    played(gpus={"GPU-a": None})
    process = api.GpuProcess(os.getpid())
    instance = api.Gpu(0, "MIG-1", mig_parent="GPU-a", mig_instance=0, processes=(process,))
    status = api.status_of(api.HostSnapshot((api.Gpu(0, "GPU-a", mig_enabled=True), instance)))
    assert [(one.claim is not None, one.idle) for one in status.gpus] == [(True, False)] * 2


@pytest.fixture
def amd(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with a mode and the names of its partitions, it shows one AMD GPU so."""
    bus = int.from_bytes(os.urandom(1), "big")
    own = int.from_bytes(os.urandom(5), "big") << 16
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")

    def show(mode: str, *names: int) -> None:
        host = KfdHost(tmp_path / mode)
        (host.root / "dev").mkdir()
        (host.root / "dev/kfd").write_text("")
        for number, name in enumerate(names):
            host.bank(host.gpu(bus, 500 + number, own + name, partition=number), 8 * GIB)
        (host.pci / f"0000:{bus:02x}:00.0/current_compute_partition").write_text(f"{mode}\n")
        monkeypatch.setenv("SAFE_GPU_FSROOT", str(host.root))

    return show


def test_partitions_in_another_mode(amd: Callable[..., None]) -> None:
    """The first one may have the same name in all modes."""
    amd("CPX", 1, 2, 3, 4, 5, 6, 7, 8)
    with claim(2, only="0,3") as owner:
        first = owner.gpus[0].uuid
        amd("SPX", 1)
        told = f"held as {first} and 1 more of mode CPX, which are gone since the mode changed"
        assert f"GPU 0: {told}" in lines_of(api.gather())
        amd("DPX", 1, 5)
        assert f"GPU 0,1: {told}" in lines_of(api.gather())
        expect(CHECK, "warning", f"GPU 0,1: {told} (process {os.getpid()} of ")


def test_a_card_that_is_shown_as_partitions(amd: Callable[..., None]) -> None:
    amd("SPX", 1)
    with claim(1):
        amd("CPX", 1, 2, 3)
        assert "GPU 0-2: held with all of its GPU since before the mode changed" in lines_of(api.gather())


def test_a_card_and_its_virtual_functions(tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand beside each other, so nothing is wrong, unless one is gone."""
    host = IntelHost(tmp_path / "intel")
    bus = int.from_bytes(os.urandom(1), "big")
    card = host.gpu(f"00{bus:02x}:18:00.0", memory=48 * GIB)
    function = host.gpu(f"00{bus:02x}:18:00.1", memory=24 * GIB)
    (function / "physfn").symlink_to(card)
    for name, value in {"SAFE_GPU_FSROOT": str(host.root), "SAFE_GPU_DRIVER": "intel"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(api.procfs, "pid_namespace", lambda: api.procfs.FIRST_PID_NAMESPACE)
    with claim(1, only="0"):
        assert "GPU 1: held with all of its GPU" in lines_of(api.gather())
        expect(CHECK, "passed")
    with claim(1, only="1") as owner:
        name = owner.gpus[0].uuid
        assert f"GPU 0: held as {name}, a part of it" in lines_of(api.gather())
        expect(CHECK, "passed")
        (host.root / "sys/class/drm/renderD129/device").unlink()
        assert f"GPU 0: held as {name}, which is gone" in lines_of(api.gather())
        expect(CHECK, "warning", f"GPU 0: held as {name}, which is gone (process ")
