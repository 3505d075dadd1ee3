"""Plans beside the recorded answers of gpu_affinity (2,280 cases) and of torch.numa (1,032 sets of GPUs), what these do
not show by hand, and laws for any machine.

``peers.json.gz`` has the answers of gpu_affinity's planning functions (f35fb78) and of torch 2.13.0, with made-up hosts
in place of what they read from NVML, CUDA and /sys. A case is a host, a mask, the GPUs, the options and an answer: one
text of CPU lists, with "-" for a GPU that got nothing, or "error". Hosts, masks and answers stand there once each.
"""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from affinity.conftest import cpus, make_host
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api

import safe_gpu

PAGE = Path(safe_gpu.__file__).parent / "affinity" / "README.md"


def shares(topology: api.HostTopology, mode: str, **options: Any) -> list[str]:
    return [api.format_cpulist(share) for share in api.plan(topology, mode=mode, **options)]


with gzip.open(Path(__file__).parent / "peers.json.gz") as file:
    RECORDED = json.load(file)
HOSTS: dict[str, dict[str, Any]] = RECORDED["hosts"]
BUILT = {name: make_host(**shape) for name, shape in HOSTS.items()}
MASKS = [cpus(text) for text in RECORDED["masks"]]


def recorded(peer: str) -> Iterator[tuple[api.HostTopology, dict[str, Any], str, str]]:
    """Of each case the host, the options, their answer and ours."""
    for name, mask, gpus, options, number in RECORDED[peer]:
        try:
            ours = ";".join(shares(BUILT[name], **options, allowed=MASKS[mask], gpus=gpus))
        except api.GPUAffinityError:
            ours = "error"
        yield BUILT[name], options, RECORDED["answers"][number], ours


def reason(host: api.HostTopology, options: dict[str, Any], theirs: str) -> str:
    """Why an answer differs, as the first words of the row in the page; "" if no reason applies."""
    if max(map(len, host.cores)) > 2:
        return "more than two threads"
    if "-" in theirs.split(";") and options["mode"] == "single_unique":
        return "a GPU without a core"
    socket_is_wider = options["scope"] == "socket" and len(host.nodes) > len(host.packages)
    if options["mode"] == "all" and options["max_physical_cores"]:
        return "own node first" if socket_is_wider else "order of cores"
    if options["mode"].startswith("unique_") and socket_is_wider:
        return "cores are dropped"
    return ""


def test_the_planner_of_gpu_affinity() -> None:
    found: Counter[str] = Counter()
    for host, options, theirs, ours in recorded("gpu_affinity"):
        if ours != theirs:
            why = reason(host, options, theirs)
            assert why, (options, theirs, ours)
            found[why] += 1
    section = PAGE.read_text().partition("## What differs from gpu_affinity\n")[2]
    told = dict(re.findall(r"^\| \*\*([^*]+)\*\*.*\| (\d+) \|$", section, re.MULTILINE))
    assert found == {why: int(count) for why, count in told.items()}
    assert len(RECORDED["gpu_affinity"]) == 2280


def test_the_modes_of_torch() -> None:
    assert [case for case in recorded("torch") if case[2] != case[3]] == []
    assert len(RECORDED["torch"]) == 4 * 1032


# The fine print: each rule with a host that shows it.

ONE_LOGICAL, SOCKET, UNBALANCED = {"multithreading": "single_logical"}, {"scope": "socket"}, {"balanced": False}
TWENTY_CORES = {**SOCKET, **ONE_LOGICAL, "max_physical_cores": 20}
FOUR_THREADS = {"cores_per_node": 2, "nodes": 1, "smt": 4, "gpu_nodes": [0]}  # {0,2,4,6} {1,3,5,7}
SPARE_NODE = {"cores_per_node": 2, "nodes": 4, "nodes_per_package": 2, "smt": 1, "gpu_nodes": [0, 2, 3]}
ANYWHERE = {"cores_per_node": 2, "nodes": 2, "smt": 1, "gpu_nodes": [None]}


RULES: list[tuple[dict[str, Any], str, dict[str, Any], list[str]]] = [
    # The lowest sibling that is allowed.
    (FOUR_THREADS, "all", {"allowed": "2-7", **ONE_LOGICAL}, ["2-3"]),
    (FOUR_THREADS, "all", {"allowed": "2-7"}, ["2-7"]),
    # All of the socket, own node first, then those of the socket's other GPUs: 20 cores are 16 own and 4 of theirs.
    (HOSTS["dgx-a100"], "all", {**TWENTY_CORES, "gpus": [0, 2]}, ["16-19,48-63", "16-31,48-51"]),
    # Socket 0 has a node without a GPU, socket 1 is used up: with balance nobody gets more than 2 cores.
    (SPARE_NODE, "unique_contiguous", SOCKET, ["0-1", "4-5", "6-7"]),
    (SPARE_NODE, "unique_contiguous", {**SOCKET, **UNBALANCED}, ["0-3", "4-5", "6-7"]),
    # An unknown place is the whole host.
    *((ANYWHERE, mode, {}, ["0-3"]) for mode in ("node", "socket", "all", "exclusive")),
    # The order of gpus: the first in line takes the first cores.
    (HOSTS["dgx1"], "exclusive", {"gpus": [5, 0, 4]}, ["20-29,60-69", "0-19,40-59", "30-39,70-79"]),
]


