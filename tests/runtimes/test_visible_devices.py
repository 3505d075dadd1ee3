"""CUDA's grammar of CUDA_VISIBLE_DEVICES, case by case, and writing it back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.gpus.devices import Gpu, HostSnapshot, VisibleLimit
from safe_gpu.runtimes import visible_devices

UUIDS = ("GPU-aa000000", "GPU-ab000000", "GPU-c0000000", "GPU-d0000000")


def host(*gpus: Gpu) -> HostSnapshot:
    return HostSnapshot(gpus)


def alike() -> HostSnapshot:
    return host(*(Gpu(index, uuid, "NVIDIA A100") for index, uuid in enumerate(UUIDS)))


def mixed() -> HostSnapshot:
    return host(*(gpu._replace(name=f"model {gpu.index}") for gpu in alike().gpus))


def with_lost(lost: int) -> HostSnapshot:
    return host(*(gpu._replace(lost=gpu.index == lost) for gpu in alike().gpus))


def with_mig() -> HostSnapshot:
    parent = Gpu(0, "GPU-aa000000", "NVIDIA H100", mig_enabled=True, unusable="MIG mode is on")
    instances = (
        Gpu(0, uuid, "NVIDIA H100 MIG", mig_parent=parent.uuid, mig_instance=number)
        for number, uuid in enumerate(("MIG-11000000", "MIG-12000000"))
    )
    return host(parent, *instances, Gpu(1, "GPU-ab000000", "NVIDIA H100"))


def parsed(value: str, snapshot: HostSnapshot, device_order: str | None = None) -> VisibleLimit:
    visible_limit = visible_devices.parse_cuda(value, snapshot, device_order=device_order)
    assert visible_limit is not None
    return visible_limit


SHOWN = [
    ([], ["", "-1", "none", "NoDevFiles", ",0", "99999999999999999999", "0,0", "1,0,1"]),
    ([], ["GPU-a", "GPU-x", "GPU-c,GPU-c0", "gpu-c", "c0000000", "GPU-c0000000-and-more"]),
    ([0], ["0", "0,,1", "0,9,1", "0,9,0"]),
    ([1], ["1;2", "1,GPU-c"]),
    ([2], ["GPU-c", "GPU-c,GPU-a,GPU-d", "GPU-c,GPU-x,GPU-d", "GPU-c,1"]),
    ([3], ["3,two,1"]),
    ([0, 2], ["0,2,-1,1"]),
    ([1, 2], [" 1,\t2", "1 ,2 ", "1gpu2,2ampere", "01,0000000000000000002"]),
    ([2, 1], ["2,1"]),
    ([2, 0], ["GPU-c0000000,GPU-aa000000", " GPU-c, GPU-aa"]),
    ([3, 0, 2], ["+3,-0,2"]),
    ([0, 1, 2, 3], ["0,1,2,3"]),
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


@pytest.mark.parametrize(
    ("value", "order", "ambiguous"),
    [
        ("0", None, True),
        ("0", "PCI_BUS_ID", False),
        ("2,1,0,3", None, False),  # all of them
        ("GPU-c", None, False),
        ("-1", None, False),
        ("", None, False),
        ("9", None, False),
    ],
)
def test_numbers_on_mixed_gpus(value: str, order: str | None, ambiguous: bool) -> None:
    visible_limit = parsed(value, mixed(), order)
    assert visible_limit.ambiguous is ambiguous
    assert bool(visible_limit.doubt) is ambiguous


def test_a_gpu_without_a_name_is_no_other_model() -> None:
    unnamed = host(*(gpu._replace(name=gpu.name if gpu.index else "") for gpu in alike().gpus))
    assert not parsed("1", unnamed).ambiguous


def test_a_lost_gpu_is_not_counted() -> None:
    below = parsed("0,1", with_lost(2))
    assert (below.uuids, below.ambiguous) == (UUIDS[:2], False)
    beyond = parsed("2", with_lost(2))
    assert (beyond.uuids, beyond.ambiguous) == (UUIDS[3:], True)
    assert "GPU 2 is lost" in beyond.doubt
    assert parsed(f"{UUIDS[2]},{UUIDS[3]}", with_lost(2)).uuids == ()


@pytest.mark.parametrize(
    ("value", "shown"),
    [("MIG-11", ("MIG-11000000",)), ("MIG-12000000", ("MIG-12000000",)), ("MIG-1", ()), ("MIG-GPU-ffffffff/1/0", ())],
)
def test_mig_by_uuid(value: str, shown: tuple[str, ...]) -> None:
    visible_limit = parsed(value, with_mig())
    assert (visible_limit.uuids, visible_limit.ambiguous) == (shown, False)


def test_the_older_name_of_a_mig_instance() -> None:
    name = "MIG-GPU-aa000000/1/0"
    assert parsed(name, with_mig()).ambiguous, "there are two"
    only_one = parsed(name, host(*(gpu for gpu in with_mig().gpus if gpu.mig_instance != 1)))
    assert (only_one.uuids, only_one.ambiguous) == (("MIG-11000000",), False)
    renamed = (gpu._replace(uuid=f"MIG-GPU-aa000000/{gpu.mig_instance}/0") for gpu in with_mig().gpus[1:3])
    literal = parsed(name, host(with_mig().gpus[0], *renamed))
    assert (literal.uuids, literal.ambiguous) == ((name,), False)


def test_numbers_under_mig_are_ambiguous() -> None:
    assert all(parsed(value, with_mig(), "PCI_BUS_ID").ambiguous for value in ("0", "1"))


def test_a_mig_gpu_without_instances_is_not_counted() -> None:
    bare = host(alike().gpus[0]._replace(mig_enabled=True), alike().gpus[1])
    assert parsed("GPU-aa,GPU-ab", bare).uuids == ()


@given(
    st.text(alphabet="0123,-+ \tGPUMIGabcd/x", max_size=24),
    st.sampled_from([alike(), mixed(), with_lost(1), with_mig()]),
)
def test_any_text_is_read_and_shows_each_device_once(value: str, snapshot: HostSnapshot) -> None:
    visible_limit = parsed(value, snapshot)
    assert len(set(visible_limit.uuids)) == len(visible_limit.uuids)
    for uuid in visible_limit.uuids:
        gpu = snapshot.by_uuid(uuid)
        assert gpu is not None
        assert not gpu.lost
        assert not gpu.mig_enabled


@given(st.lists(st.integers(0, 3), unique=True), st.sampled_from(["index", "uuid"]), st.booleans())
def test_what_is_written_is_what_cuda_reads(indices: list[int], visible_as: str, of_one_model: bool) -> None:
    snapshot = alike() if of_one_model else mixed()
    gpus = [snapshot.gpus[index] for index in indices]
    written = visible_devices.render_cuda(gpus, visible_as=visible_as, snapshot=snapshot)
    visible_limit = parsed(written["CUDA_VISIBLE_DEVICES"], snapshot, written.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST"))
    assert visible_limit.uuids == tuple(gpu.uuid for gpu in gpus)
    assert not visible_limit.ambiguous


def test_indices_come_with_their_order() -> None:
    snapshot = alike()
    chosen = snapshot.gpus[2:]
    indices, uuids = (visible_devices.render_cuda(chosen, visible_as=v, snapshot=snapshot) for v in ("index", "uuid"))
    assert indices == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert uuids == {"CUDA_VISIBLE_DEVICES": "GPU-c0000000,GPU-d0000000"}


@pytest.mark.parametrize("snapshot", [with_mig(), with_lost(0)], ids=["mig", "lost"])
def test_uuids_where_numbers_mislead(snapshot: HostSnapshot) -> None:
    written = visible_devices.render_cuda([snapshot.gpus[-1]], visible_as="index", snapshot=snapshot)
    assert written == {"CUDA_VISIBLE_DEVICES": snapshot.gpus[-1].uuid}


BARE = "54d0709b-558d-5a59-9c65-0c5fc14a21a4"


@pytest.mark.parametrize("visible_as", ["index", "uuid"])
@pytest.mark.parametrize(("lost", "numbers"), [((), "2,0"), ((1,), "1,0"), ((3,), "2,0")])
def test_numbers_where_cuda_does_not_take_a_uuid(visible_as: str, lost: tuple[int, ...], numbers: str) -> None:
    gpus = [Gpu(i, BARE if i == 2 else f"GPU-{i}", lost=i in lost) for i in range(4)]
    written = visible_devices.render_cuda([gpus[2], gpus[0]], visible_as=visible_as, snapshot=host(*gpus))
    assert written == {"CUDA_VISIBLE_DEVICES": numbers, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not lost:
        assert parsed(f"{BARE},GPU-0", host(*gpus)).uuids == (BARE, "GPU-0")
        assert parsed(f"GPU-0,{BARE}", host(*gpus)).uuids == ("GPU-0", BARE)
    assert parsed("54d0709b", host(*gpus)).uuids == ()


def test_an_unset_variable_is_no_fence() -> None:
    assert visible_devices.parse_cuda(None, alike()) is None


@pytest.mark.parametrize("visible_as", ["INDEX", "", None, 0, ["index"]])
def test_an_unknown_way_to_write_it(visible_as: object) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="visible_as=") as caught:
        visible_devices.render_cuda([], visible_as=visible_as, snapshot=alike())  # type: ignore[arg-type]
    assert caught.value.value == visible_as
