"""Ages, numbers of things and lists of GPUs, as people read them."""

from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.wording.text import Column, cut, display_width, format_age, format_bytes, gpu_ranges, short_age


def test_ages() -> None:
    for seconds, text, short in (
        (-5, "0 s", "0s"), (59.9, "59 s", "59s"), (60, "1 min", "1m"), (3600, "1 h", "1h00m"),
        (12_000, "3 h 20 min", "3h20m"), (86_399, "23 h 59 min", "23h59m"), (187_200, "2 d 4 h", "2d4h"),
    ):  # fmt: skip
        assert (format_age(seconds), short_age(seconds)) == (text, short)


@given(st.sets(st.integers(0, 40)))
def test_a_range_names_each_gpu_once(indices: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, gpu_ranges(map(str, sorted(indices))).split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(indices)
    assert gpu_ranges("0:0 0:1 0:2 1:0 1:1 2 3".split()) == "0:0-2,1:0,1:1,2,3"


def test_sizes_as_people_read_them() -> None:
    sizes = [0, 400 << 20, 1 << 30, int(31.2 * (1 << 30)), 80 << 30]
    assert [format_bytes(count) for count in sizes] == ["0 MiB", "400 MiB", "1 GiB", "31.2 GiB", "80 GiB"]


def test_a_column_is_as_wide_as_what_stands_in_it() -> None:
    numbers = Column("N", ["7", "123"], right=True)
    assert [numbers.padded(cell) for cell in (numbers.title, *numbers.cells)] == ["  N", "  7", "123"]
    names = Column("USER", ["a", "averylongname"], most=8)
    assert [names.padded(cell) for cell in (names.title, *names.cells)] == ["USER    ", "a       ", "averyl.."]
    assert Column("JOB", ["", ""]).width == 0


def test_wide_letters_take_two_columns_and_characters_without_width_are_cut_too() -> None:
    assert (display_width("日本a"), display_width("e\u0301")) == (5, 1)
    assert display_width(cut("日本語日本語", 7)) <= 7
    name = "a" + "\u0301" * 28_000
    assert len(cut(name, 8)) <= 24
    assert display_width(cut(name, 8)) <= 8
    assert cut("e\u0301" * 8, 8) == "e\u0301" * 8
    assert [cut("abc", width) for width in (0, 1, 2, 3)] == ["", ".", "..", "abc"]