def test_rules() -> None:
    """What the recorded answers of the peers do not show."""
    for shape, mode, options, expected in RULES:
        allowed = {"allowed": cpus(options["allowed"])} if "allowed" in options else {}
        assert shares(make_host(**shape), mode, **{**options, **allowed}) == expected, (shape, mode, options)


def test_socket_cores_are_dealt_round_robin_and_none_is_lost() -> None:
    """Node cores 0-2 of one GPU, other cores 3-5 and 6-7 of the socket: 0 gets 3 and 6, 1 gets 4 and 7, 2 gets 5."""
    topology = replace(
        make_host(cores_per_node=8, nodes=1, smt=1, gpu_nodes=[0]),
        nodes={0: cpus("0-2"), 1: cpus("3-5"), 2: cpus("6-7")},
    )
    for most, expected in ((None, "0-7"), (4, "0-3"), (7, "0-6")):  # round by round: 0 1 2, 3 4 5, 6 7
        assert shares(topology, "unique_contiguous", scope="socket", max_physical_cores=most) == [expected]


def test_the_picture_of_the_modes() -> None:
    """In help(Mode) and on the page: two GPUs on eight cores."""
    topology = make_host(cores_per_node=8, nodes=1, smt=1, gpu_nodes=[0, 0])
    pictures = (
        re.findall(r"^ *([a-z_]+) +([0-7][-,0-7]*) +([0-7][-,0-7]*) ", str(api.Mode.__doc__), re.MULTILINE),
        re.findall(r"^\| `([a-z_]+)` \| ([0-7][-,0-7]*) \| ([0-7][-,0-7]*) \|", PAGE.read_text(), re.MULTILINE),
    )
    assert pictures == ([(mode.value, *shares(topology, mode)) for mode in api.Mode],) * 2


def one_node(cores: int, *gpus: tuple[str, str], smt: int = 1) -> api.HostTopology:
    """A node of some cores, with GPUs whose node and socket are these CPUs."""
    places = [
        api.GpuLocality(index, "", 7 * index, cpus(near), cpus(socket)) for index, (near, socket) in enumerate(gpus)
    ]
    return replace(make_host(cores_per_node=cores, nodes=1, smt=smt), gpus=places)


def test_partly_overlapping_sets() -> None:
    """And a core {0,2} with one thread in each set. A GPU's own sets win over those of its node."""
    one, astride = one_node(4, ("0-2", ""), ("1-3", "")), one_node(2, ("0", ""), ("1-3", ""), smt=2)
    for mode in api.MODES:
        if mode in api.DIVIDING_MODES:
            for topology, names in ((one, "0-2 and 1-3 overlap"), (astride, "physical core of CPU 0")):
                with pytest.raises(api.GPUAffinityError, match=names):
                    api.plan(topology, mode=mode)
            assert len(api.plan(one, mode=mode, allowed=cpus("1-2"))) == 2  # the same once cut
        else:
            assert len(api.plan(one, mode=mode)) == 2
    assert shares(one_node(4, ("0-3", ""), ("0-3", "")), "exclusive") == ["0-1", "2-3"]
    assert shares(one_node(4, ("2-3", "1-3")), "socket") == ["1-3"]
    # Sockets that overlap matter only where they are divided; dealing CPU 2 twice would give it to both.
    sockets = one_node(6, ("0-1", "0-3"), ("4-5", "2-5"))
    assert shares(sockets, "unique_contiguous", scope="node") == ["0-1", "4-5"]
    assert shares(sockets, "all", scope="socket") == ["0-3", "2-5"]
    with pytest.raises(api.GPUAffinityError, match="socket sets 0-3 and 2-5 overlap"):
        api.plan(sockets, mode="unique_contiguous", scope="socket")


def test_nothing_local_is_the_nearest_node() -> None:
    """On a DGX A100, whose GPUs are on nodes 3, 1, 7, 5 in pairs: node n has cores 16n to 16n+15.

    Allowed are node 2 (12 from node 3, the same socket) and node 4 (32, the other socket).
    """
    dgx_a100 = make_host(**HOSTS["dgx-a100"], distances=True)
    allowed = cpus("32-47,64-79")
    for mode in ("node", "core-complex"):
        share = api.plan(dgx_a100, mode=mode, allowed=allowed, gpus=[0])[0]
        assert share <= cpus("32-47")
        assert api.is_remote(dgx_a100, dgx_a100.gpus[0], share)
    assert shares(dgx_a100, "node", allowed=allowed, gpus=[4]) == ["64-79"]
    assert shares(dgx_a100, "socket", allowed=allowed, gpus=[0]) == ["32-47"]  # within the socket, so local to it
    assert shares(dgx_a100, "socket", allowed=cpus("64-79"), gpus=[0]) == ["64-79"]
    for mode in set(api.MODES) - {"node", "socket", "core-complex"}:
        with pytest.raises(api.GPUAffinityError):
            api.plan(dgx_a100, mode=mode, allowed=allowed, gpus=[0])
    assert not api.is_remote(make_host(**ANYWHERE), api.GpuLocality(0), cpus("0"))  # its node is unknown


