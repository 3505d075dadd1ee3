"""Claims inside a claim that has no names here: it could not bind them, is in another network namespace, or only a
child of it lives on. Its leases and records count then, and who claims inside takes the names."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim, try_claim
from support.forks import in_fork

from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.name_table import NameTable, read_names
from safe_gpu.host import procfs

SAYS = "from safe_gpu.coordination import socket_names as names\nimport os, safe_gpu\n"
DELEGATES = "safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, only=0, delegate=True)\n"
TELLS = "say(os.environ['SAFE_GPU_SCOPE']); listen()\n"
REFUSES = "def refuse(name): raise PermissionError(1, 'Operation not permitted')\nnames.take_name = refuse\n"


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "state"))


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str = "") -> Any:
    """What a claim of GPU 0 in another state directory gets."""
    with monkeypatch.context() as patch:
        patch.setenv("SAFE_GPU_DIR", str(tmp_path / "other"))
        patch.setenv("SAFE_GPU_SCOPE", token)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return in_fork(lambda: try_claim(1, only=0))


def test_a_claim_whose_names_cannot_be_bound(child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outer = child(SAYS + REFUSES + DELEGATES + TELLS)
    token = outer.hear()
    assert token.endswith("@0")
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    with claim(1) as inner:
        assert inner.devices_taken == [0]
        assert elsewhere(monkeypatch, tmp_path) is None
    assert elsewhere(monkeypatch, tmp_path) == [0], "as lease files alone cannot tell in another directory"
    outer.kill()
    assert try_claim(8) == tuple(range(8)), "it has ended, and its token is ignored"


def test_some_names_are_none(child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A claim that cannot bind all of its names holds none: claims inside it would find some of its GPUs only."""
    refuses = REFUSES.replace("raise", "\n    if name.rstrip('.').endswith('.outer'): raise").replace(
        "names.take_name = refuse", "    return take(name)\ntake, names.take_name = names.take_name, refuse"
    )
    outer = child(SAYS + refuses + DELEGATES + TELLS)
    assert outer.hear().endswith("@0")
    prefix = names.simulated_prefix(str(tmp_path / "host"))
    assert not [name for name in read_names() if name.startswith(prefix)]


def test_a_child_that_lives_on_may_claim_in_what_it_has_inherited(
    child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has the lease and no name. A claim inside takes the name of the GPU, so that others see that it is taken."""
    code = (
        "import signal\nif os.fork(): signal.pause()\nos.kill(os.getppid(), signal.SIGKILL)\n"
        "while os.getppid() == parent: pass\nsay(os.environ['SAFE_GPU_SCOPE'])\nlisten()\n"
        "owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)\n"
        "say(owner.devices_taken); listen()"
    )
    orphan = child(
        SAYS
        + "parent = os.getpid()\n"
        + DELEGATES
        + code.replace("owner =", "safe_gpu.claim.owner.owners.clear(); owner =")
    )
    token = orphan.hear()
    assert "@" in token
    orphan.tell()
    assert orphan.hear() == "[0]"
    assert elsewhere(monkeypatch, tmp_path) is None
    assert elsewhere(monkeypatch, tmp_path, token) is None
    orphan.tell()


def test_who_claims_inside_an_inherited_lease_yields_to_a_claim_from_elsewhere(
    child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = "import signal\nif os.fork(): os._exit(0)\nsay(os.environ['SAFE_GPU_SCOPE']); listen()"
    orphan = child(SAYS + DELEGATES + code)
    token = orphan.hear()
    orphan.process.wait(30)
    rival = child(
        "import safe_gpu\nowner = safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, only=0)\n"
        "say(owner.devices_taken); listen()",
        env={"SAFE_GPU_DIR": str(tmp_path / "other")},
    )
    assert rival.hear() == "[0]", "a lease alone tells it nothing"
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    assert try_claim(1) is None
    rival.tell()
    rival.process.wait(30)
    assert try_claim(1) == (0,)
    orphan.tell()


def test_an_outer_claim_in_another_network_namespace(
    child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of a claim in a container, seen from the host, with the same state directory."""
    if not shutil.which("unshare") or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("needs root, to make namespaces")
    code = "import ctypes\nassert not ctypes.CDLL(None).unshare(0x40000000)\n"  # CLONE_NEWNET
    outer = child(SAYS + code + DELEGATES + TELLS)
    token = outer.hear()
    assert token.partition("@")[2] not in ("0", str(procfs.network_namespace()))
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    with claim(1) as inner:
        assert inner.devices_taken == [0]
        assert elsewhere(monkeypatch, tmp_path) is None
    monkeypatch.setenv("SAFE_GPU_SCOPE", token.partition("@")[0])
    assert try_claim(8) is None, "without that number only names count"


def test_where_the_kernel_lists_no_names(child: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sandbox, or a kernel without unix_diag: connect(2) tells whether the outer claim lives."""
    outer = child(SAYS + DELEGATES + TELLS)
    token = outer.hear()
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    for module in ("claim.host.find_outer", "coordination.scope", "coordination.name_table"):
        monkeypatch.setattr(f"safe_gpu.{module}.read_names", NameTable)
    with claim(1) as inner:
        assert inner.devices_taken == [0]
        assert elsewhere(monkeypatch, tmp_path) is None
    outer.kill()
    assert try_claim(8) == tuple(range(8))


def test_the_record_has_the_hash_of_the_whole_token(ground: Any) -> None:
    """So that who knows no suffix finds it too."""
    with claim(1, delegate=True):
        token = os.environ["SAFE_GPU_SCOPE"]
        record = json.loads((ground.directory / "leases" / f"{ground.uuids[0]}.lock").read_text())
        assert record["token"] == names.digest(token)
        assert token.partition("@")[2] == str(procfs.network_namespace())
