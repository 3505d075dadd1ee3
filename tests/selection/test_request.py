"""What a caller may write, and what is refused with the value and a way out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.selection.request import Selection, parse_request
from safe_gpu.selection.values import parse_size

GIB = 1 << 30


class Index:
    """Like a numpy integer."""

    def __index__(self) -> int:
        return 3


def test_the_plainest_request() -> None:
    assert parse_request(1) == Selection()
    assert parse_request(Index()).nb_gpus == 3


@pytest.mark.parametrize("nb_gpus", [0, -1, 2.5, 2.0, "two", "2", True, False, None, [1], float("nan"), b"1"])
def test_numbers_that_make_no_sense(nb_gpus: object) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        parse_request(nb_gpus)
    assert f"nb_gpus={nb_gpus!r}" in str(caught.value)
    assert "whole number" in str(caught.value)
    assert caught.value.value is nb_gpus


@pytest.mark.parametrize(("text", "count"), [("20GiB", 20 * GIB), ("64kb", 64000), (GIB, GIB), (0, 0)])
def test_sizes(text: object, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize(
    "value", ["", "GiB", "twenty", "20 potatoes", "-1G", "1e9", "20Gi B", -1, 2.5, True, None, [1]]
)
def test_sizes_that_make_no_sense(value: object) -> None:
    with pytest.raises(UnsatisfiableRequestError) as caught:
        parse_size(value, name="--min-memory")
    assert f"--min-memory={value!r}" in str(caught.value)
    assert "20GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "meant"), [("20", "'20GiB'"), (20, "'20GiB'"), (" 8 ", "'8GiB'"), (20480, "'20480MiB'"), (1, "'1GiB'")]
)
def test_so_little_memory_that_a_unit_is_missing(value: object, meant: str) -> None:
    with pytest.raises(UnsatisfiableRequestError, match=f"{int(value)} bytes\\? write {meant}") as caught:  # type: ignore[call-overload]
        parse_request(1, min_memory=value)  # type: ignore[arg-type]
    assert caught.value.value is value


@pytest.mark.parametrize("value", [0, "0", "20B", "20K", 1 << 20, str(1 << 30)])
def test_what_is_meant_as_it_stands(value: object) -> None:
    assert parse_request(1, min_memory=value).value_of("min_memory") == (parse_size(value) or None)  # type: ignore[arg-type]


@given(st.integers(1 << 20, 1 << 50))
def test_bytes_are_exact(count: int) -> None:
    assert parse_size(count) == parse_size(str(count)) == count
    assert parse_size(f"{count}KiB") == count * 1024


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, ()),
        (3, ("3",)),
        ("0-3", ("0", "1", "2", "3")),
        ("0-1, 7 ,GPU-ab", ("0", "1", "7", "GPU-ab")),
        (["2", 0, "2"], ("2", "0")),
        ("1:02", ("1:2",)),
        ("MIG-GPU-ab/1/0", ("MIG-GPU-ab/1/0",)),
    ],
)
def test_devices_by_name(value: Any, names: tuple[str, ...]) -> None:
    assert (parse_request(1, only=value).value_of("only") or ()) == names
    if not hasattr(value, "__next__"):
        assert (parse_request(1, exclude=value).value_of("exclude") or ()) == names


@pytest.mark.parametrize(
    "value",
    ["", ",", "0,", "x", "-1", -1, True, 2.5, [2.5], "3-0", "1:", [[1]], [None], b"0", "cuda:0", 99999, "54d0709b"],
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