def test_one_gpu_without_a_share_fails_the_whole_plan() -> None:
    dgx1, two = BUILT["dgx1"], make_host(cores_per_node=2, nodes=2, gpu_nodes=[0, 0, 0, 1])
    for mode in api.DIVIDING_MODES:
        with pytest.raises(api.GPUAffinityError, match=r"2 physical cores near 3 GPUs \(0, 1, 2\)"):
            api.plan(two, mode=mode, **({"min_physical_cores": 0} if mode.startswith("unique_") else {}))
    for mode in ("node", "socket", "core-complex"):  # no distances are known
        with pytest.raises(api.GPUAffinityError, match=r"GPU 0 .*20-39"):
            api.plan(dgx1, mode=mode, allowed=cpus("20-39"))
    assert api.plan(dgx1, mode="unique_contiguous", min_physical_cores=5)
    for mode, least, has in (("unique_contiguous", 6, 5), ("all", 21, 20)):
        with pytest.raises(api.GPUAffinityError, match=rf"{has} physical cores near GPU 0 .* at least {least}"):
            api.plan(dgx1, mode=mode, min_physical_cores=least)


def test_strings_and_members_are_the_same() -> None:
    members: dict[str, Any] = {"mode": api.Mode.UNIQUE_CONTIGUOUS, "multithreading": api.Multithreading.SINGLE_LOGICAL}
    assert api.plan(BUILT["dgx1"], **members) == api.plan(
        BUILT["dgx1"], **{name: str(one) for name, one in members.items()}
    )
    assert {mode.value for mode in api.Mode} < set(api.MODES)
    assert (tuple(map(str, api.Scope)), tuple(map(str, api.Multithreading))) == (api.SCOPES, api.MULTITHREADING)
    assert api.AffinityOptions(mode=api.Mode.ALL) == api.AffinityOptions(mode="all")


def test_bad_input_names_itself() -> None:
    for bad, names in (
        ({"mode": "nodes"}, "'nodes'"),
        ({"scope": "host"}, "affinity scope 'host'"),
        ({"multithreading": "none"}, "multithreading mode 'none'"),
        ({"balanced": 1}, "balanced must be True or False, not 1"),
        ({"max_physical_cores": 0}, "0"),
        ({"gpus": [0, 0]}, "twice"),
        ({"allowed": [500]}, "80 online CPUs"),
    ):
        arguments: dict[str, Any] = {"mode": "unique_contiguous", **bad}
        with pytest.raises(api.GPUAffinityError, match=names):
            api.plan(BUILT["dgx1"], **arguments)


# Laws for any machine


@st.composite
def hosts(draw: st.DrawFn) -> api.HostTopology:
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


def cores_of(topology: api.HostTopology, share: Iterable[int]) -> set[frozenset[int]]:
    return {core for core in topology.cores if not core.isdisjoint(share)}


@settings(max_examples=50)
@given(
    hosts(),
    st.sampled_from(api.MODES),
    st.sampled_from(api.SCOPES),
    st.sampled_from(api.MULTITHREADING),
    st.booleans(),
    st.data(),
)
def test_laws(
    topology: api.HostTopology, mode: str, scope: str, multithreading: str, balanced: bool, data: Any
) -> None:
    some = data.draw(st.frozensets(st.sampled_from(sorted(topology.cpus)), max_size=64))
    allowed = data.draw(st.sampled_from([topology.cpus, topology.cpus - some, some]))
    least = data.draw(st.integers(0, 3))
    most = data.draw(st.none() | st.integers(max(least, 1), 20))
    options: dict[str, Any] = {"scope": scope, "multithreading": multithreading, "balanced": balanced}
    options |= {"mode": mode, "min_physical_cores": least, "max_physical_cores": most, "allowed": allowed}
    try:
        found = api.plan(topology, **options)
    except api.GPUAffinityError:
        return
    assert found == api.plan(topology, **options)
    assert len(found) == len(topology.gpus)
    assert all(share and share <= allowed for share in found)
    used = [cores_of(topology, share) for share in found]
    if mode in api.DIVIDING_MODES:
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
        assert not balanced or len(set(map(len, used))) == 1
        assert all(least <= len(cores) <= (most or len(cores)) for cores in used)
    if mode in set(api.Mode):
        for share, cores in zip(found, used, strict=True):
            first = multithreading == "single_logical"
            assert share == ({min(core & allowed) for core in cores} if first else frozenset().union(*cores) & allowed)
