"""Claims across a real Ray cluster of two hosts, while other users of safe_gpu are busy on both."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.real import wait_for

from .conftest import PROGRAMS, python_with

pytestmark = [pytest.mark.engine, pytest.mark.timeout(360)]

ADDRESS = "10.77.0.1:6379"
OPTIONS = ["--num-cpus=2", "--num-gpus=4", "--object-store-memory=80000000", "--disable-usage-stats"]


class RayCluster:
    """Hosts, one or two, with a Ray node each; programs run on them."""

    def __init__(self, hosts: Any, python: str) -> None:
        self.hosts = hosts
        self.python = python
        hosts.env["PATH"] = f"{Path(python).parent}:{hosts.env['PATH']}"
        hosts.env["RAY_USAGE_STATS_ENABLED"] = "0"
        hosts.env["RAY_AUTH_MODE"] = "token"
        hosts.env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # of this cluster alone, whatever ~/.ray holds
        hosts.env["PYTHONPATH"] += f":{PROGRAMS}"
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={hosts.scratch}/ray"]
        for host, role in zip(hosts.names, (head, [f"--address={ADDRESS}"]), strict=False):
            address = self.address(host)
            hosts.run(host, "ray", "start", *role, f"--node-ip-address={address}", *OPTIONS)

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.names.index(host) + 1}"

    def start(self, host: str, *arguments: str) -> Any:
        command = [self.python, str(PROGRAMS / "on_ray.py"), ADDRESS, *arguments]
        return self.hosts.start(host, *command, MY_ADDRESS=self.address(host))

    def run(self, *arguments: str) -> str:
        output: str = self.hosts.finish(self.start("hosta", *arguments), 240)
        print(output)
        return output


@pytest.fixture(scope="module")
def cluster(make_hosts: Callable[..., Any]) -> RayCluster:
    python = python_with("ray")  # before any host is made
    return RayCluster(make_hosts(2), python)


@pytest.fixture(autouse=True)
def no_claims_and_no_marks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        hosts = request.getfixturevalue("cluster").hosts
        wait_for(lambda: not hosts.claimed(), "end of all claims")
        left = [path.name for path in hosts.marks.glob("host*")]
        for path in hosts.marks.iterdir():
            path.unlink()
        assert not left


@pytest.mark.parametrize("part", ["workers", "refusals", "losses"])
def test_workers_refusals_and_deaths(cluster: RayCluster, part: str) -> None:
    cluster.run(part)


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_driver_ends(cluster: RayCluster, end: str) -> None:
    process = cluster.start("hosta", "driver", end)
    cluster.hosts.see_the_driver_end(process)
    process.wait(30)


def test_two_claims_from_opposite_ends(cluster: RayCluster) -> None:
    """Twenty times: one wins, the other fails cleanly or waits; never a deadlock, nobody is booked twice."""
    hosts = cluster.hosts
    drivers = [cluster.start(host, "race", str(me), "20") for me, host in enumerate(hosts.names)]
    wins = sum(int(hosts.finish(driver, 300).split("won ")[1].split()[0]) for driver in drivers)
    assert wins == 10 + 2 * 10


def test_other_users_on_both_hosts(cluster: RayCluster) -> None:
    with cluster.hosts.neighbours(cluster.python):
        cluster.run("among_others")


def test_amd_gpus(make_hosts: Callable[..., Any], cluster: RayCluster) -> None:
    hosts = make_hosts(1, "mi250x")
    RayCluster(hosts, cluster.python).run("amd")
    wait_for(lambda: not hosts.claimed(), "end of all claims")


def test_two_nodes_on_one_host(make_hosts: Callable[..., Any], cluster: RayCluster) -> None:
    hosts = make_hosts(1)
    env = cluster.hosts.env
    hosts.env.update({name: env[name] for name in env if name.startswith("RAY_") or name in ("PATH", "PYTHONPATH")})
    code = f"""
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1, "object_store_memory": 80000000}})
cluster.add_node(num_cpus=1, object_store_memory=80000000)
os.environ["MY_ADDRESS"] = cluster.head_node.node_ip_address
sys.argv[1:] = [cluster.address, "one_host_twice"]
sys.path.insert(0, {str(PROGRAMS)!r})
import on_ray
on_ray.main()
"""
    assert "done" in hosts.run("hosta", cluster.python, "-c", code)
