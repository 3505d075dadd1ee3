"""Which GPUs the variables show to CUDA, HIP and Level Zero, and what a claim writes into them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import api

UUIDS = ("GPU-aa000000", "GPU-ab000000", "GPU-c0000000", "GPU-d0000000")


def host(*gpus: api.Gpu) -> api.HostSnapshot:
    return api.HostSnapshot(gpus)


def alike() -> api.HostSnapshot:
    return host(*(api.Gpu(index, uuid, "NVIDIA A100") for index, uuid in enumerate(UUIDS)))


def mixed() -> api.HostSnapshot:
    return host(*(gpu._replace(name=f"model {gpu.index}") for gpu in alike().gpus))


def with_lost(lost: int) -> api.HostSnapshot:
    return host(*(gpu._replace(lost=gpu.index == lost) for gpu in alike().gpus))


def with_mig() -> api.HostSnapshot:
    parent, whole = (
        api.Gpu(0, "GPU-aa000000", "NVIDIA H100", mig_enabled=True),
        api.Gpu(1, "GPU-ab000000", "NVIDIA H100"),
    )
    instance = api.Gpu(0, "MIG-11000000", "NVIDIA H100 MIG", mig_parent=parent.uuid, mig_instance=0)
    return host(parent, instance, instance._replace(uuid="MIG-12000000", mig_instance=1), whole)


def parsed(value: str, snapshot: api.HostSnapshot, device_order: str | None = None) -> api.VisibleLimit:
    visible_limit = api.parse_cuda(value, snapshot, device_order=device_order)
    assert visible_limit is not None
    return visible_limit


SHOWN = [
    ([], ["", "-1", "none", ",0", "99999999999999999999", "0,0", "1,0,1"]),
    ([], ["GPU-a", "GPU-x", "GPU-c,GPU-c0", "gpu-c", "c0000000", "GPU-c0000000-and-more"]),
    ([0], ["0", "0,,1", "0,9,1"]),
    ([1], ["1;2", "1,GPU-c"]),
    ([2], ["GPU-c", "GPU-c,GPU-a,GPU-d", "GPU-c,GPU-x,GPU-d", "GPU-c,1"]),
    ([0, 2], ["0,2,-1,1"]),
    ([1, 2], [" 1,\t2", "1 ,2 ", "1gpu2,2ampere", "01,0000000000000000002"]),
    ([2, 0], ["2,0", "GPU-c0000000,GPU-aa000000", " GPU-c, GPU-aa"]),
    ([3, 0, 2], ["+3,-0,2"]),
]


@pytest.mark.parametrize(("shown", "values"), SHOWN)
def test_what_a_value_shows(shown: list[int], values: list[str]) -> None:
    for value in values:
        visible_limit = parsed(value, alike())
        assert visible_limit.value == value
        assert visible_limit.uuids == tuple(UUIDS[index] for index in shown)
        assert not visible_limit.ambiguous
        assert visible_limit.uses_indices == bool(value.strip() and value.strip()[0] in "+-0123456789")
        assert all((uuid in visible_limit) == (uuid in visible_limit.uuids) for uuid in UUIDS)


def test_a_lost_gpu_is_not_counted() -> None:
    for value, shown, doubt in (("0,1", UUIDS[:2], ""), ("2", UUIDS[3:], "GPU 2 is lost"), (UUIDS[2], (), "")):
        found = parsed(value, with_lost(2))
        assert (found.uuids, found.ambiguous, doubt in found.doubt) == (shown, bool(doubt), True)


@given(
    st.text(alphabet="0123,-+ \tGPUMIGabcd/x", max_size=24),
    st.sampled_from([alike(), mixed(), with_lost(1), with_mig()]),
)
def test_any_text_is_read_and_shows_each_device_once(value: str, snapshot: api.HostSnapshot) -> None:
    uuids = parsed(value, snapshot).uuids
    assert len(set(uuids)) == len(uuids)
    assert set(uuids) <= {gpu.uuid for gpu in snapshot.gpus if not (gpu.lost or gpu.mig_enabled)}


@given(st.lists(st.integers(0, 3), unique=True), st.sampled_from(["index", "uuid"]), st.booleans())
def test_what_is_written_is_what_cuda_reads(indices: list[int], visible_as: str, of_one_model: bool) -> None:
    snapshot = alike() if of_one_model else mixed()
    gpus = [snapshot.gpus[index] for index in indices]
    written = api.render_cuda(gpus, visible_as=visible_as, snapshot=snapshot)
    visible_limit = parsed(written["CUDA_VISIBLE_DEVICES"], snapshot, written.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST"))
    assert visible_limit.uuids == tuple(gpu.uuid for gpu in gpus)
    assert not visible_limit.ambiguous


@pytest.mark.parametrize("snapshot", [with_mig(), with_lost(0)], ids=["mig", "lost"])
def test_uuids_where_numbers_mislead(snapshot: api.HostSnapshot) -> None:
    written = api.render_cuda([snapshot.gpus[-1]], visible_as="index", snapshot=snapshot)
    assert written == {"CUDA_VISIBLE_DEVICES": snapshot.gpus[-1].uuid}


BARE = "54d0709b-558d-5a59-9c65-0c5fc14a21a4"


@pytest.mark.parametrize(("lost", "numbers"), [(-1, "2,0"), (1, "1,0"), (3, "2,0")])
def test_numbers_where_cuda_does_not_take_a_uuid(lost: int, numbers: str) -> None:
    gpus = [api.Gpu(i, BARE if i == 2 else f"GPU-{i}", lost=i == lost) for i in range(4)]
    for visible_as in ("index", "uuid"):
        written = api.render_cuda([gpus[2], gpus[0]], visible_as=visible_as, snapshot=host(*gpus))
        assert written == {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if lost < 0:
        assert parsed(f"GPU-0,{BARE}", host(*gpus)).uuids == ("GPU-0", BARE)


def test_numbers_on_mixed_gpus() -> None:
    for value, order, ambiguous in (
        ("0", None, True),
        ("0", "PCI_BUS_ID", False),
        ("2,1,0,3", None, False),  # all of them
        *((value, None, False) for value in ("GPU-c", "-1", "", "9")),
    ):
        visible_limit = parsed(value, mixed(), order)
        assert (visible_limit.ambiguous, bool(visible_limit.doubt)) == (ambiguous, ambiguous)
    assert api.parse_cuda(None, mixed()) is None


def test_mig_by_uuid() -> None:
    first, second = "MIG-11000000", "MIG-12000000"
    for value, shown in (("MIG-11", (first,)), (second, (second,)), ("MIG-1", ()), ("MIG-GPU-ffffffff/1/0", ())):
        visible_limit = parsed(value, with_mig())
        assert (visible_limit.uuids, visible_limit.ambiguous) == (shown, False)
    assert all(parsed(value, with_mig(), "PCI_BUS_ID").ambiguous for value in ("0", "1"))


A, B, C, D = "GPU-aa00000000000001", "GPU-aa00000000000002", "GPU-bb00000000000003", "AMD-0000:05:00.0-3"
OF_AMD = api.HostSnapshot(tuple(api.Gpu(index, uuid, vendor="amd") for index, uuid in enumerate((A, B, C, D))))


def seen(rocr: str | None = None, hip: str | None = None, cuda: str | None = None) -> tuple[str, ...] | None:
    given = {"ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip, "CUDA_VISIBLE_DEVICES": cuda}
    return uuids(api.read_rocm({name: value for name, value in given.items() if value is not None}, OF_AMD))


def uuids(visible_limit: api.VisibleLimit | None) -> tuple[str, ...] | None:
    return None if visible_limit is None else visible_limit.uuids


BY_ROCR: list[tuple[tuple[str, ...], list[str]]] = [
    ((A,), ["0", "0,4,1", "0,,2", "0,", A]),
    ((B,), ["0x1,010", "+1", "1,x,2", "1,1,2"]),  # 010 is 8 in C
    ((C,), ["02", "gpu-BB", "2," + C]),  # the last is the same one again
    ((B, D), [" 1 ,3\t"]),
    ((B, C), ["1," + C]),
    ((A, C), [A.lower() + "," + C.upper()]),
    ((A, B, C, D), ["0,1,2,3,0"]),
    ((), ["-1", "", "4", "1 2", "08", "GPU-", "GPU-aa00000000000001f", "GPU-cc,0"]),
    ((), ["GPU-aa", D]),  # two GPUs; none, since it has no UUID
]
BY_HIP: list[tuple[tuple[str, ...], list[str]]] = [
    ((A,), ["0", "0, 1", A]),
    ((B,), ["1,4,0"]),
    ((C, A), ["2,0"]),
    ((B, C), ["1,1,2"]),  # no effect
    ((), ["01", " 1", "-1", "4", "GPU-dd,0"]),
]


def test_rocr_and_hip_and_cuda() -> None:
    for shown, values in BY_ROCR:
        assert [seen(rocr=value) for value in values] == [shown] * len(values)
    for shown, values in BY_HIP:
        for value in values:
            assert seen(hip=value) == seen(hip=value, cuda="3") == shown, value
            assert seen(cuda=value) == seen(hip="", cuda=value) == shown, value


def test_hip_counts_what_rocr_left() -> None:
    for rocr, hip, cuda, shown in (
        ("3,1", "1", None, (B,)),
        ("3,1", None, "0", (D,)),
        ("3,1", "", "", (D, B)),
        ("", "0", None, ()),
        (None, "", "", None),
    ):
        assert seen(rocr, hip, cuda) == shown


def test_what_a_claim_writes_is_read_back() -> None:
    for visible_as in ("index", "uuid"):
        written = api.render_visible([OF_AMD.gpus[3], OF_AMD.gpus[0]], visible_as=visible_as, snapshot=OF_AMD)
        assert written == {"ROCR_VISIBLE_DEVICES": f"3,{A}", "HIP_VISIBLE_DEVICES": "0,1", CUDA: "0,1"}
        limit = api.read_rocm(written, OF_AMD)
        assert limit is not None
        assert (limit.uuids, limit.title.split()[0]) == ((D, A), f"ROCR_VISIBLE_DEVICES=3,{A}")
    with_opencl = {"GPU_DEVICE_ORDINAL": "2,3"}  # it is written where it is set
    written = api.render_visible(OF_AMD.gpus[2:3], visible_as="index", snapshot=OF_AMD, environ=with_opencl)
    assert written["GPU_DEVICE_ORDINAL"] == "0"


CUDA = "CUDA_VISIBLE_DEVICES"
RAY = {"RAY_RAYLET_PID": "7"}


def test_under_ray_rocr_is_left_alone() -> None:
    for environ, visible_as, written in (
        (RAY, "index", {"HIP_VISIBLE_DEVICES": "3,0"}),
        # Ray refuses two values that differ
        ({**RAY, "ROCR_VISIBLE_DEVICES": "3,2,0"}, "index", {"HIP_VISIBLE_DEVICES": "0,2"}),
    ):
        chosen = [OF_AMD.gpus[3], OF_AMD.gpus[0]]
        assert api.render_visible(chosen, visible_as=visible_as, snapshot=OF_AMD, environ=environ) == written
        assert uuids(api.read_rocm({**environ, **written}, OF_AMD)) == (D, A)


SLURM = dict.fromkeys(("ROCR_VISIBLE_DEVICES", CUDA, "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL"), "2,3")


def test_the_list_that_slurm_writes_twice_counts_once() -> None:
    """By default gres.conf has no flags."""
    for environ, inside in (
        ({"SLURM_JOB_ID": "7", **SLURM}, (C, D)),
        ({"SLURM_JOB_ID": "7", CUDA: "2,3"}, (C, D)),  # Slurm before 21.08
        # what a user has chosen inside of it counts as HIP counts it
        ({"SLURM_JOB_ID": "7", **SLURM, "HIP_VISIBLE_DEVICES": "1"}, (D,)),
        # elsewhere two equal lists are what HIP makes of them
        ({"ROCR_VISIBLE_DEVICES": "2,3", CUDA: "2,3"}, ()),
    ):
        assert uuids(api.visible_devices.read_visible_once(environ, OF_AMD)) == inside
    assert uuids(api.read_rocm(api.visible_devices.hide_all(), OF_AMD)) == ()
    assert set(api.visible_devices.visible_variables(OF_AMD)) <= set(api.visible_devices.hide_all())


MASK, HIERARCHY, ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
SELECTOR = "ONEAPI_DEVICE_SELECTOR"


def cards(*tiles: int, missing: int = 0) -> api.HostSnapshot:
    """Cards with so many tiles each, after integrated GPUs that have numbers and are not listed."""
    return api.HostSnapshot(
        tuple(api.Gpu(missing + n, f"INTEL-{n}", "Max", vendor="intel", tiles=count) for n, count in enumerate(tiles))
    )


def test_what_a_mask_shows_and_when_it_is_ambiguous() -> None:
    for environ, shown in (
        ({}, None),
        ({MASK: "1", HIERARCHY: "COMPOSITE"}, ("INTEL-1",)),
        ({MASK: "0.0,0.1", HIERARCHY: "FLAT"}, ()),
    ):
        limit = api.read_level_zero(environ, cards(2, 2, 2))
        assert uuids(limit) == shown
        assert limit is None or not limit.ambiguous
    models = api.HostSnapshot(tuple(gpu._replace(name=f"Arc {gpu.index}") for gpu in cards(1, 1).gpus))
    for snapshot, order, ambiguous in (
        (cards(2, 2), "", True),
        (cards(1, 1), "", False),
        (models, "", True),
        (models, "1", False),
    ):
        limit = api.read_level_zero({MASK: "1", ORDER: order}, snapshot)
        assert limit is not None
        assert (limit.ambiguous, HIERARCHY in limit.clear_by) == (ambiguous, True)


def test_what_a_claim_of_cards_writes() -> None:
    snapshot = cards(2, 2, missing=1)
    written = api.render_visible(snapshot.gpus[1:], visible_as="index", snapshot=snapshot)
    assert list(written.items()) == [(MASK, "3,4"), (HIERARCHY, "FLAT"), (ORDER, "1")]
    environ = {HIERARCHY: "COMPOSITE", SELECTOR: "level_zero:1"}
    written = api.render_visible(snapshot.gpus[1:], visible_as="uuid", snapshot=snapshot, environ=environ)
    assert written == {MASK: "2", HIERARCHY: "COMPOSITE", ORDER: "1", SELECTOR: "level_zero:0"}
    environ = {SELECTOR: "level_zero:gpu"}  # no number
    assert SELECTOR not in api.render_visible(snapshot.gpus, visible_as="index", snapshot=snapshot, environ=environ)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(0, 2),
    st.sampled_from(["COMPOSITE", "FLAT", "COMBINED", "", "nonsense"]),
    st.data(),
)
def test_a_written_mask_is_read_again(tiles: list[int], missing: int, hierarchy: str, data: st.DataObject) -> None:
    snapshot = cards(*tiles, missing=missing)
    gpus = data.draw(st.lists(st.sampled_from(snapshot.gpus), min_size=1, unique_by=lambda gpu: gpu.uuid))
    written = api.render_visible(gpus, visible_as="index", snapshot=snapshot, environ={HIERARCHY: hierarchy})
    limit = api.read_level_zero(written, snapshot)
    assert limit is not None
    assert (limit.ambiguous, set(limit.uuids)) == (False, {gpu.uuid for gpu in gpus})


FOUR = [api.Gpu(index, f"GPU-{index}", "Model") for index in range(4)]


def losing(*lost: int) -> api.HostSnapshot:
    return api.HostSnapshot(tuple(gpu._replace(lost=gpu.index in lost) for gpu in FOUR))


def named(*indices: int) -> list[str]:
    return [f"GPU-{index}" for index in indices]


def test_what_indices_mean_now() -> None:
    for value, claimed, lost, text in (
        # They mean what they did.
        *((value, (1,), (0,), "") for value in ("GPU-1", None, "", "-1")),  # the last: a program that hides its GPUs
        ("1", (1,), (), ""),
        ("1", (1,), (3,), ""),  # a GPU behind it is lost
        ("1", (), (0,), ""),  # no claim
        # They have shifted.
        ("1", (1,), (0,), "now means GPU 2, which this claim does not hold, since GPU 0 is lost: "),
        ("3", (3,), (0,), "now means fewer GPUs than this claim holds, since GPU 0 is lost: "),
        ("1", (2,), (), "now means GPU 1, which this claim does not hold: "),
    ):
        found = api.stale_indices(value, "PCI_BUS_ID", named(*claimed), losing(*lost))
        assert found.startswith(f"CUDA_VISIBLE_DEVICES={value} {text}" if text else "")
        assert bool(found) is bool(text)
        if text:
            left = named(*(index for index in claimed if index not in lost))
            assert f"set CUDA_VISIBLE_DEVICES={','.join(left)} before CUDA starts" in found
    assert ": end this claim" in api.stale_indices("1", "PCI_BUS_ID", named(1), losing(1)), "nothing is left"
    gone = api.HostSnapshot(tuple(gpu._replace(index=gpu.index - 1) for gpu in FOUR[1:]))  # not listed any more
    assert "since a claimed GPU is gone: end this claim" in api.stale_indices("0", "PCI_BUS_ID", named(0), gone)


def in_container(value: str, snapshot: api.HostSnapshot, **environment: str) -> api.VisibleLimit | None:
    """What limits a claim in a container that was given these GPUs."""
    return api.visible_devices.read_visible_once({"NVIDIA_VISIBLE_DEVICES": value, **environment}, snapshot)


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("GPU-1", ("GPU-1",)),
        ("GPU-3, GPU-1", ("GPU-1", "GPU-3")),  # a container numbers its GPUs in their own order
        ("GPU-1,GPU-9", ("GPU-1",)),
        ("GPU-0,GPU-1,GPU-2,GPU-3", None),  # it sees no others
        ("GPU-9", None),  # of another host
        ("1", None),  # a number of the host, which may be another GPU here
        *((word, None) for word in ("all", "none", "void", "", "/var/run/nvidia-container-devices")),
    ],
)
def test_the_gpus_that_a_container_was_given(value: str, visible: tuple[str, ...] | None) -> None:
    limit = in_container(value, losing())
    assert (limit and limit.uuids) == visible
    chosen = in_container("GPU-1", losing(), CUDA_VISIBLE_DEVICES="2")
    assert chosen is not None
    assert chosen.uuids == ("GPU-2",), "what a user has chosen counts"


def test_a_container_with_mig_instances() -> None:
    parent, first, second, whole = with_mig().gpus
    for value, visible in ((parent.uuid, (first.uuid, second.uuid)), (second.uuid, (second.uuid,))):
        limit = in_container(value, with_mig())
        assert limit is not None
        assert limit.uuids == visible
    every = f"{first.uuid},{second.uuid},{whole.uuid}"
    assert in_container(every, with_mig()) is None, "nobody claims the parent"


def test_the_older_name_of_a_mig_instance() -> None:
    name, (parent, first, second, _) = "MIG-GPU-aa000000/1/0", with_mig().gpus
    assert parsed(name, with_mig()).ambiguous, "there are two"
    for instance in (first, second._replace(uuid=name)):
        found = parsed(name, host(parent, instance))
        assert (found.uuids, found.ambiguous) == ((instance.uuid,), False)
