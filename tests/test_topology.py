"""The name by which users read the topology of a host."""

from pathlib import Path

from safe_gpu.topology.host import HostTopology, read_topology


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
