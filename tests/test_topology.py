"""The records of a host's topology, without a host: what they refuse, and that they are plain values."""

from pathlib import Path
from typing import Any

import pytest

from safe_gpu.errors import GPUAffinityError
from safe_gpu.topology.host import HostTopology, read_topology


@pytest.mark.parametrize(
    "broken",
    [
        {"cpus": 3},
        {"cpus": [0], "cores": [0]},
        {"cpus": [0], "nodes": [0]},
        {"cpus": [0], "gpus": [0]},
        {"cpus": [0], "distances": {0: 3}},
    ],
)
def test_a_topology_of_the_wrong_shape(broken: dict[str, Any]) -> None:
    with pytest.raises(GPUAffinityError, match=r"^(cpus|cores|nodes|gpus|distances) "):
        HostTopology(**broken)


def test_from_host_reads_as_affinity_does(tmp_path: Path) -> None:
    """The name that users have: one CPU, one node, and the driver's own host where it brings one."""
    (tmp_path / "sys/devices/system/cpu/cpu3/topology").mkdir(parents=True)
    host = HostTopology.from_host(fsroot=tmp_path, driver=None)
    assert host == read_topology(tmp_path)
    assert host.cpus == {3}

    class Driver:
        name = "simulated:one"

        def host_topology(self) -> HostTopology:
            return host

    assert HostTopology.from_host(driver=Driver()) is host
