"""What a caller may write, and what is refused with the value and a way out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.devices import Gpu, GpuRequest, HostSnapshot
from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.request import format_bytes, matches_model, names_device, parse_bytes, parse_request, unknown_names

GIB = 1 << 30


class Index:
    """Like a numpy integer."""

    def __index__(self) -> int:
        return 3


def test_the_plainest_request() -> None:
    assert parse_request(1) == GpuRequest()
    assert parse_request(Index()).nb_gpus == 3


@pytest.mark.parametrize("nb_gpus", [0, -1, 2.5, 2.0, "two", "2", True, False, None, [1], float("nan"), b"1"])
def test_numbers_that_make_no_sense(nb_gpus: object) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        parse_request(nb_gpus)
    assert f"nb_gpus={nb_gpus!r}" in str(caught.value)
    assert "whole number" in str(caught.value)
    assert caught.value.value is nb_gpus


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("20GiB", 20 * GIB),
        ("20G", 20 * GIB),
        ("20g", 20 * GIB),
        ("20GB", 20 * 10**9),
        ("1.5 TiB", 1536 * GIB),
        (" 512 MiB ", GIB // 2),
        ("64K", 65536),
        ("64kb", 64000),
        ("100", 100),
        ("100B", 100),
        (".5G", GIB // 2),
        (GIB, GIB),
        (0, 0),
        (Index(), 3),
    ],
)
def test_sizes(text: object, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "value", ["", "GiB", "twenty", "20 potatoes", "-1G", "1e9", "20Gi B", -1, 2.5, True, None, [1]]
)
def test_sizes_that_make_no_sense(value: object) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        parse_bytes(value, name="--min-memory")
    assert f"--min-memory={value!r}" in str(caught.value)
    assert "20GiB" in str(caught.value)


@given(st.integers(0, 1 << 50))
def test_bytes_are_exact(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == count
    assert parse_bytes(f"{count}KiB") == count * 1024


def test_sizes_as_people_read_them() -> None:
    assert [format_bytes(count) for count in (0, 400 << 20, GIB, 31 * GIB + GIB // 5, 80 * GIB)] == [
        "0 MiB",
        "400 MiB",
        "1 GiB",
        "31.2 GiB",
        "80 GiB",
    ]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ((), ()),
        (None, ()),
        (3, ("3",)),
        ("3", ("3",)),
        ("0,2", ("0", "2")),
        ("0-3", ("0", "1", "2", "3")),
        ("0-1, 7 ,GPU-ab", ("0", "1", "7", "GPU-ab")),
        (["2", 0, "2"], ("2", "0")),
        (["0,1", "4-5"], ("0", "1", "4", "5")),
        (range(2), ("0", "1")),
        ((Index(),), ("3",)),
        ("007", ("7",)),
        ("1:02", ("1:2",)),
        ("MIG-GPU-ab/1/0", ("MIG-GPU-ab/1/0",)),
        (iter(["5"]), ("5",)),
    ],
)
def test_devices_by_name(value: Any, names: tuple[str, ...]) -> None:
    assert parse_request(1, only=value).only == names
    if not hasattr(value, "__next__"):
        assert parse_request(1, exclude=value).exclude == names


@pytest.mark.parametrize(
    "value", ["", ",", "0,", "x", "-1", -1, True, 2.5, [2.5], "3-0", "1:", [[1]], [None], b"0", "cuda:0", 99999]
)
def test_devices_that_make_no_sense(value: Any) -> None:
    for argument in ("only", "exclude"):
        with pytest.raises(UnsatisfiableRequestError, match=argument) as caught:
            parse_request(1, **{argument: value})
        assert repr(value).strip("[]") in str(caught.value)


@pytest.mark.parametrize("model", ["", "  ", 3, b"A100"])
def test_models_that_make_no_sense(model: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="model="):
        parse_request(1, model=model)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("A100", True),
        ("a100", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("80GB", True),
        ("NVIDIA A100*", True),
        ("A100*", True),
        ("*80gb", True),
        ("A1?0*", True),
        ("A[12]00*", True),
        ("H100", False),
        ("A100*40GB", False),
        ("100*", False),
        ("A100?", False),
    ],
)
def test_models(pattern: str, fits: bool) -> None:
    assert matches_model(pattern, "NVIDIA A100-SXM4-80GB") is fits


PARENT = Gpu(0, "GPU-aa", mig_enabled=True)
FIRST = Gpu(0, "MIG-11", mig_parent="GPU-aa", mig_instance=0)
SECOND = Gpu(0, "MIG-12", mig_parent="GPU-aa", mig_instance=1)
WHOLE = Gpu(10, "GPU-ab")
HOST = HostSnapshot((PARENT, FIRST, SECOND, WHOLE))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("0", (PARENT, FIRST, SECOND)),
        ("0:1", (SECOND,)),
        ("10", (WHOLE,)),
        ("1", ()),
        ("GPU-aa", (PARENT, FIRST, SECOND)),
        ("GPU-ab", (WHOLE,)),
        ("MIG-12", (SECOND,)),
    ],
)
def test_what_a_name_means(name: str, meant: tuple[Gpu, ...]) -> None:
    assert tuple(gpu for gpu in HOST.gpus if names_device(name, gpu)) == meant


def test_names_of_nothing_or_of_several() -> None:
    assert unknown_names(("0", "0:1", "10", "GPU-ab", "MIG-1", "GPU-", "1", "0:2", "GPU-x"), HOST) == (
        "MIG-1",
        "GPU-",
        "1",
        "0:2",
        "GPU-x",
    )
