"""Shares by hand for three machines that everyone knows, each rule of the fine print, and laws for any machine."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from affinity.conftest import MakeHost, cpus, make_host
from affinity.peers import HOSTS
from hypothesis import given, settings
from hypothesis import strategies as st

import safe_gpu
from safe_gpu.affinity.gpu_affinity import Mode, Multithreading, Scope
from safe_gpu.affinity.options import DIVIDING_MODES, MODES, MULTITHREADING, SCOPES, AffinityOptions
from safe_gpu.affinity.planner import is_remote, plan
from safe_gpu.errors import GPUAffinityError
from safe_gpu.topology.cpulist import format_cpulist
from safe_gpu.topology.host import GpuLocality, HostTopology

PAGE = Path(safe_gpu.__file__).parent / "affinity" / "README.md"


def shares(topology: HostTopology, mode: str, **options: Any) -> list[str]:
    return [format_cpulist(share) for share in plan(topology, mode=mode, **options)]


@pytest.fixture
def dgx1(host: MakeHost) -> HostTopology:
    """DGX-1 (V100): 2 sockets of one node, 20 cores each (0-19 with 40-59, 20-39 with 60-79), 4 GPUs on each."""
    return host(**HOSTS["dgx1"])


@pytest.fixture
def dgx_a100(host: MakeHost) -> HostTopology:
    """DGX A100: 2 sockets of 4 nodes (NPS4), 16 cores each in 4 complexes; GPU pairs on nodes 3, 1, 7, 5.

    Node n has cores 16n to 16n+15, the second thread of core c is CPU c+128. Nodes 0, 2, 4 and 6 have no GPU.
    """
    return host(**HOSTS["dgx-a100"], distances=True)


@pytest.mark.parametrize(
    ("mode", "most", "expected"),
    [
        # Socket scope hands out the cores of nodes without a GPU too: the socket's 32 other cores (0-15, 32-47) are
        # dealt to its 32 node cores in order (16-31, 48-63): core 16 gets 0, ..., 31 gets 15, 48 gets 32, ..., 63 gets
        # 47.
        ("unique_contiguous", None, {0: "32-39,48-55", 1: "40-47,56-63", 2: "0-7,16-23", 7: "72-79,88-95"}),
        # All of the socket, own node first, then those of the socket's other GPUs: 20 cores are 16 own and 4 of theirs.
        ("all", 20, {0: "16-19,48-63", 2: "16-31,48-51"}),
    ],
)
def test_the_socket_of_a_dgx_a100(dgx_a100: HostTopology, mode: str, most: int, expected: dict[int, str]) -> None:
    found = shares(dgx_a100, mode, scope="socket", multithreading="single_logical", max_physical_cores=most)
    assert {index: found[index] for index in expected} == expected


# The fine print: each rule with a host that shows it.

ONE_LOGICAL, SOCKET, UNBALANCED = {"multithreading": "single_logical"}, {"scope": "socket"}, {"balanced": False}
FOUR_THREADS = {"cores_per_node": 2, "nodes": 1, "smt": 4, "gpu_nodes": [0]}  # {0,2,4,6} {1,3,5,7}
SPARE_NODE = {"cores_per_node": 2, "nodes": 4, "nodes_per_package": 2, "smt": 1, "gpu_nodes": [0, 2, 3]}
ANYWHERE = {"cores_per_node": 2, "nodes": 2, "smt": 1, "gpu_nodes": [None]}


RULES: list[tuple[dict[str, Any], str, dict[str, Any], list[str]]] = [
    # The lowest sibling that is allowed.
    (FOUR_THREADS, "all", {"allowed": "2-7", **ONE_LOGICAL}, ["2-3"]),
    (FOUR_THREADS, "all", {"allowed": "2-7"}, ["2-7"]),
    # Socket 0 has a node without a GPU, socket 1 is used up: with balance nobody gets more than 2 cores.
    (SPARE_NODE, "unique_contiguous", SOCKET, ["0-1", "4-5", "6-7"]),
    (SPARE_NODE, "unique_contiguous", {**SOCKET, **UNBALANCED}, ["0-3", "4-5", "6-7"]),
    # An unknown place is the whole host.
    *((ANYWHERE, mode, {}, ["0-3"]) for mode in ("node", "socket", "all", "exclusive")),
    # The order of gpus: the first in line takes the first cores.
    (HOSTS["dgx1"], "exclusive", {"gpus": [5, 0, 4]}, ["20-29,60-69", "0-19,40-59", "30-39,70-79"]),
    (HOSTS["dgx1"], "all", {"max_physical_cores": 1, "gpus": [0]}, ["0,40"]),
    (HOSTS["dgx1"], "exclusive", {"gpus": ()}, []),
    ({"cores_per_node": 1, "nodes": 1}, "node", {}, []),
]


def test_rules(host: MakeHost) -> None:
    """What the recorded answers of the peers do not show."""
    for shape, mode, options, expected in RULES:
        allowed = {"allowed": cpus(options["allowed"])} if "allowed" in options else {}
        assert shares(host(**shape), mode, **{**options, **allowed}) == expected, (shape, mode, options)


def test_socket_cores_are_dealt_round_robin_and_none_is_lost(host: MakeHost) -> None:
    """Node cores 0-2 of one GPU, other cores 3-5 and 6-7 of the socket: 0 gets 3 and 6, 1 gets 4 and 7, 2 gets 5."""
    topology = replace(
        host(cores_per_node=8, nodes=1, smt=1, gpu_nodes=[0]), nodes={0: cpus("0-2"), 1: cpus("3-5"), 2: cpus("6-7")}
    )
    for most, expected in ((None, "0-7"), (4, "0-3"), (7, "0-6")):  # round by round: 0 1 2, 3 4 5, 6 7
        assert shares(topology, "unique_contiguous", scope="socket", max_physical_cores=most) == [expected]


def test_the_picture_of_the_modes(host: MakeHost) -> None:
    """In help(Mode) and on the page: two GPUs on eight cores."""
    topology = host(cores_per_node=8, nodes=1, smt=1, gpu_nodes=[0, 0])
    pictures = (
        re.findall(r"^ *([a-z_]+) +([0-7][-,0-7]*) +([0-7][-,0-7]*) ", str(Mode.__doc__), re.MULTILINE),
        re.findall(r"^\| `([a-z_]+)` \| ([0-7][-,0-7]*) \| ([0-7][-,0-7]*) \|", PAGE.read_text(), re.MULTILINE),
    )
    assert pictures == ([(mode.value, *shares(topology, mode)) for mode in Mode],) * 2


def one_node(host: MakeHost, cores: int, *gpus: tuple[str, str], smt: int = 1) -> HostTopology:
    """A node of some cores, with GPUs whose node and socket are these CPUs."""
    places = [GpuLocality(index, "", 7 * index, cpus(near), cpus(socket)) for index, (near, socket) in enumerate(gpus)]
    return replace(host(cores_per_node=cores, nodes=1, smt=smt), gpus=places)


def test_partly_overlapping_sets(host: MakeHost) -> None:
    """And a core {0,2} with one thread in each set. A GPU's own sets win over those of its node."""
    one, astride = one_node(host, 4, ("0-2", ""), ("1-3", "")), one_node(host, 2, ("0", ""), ("1-3", ""), smt=2)
    for mode in MODES:
        if mode in DIVIDING_MODES:
            for topology, names in ((one, "0-2 and 1-3 overlap"), (astride, "physical core of CPU 0")):
                with pytest.raises(GPUAffinityError, match=names):
                    plan(topology, mode=mode)
            assert len(plan(one, mode=mode, allowed=cpus("1-2"))) == 2  # the same once cut
        else:
            assert len(plan(one, mode=mode)) == 2
    assert shares(one_node(host, 4, ("0-3", ""), ("0-3", "")), "exclusive") == ["0-1", "2-3"]
    assert shares(one_node(host, 4, ("2-3", "1-3")), "socket") == ["1-3"]


