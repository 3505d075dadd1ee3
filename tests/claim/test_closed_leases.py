"""Lease files that cannot be opened: nobody gets those GPUs, and claims take the others or wait for them."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu import ClaimTimeout, StateDirError
from safe_gpu.coordination.leases.file_names import inner_name, lease_name


@pytest.fixture
def close_lease(state_dir: Path, ground: Any) -> Any:
    """Put a FIFO in the place of the lease files of these GPUs."""
    claim(8).release_gpus()

    def close(*indices: int, name: Any = lease_name) -> None:
        for index in indices:
            path = state_dir / "leases" / name(ground.uuids[index])
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o666)

    return close


def claimed(nb_gpus: int, **options: Any) -> list[int]:
    with claim(nb_gpus, **options) as owner:
        return owner.devices_taken


@pytest.mark.parametrize("name", [lease_name, inner_name])
def test_others_are_taken(close_lease: Any, name: Any) -> None:
    close_lease(0, 2, name=name)
    assert claimed(1) == [1]
    assert claimed(6) == [1, 3, 4, 5, 6, 7]


def test_too_few_are_left(close_lease: Any, ground: Any) -> None:
    close_lease(0)
    with pytest.raises(StateDirError, match=f"{lease_name(ground.uuids[0])} is not a regular file"):
        claimed(8, timeout=30)
    with pytest.raises(StateDirError):
        claimed(1, only=0)
    assert ground.tickets() == []
    assert claimed(7) == [*range(1, 8)]


def test_a_claim_waits_for_the_others(close_lease: Any, ground: Any, command: Any, eventually: Any) -> None:
    close_lease(0)
    ground.hold(*range(1, 8))
    waiter = command.start("run", "-n", 1, "-t", 30, "--", "printenv", "CUDA_VISIBLE_DEVICES")
    eventually(ground.tickets)
    ground.let_go(5)
    assert waiter.communicate(timeout=60)[0] == "5\n"


def test_the_refusal_tells_of_it(close_lease: Any, ground: Any) -> None:
    close_lease(0)
    ground.hold(*range(1, 8))
    with pytest.raises(ClaimTimeout, match="not a regular file") as refused:
        claimed(1, timeout=0.01)
    assert [verdict.state for verdict in refused.value.verdicts] == ["unusable"] + ["claimed"] * 7
    assert safe_gpu.get_free_gpus() == []


def test_inside_a_claim(close_lease: Any, command: Any) -> None:
    close_lease(0)
    inner = command.run(*("run", "-n", 2, "--", "safe-gpu", "run", "-n", 1, "--", "printenv", "CUDA_VISIBLE_DEVICES"))
    assert (inner.returncode, inner.stdout) == (0, "2\n"), inner.stderr


def test_a_waiter_whose_gpus_are_others(close_lease: Any, ground: Any, command: Any, eventually: Any) -> None:
    """A waiter behind another looks at GPUs that it may not have itself."""
    close_lease(0)
    ground.hold(1)
    first = command.start("run", "-n", 7, "--exclude", 0, "-t", 60, "--", "true")
    eventually(ground.tickets)
    second = command.start("run", "-n", 1, "--only", 2, "-t", 60, "--", "printenv", "CUDA_VISIBLE_DEVICES")
    eventually(lambda: len(ground.tickets()) == 2)
    ground.let_go(1)
    assert first.wait(60) == 0
    assert second.communicate(timeout=60)[0] == "2\n"
