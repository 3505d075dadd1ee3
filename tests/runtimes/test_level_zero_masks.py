"""ZE_AFFINITY_MASK: which cards it shows, and what a claim writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.gpus.devices import Gpu, HostSnapshot
from safe_gpu.runtimes.visible_devices import hide_all, read_level_zero, render_visible

MASK, HIERARCHY, ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
SELECTOR = "ONEAPI_DEVICE_SELECTOR"


def host(*tiles: int, missing: int = 0) -> HostSnapshot:
    """Cards with so many tiles each, after integrated GPUs that have numbers and are not listed."""
    return HostSnapshot(
        tuple(Gpu(missing + n, f"INTEL-{n}", "Max", vendor="intel", tiles=count) for n, count in enumerate(tiles))
    )


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, None),
        ({MASK: "1", HIERARCHY: "COMPOSITE"}, [1]),
        ({MASK: "0.0,0.1", HIERARCHY: "FLAT"}, []),
        ({MASK: "9999,x,-1", HIERARCHY: "FLAT"}, []),
        ({**hide_all(), HIERARCHY: "FLAT"}, []),
    ],
)
def test_what_a_mask_shows(environ: dict[str, str], shown: list[int] | None) -> None:
    limit = read_level_zero(environ, host(2, 2, 2))
    assert (None if limit is None else list(limit.uuids)) == (
        None if shown is None else [f"INTEL-{number}" for number in shown]
    )
    assert limit is None or not limit.ambiguous


def test_when_a_mask_is_ambiguous() -> None:
    mixed = HostSnapshot(tuple(Gpu(n, f"INTEL-{n}", f"Arc {n}", vendor="intel") for n in range(2)))
    for snapshot, order, ambiguous in (
        (host(2, 2), "", True),
        (host(1, 1), "", False),
        (mixed, "", True),
        (mixed, "1", False),
    ):
        limit = read_level_zero({MASK: "1", ORDER: order}, snapshot)
        assert limit is not None
        assert (limit.ambiguous, HIERARCHY in limit.clear_by) == (ambiguous, True)


def test_what_a_claim_writes() -> None:
    snapshot = host(2, 2, missing=1)
    written = render_visible(snapshot.gpus[1:], visible_as="index", snapshot=snapshot)
    assert written == {MASK: "3,4", HIERARCHY: "FLAT", ORDER: "1"}
    assert next(iter(written)) == MASK
    composite = {HIERARCHY: "COMPOSITE", SELECTOR: "level_zero:1"}
    assert render_visible(snapshot.gpus[1:], visible_as="uuid", snapshot=snapshot, environ=composite) == {
        MASK: "2",
        HIERARCHY: "COMPOSITE",
        ORDER: "1",
        SELECTOR: "level_zero:0",
    }
    unnumbered = {SELECTOR: "level_zero:gpu"}
    assert SELECTOR not in render_visible(snapshot.gpus, visible_as="index", snapshot=snapshot, environ=unnumbered)


@given(
    tiles=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    missing=st.integers(0, 2),
    hierarchy=st.sampled_from(["COMPOSITE", "FLAT", "COMBINED", "", "nonsense"]),
    chosen=st.data(),
)
def test_what_is_written_is_read_again(tiles: list[int], missing: int, hierarchy: str, chosen: st.DataObject) -> None:
    snapshot = host(*tiles, missing=missing)
    gpus = chosen.draw(st.lists(st.sampled_from(snapshot.gpus), min_size=1, unique_by=lambda gpu: gpu.uuid))
    written = render_visible(gpus, visible_as="index", snapshot=snapshot, environ={HIERARCHY: hierarchy})
    limit = read_level_zero(written, snapshot)
    assert limit is not None
    assert not limit.ambiguous
    assert set(limit.uuids) == {gpu.uuid for gpu in gpus}