def test_partly_overlapping_sockets(host: MakeHost) -> None:
    """Only where the sockets are divided; dealing CPU 2 twice would give it to both."""
    one = one_node(host, 6, ("0-1", "0-3"), ("4-5", "2-5"))
    assert shares(one, "unique_contiguous", scope="node") == ["0-1", "4-5"]
    assert shares(one, "all", scope="socket") == ["0-3", "2-5"]
    with pytest.raises(GPUAffinityError, match="socket sets 0-3 and 2-5 overlap"):
        plan(one, mode="unique_contiguous", scope="socket")


def test_nothing_local_is_the_nearest_node(host: MakeHost, dgx_a100: HostTopology) -> None:
    """Allowed are node 2 (12 from node 3, the same socket) and node 4 (32, the other socket)."""
    allowed = cpus("32-47,64-79")
    for mode in ("node", "core-complex"):
        share = plan(dgx_a100, mode=mode, allowed=allowed, gpus=[0])[0]
        assert share <= cpus("32-47")
        assert is_remote(dgx_a100, dgx_a100.gpus[0], share)
    assert shares(dgx_a100, "node", allowed=allowed, gpus=[4]) == ["64-79"]
    assert shares(dgx_a100, "socket", allowed=allowed, gpus=[0]) == ["32-47"]  # within the socket, so local to it
    assert shares(dgx_a100, "socket", allowed=cpus("64-79"), gpus=[0]) == ["64-79"]
    for mode in set(MODES) - {"node", "socket", "core-complex"}:
        with pytest.raises(GPUAffinityError):
            plan(dgx_a100, mode=mode, allowed=allowed, gpus=[0])
    assert not is_remote(host(**ANYWHERE), GpuLocality(0), cpus("0"))  # its node is unknown


def test_one_gpu_without_a_share_fails_the_whole_plan(host: MakeHost, dgx1: HostTopology) -> None:
    two = host(cores_per_node=2, nodes=2, gpu_nodes=[0, 0, 0, 1])
    for mode in DIVIDING_MODES:
        with pytest.raises(GPUAffinityError, match=r"2 physical cores near 3 GPUs \(0, 1, 2\)"):
            plan(two, mode=mode, **({"min_physical_cores": 0} if mode.startswith("unique_") else {}))
    for mode in ("node", "socket", "core-complex"):  # no distances are known
        with pytest.raises(GPUAffinityError, match=r"GPU 0 .*20-39"):
            plan(dgx1, mode=mode, allowed=cpus("20-39"))
    assert plan(dgx1, mode="unique_contiguous", min_physical_cores=5)
    for mode, least, has in (("unique_contiguous", 6, 5), ("all", 21, 20)):
        with pytest.raises(GPUAffinityError, match=rf"{has} physical cores near GPU 0 .* at least {least}"):
            plan(dgx1, mode=mode, min_physical_cores=least)


def test_strings_and_members_are_the_same(dgx1: HostTopology) -> None:
    text = plan(dgx1, mode="unique_contiguous", scope="socket", multithreading="single_logical")
    members: dict[str, Any] = {"scope": Scope.SOCKET, "multithreading": Multithreading.SINGLE_LOGICAL}
    assert plan(dgx1, mode=Mode.UNIQUE_CONTIGUOUS, **members) == text
    assert {mode.value for mode in Mode} < set(MODES)
    assert tuple(scope.value for scope in Scope) == SCOPES
    assert tuple(threads.value for threads in Multithreading) == MULTITHREADING
    assert (str(Mode.SINGLE_UNIQUE), AffinityOptions(mode=Mode.ALL)) == ("single_unique", AffinityOptions(mode="all"))


# Bad input


def test_bad_input_names_itself(dgx1: HostTopology) -> None:
    for bad, names in (
        ({"mode": "nodes"}, "'nodes'"),
        ({"scope": "host"}, "'host'"),
        ({"balanced": "no"}, "'no'"),
        ({"min_physical_cores": -1}, "-1"),
        ({"max_physical_cores": 0}, "0"),
        ({"gpus": [8]}, "GPU 8"),
        ({"gpus": [0, 0]}, "twice"),
        ({"allowed": [500]}, "80 online CPUs"),
    ):
        arguments: dict[str, Any] = {"mode": "unique_contiguous", **bad}
        with pytest.raises(GPUAffinityError, match=names):
            plan(dgx1, **arguments)


# Laws for any machine


@st.composite
def hosts(draw: st.DrawFn) -> HostTopology:
    smt = draw(st.sampled_from([1, 2, 4, 8]))
    nodes = draw(st.integers(1, 8))
    cores_per_node = draw(st.integers(1, max(1, min(64, 1024 // (smt * nodes)))))
    ids = sorted(draw(st.sets(st.integers(0, 255), min_size=nodes, max_size=nodes)))
    return make_host(
        cores_per_node=cores_per_node,
        nodes=nodes,
        nodes_per_package=draw(st.sampled_from([1, 2, 4])),
        smt=smt,
        gpu_nodes=draw(st.lists(st.sampled_from([*ids, None]), min_size=1, max_size=16)),
        caches_per_node=draw(st.integers(1, cores_per_node)),
        distances=draw(st.booleans()),
        ids=ids,
        dense=draw(st.booleans()),
        order=draw(st.permutations(range(cores_per_node * nodes))) if cores_per_node * nodes < 40 else None,
    )


@st.composite
def questions(draw: st.DrawFn) -> tuple[HostTopology, dict[str, Any]]:
    topology = draw(hosts())
    allowed = None
    if draw(st.booleans()):
        some = draw(st.sets(st.sampled_from(sorted(topology.cpus)), max_size=64))
        allowed = topology.cpus - some if draw(st.booleans()) else frozenset(some)
    least = draw(st.integers(0, 3))
    return topology, {
        "mode": draw(st.sampled_from(MODES)),
        "scope": draw(st.sampled_from(["node", "socket"])),
        "multithreading": draw(st.sampled_from(["all_logical", "single_logical"])),
        "balanced": draw(st.booleans()),
        "min_physical_cores": least,
        "max_physical_cores": draw(st.none() | st.integers(max(least, 1), 20)),
        "allowed": allowed,
    }


def cores_of(topology: HostTopology, share: Iterable[int]) -> set[frozenset[int]]:
    return {core for core in topology.cores if not core.isdisjoint(share)}


@settings(max_examples=100)
@given(questions())
def test_laws(question: tuple[HostTopology, dict[str, Any]]) -> None:
    topology, options = question
    try:
        found = plan(topology, **options)
    except GPUAffinityError:
        return
    mode, allowed = options["mode"], topology.cpus if options["allowed"] is None else options["allowed"]
    assert found == plan(topology, **options)
    assert len(found) == len(topology.gpus)
    assert all(share and share <= allowed for share in found)
    used = [cores_of(topology, share) for share in found]
    if mode in DIVIDING_MODES:
        assert sum(map(len, used)) == len(set().union(*used)), "a physical core went to two GPUs"
    if mode == "exclusive":
        for gpu in topology.gpus:
            same = [
                len(other)
                for peer, other in zip(topology.gpus, used, strict=True)
                if topology.node_set(peer) == topology.node_set(gpu)
            ]
            assert max(same) - min(same) <= 1
            assert same == sorted(same, reverse=True)
            assert sum(same) == len(cores_of(topology, topology.node_set(gpu) & allowed))
    if mode.startswith("unique"):
        if options["balanced"]:
            assert len(set(map(len, used))) == 1
        for cores in used:
            assert options["min_physical_cores"] <= len(cores) <= (options["max_physical_cores"] or len(cores))
    if mode in set(Mode):
        single = options["multithreading"] == "single_logical"
        for share, cores in zip(found, used, strict=True):
            assert share == ({min(core & allowed) for core in cores} if single else frozenset().union(*cores) & allowed)
