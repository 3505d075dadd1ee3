"""Hostile inputs for the tests of ``tests/fuzz``, and the bounds within which whatever reads them must stay.

Documents are made by changing a valid one: parts are dropped, doubled, swapped and replaced, then the text is torn.
"""

import copy
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, example, settings
from hypothesis import strategies as st

from safe_gpu.errors import SafeGpuError
from safe_gpu.gpus.devices import HostSnapshot
from safe_gpu.status.gather import status_of
from safe_gpu.status.render import render

TRICK = "\x1b[2J\x1b]0;owned\x07\u202e\u2066evil\r\nGPU 0 is free\x9b31m\u0085\u2028\ufeff\x08."
"""Escape sequences, line breaks, bidirectional controls and a backspace, around words that can be looked for."""

TEXTS = (
    "", " ", "0", "-1", "nan", "[]", TRICK, "\x00", "\ud800", "x" * 70_000, "\u0301" * 3000, "../../etc/passwd", "%s%n",
)  # fmt: skip
"""Texts with which a program that prints, counts or opens them may go wrong."""

NOW = round(time.time(), 3)
NUMBERS = (0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0, 1e11, 1e308)
_RAW = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "[" * 100_000, '{"a":' * 20_000,
    "[" * 400 + "]" * 400, '"\\ud800"', '"\\u0000"', "tru", "",
)  # fmt: skip
"""What stands for a value in a broken JSON document."""

JUNK = (
    b"", b"\x00", b"\x00" * 70_000, b"\xff\xfe", b"\n", b"\r\n", b"\x1b[2J", b"{", b"}" * 9, b"[" * 70_000,
    b"\xed\xa0\x80",
)  # fmt: skip
"""Bytes that are put anywhere into a document, or stand in place of one."""

GPU = "GPU-00000000-0000-0000-0000-000000000000"
_PROCESS: dict[str, Any] = {
    "v": 1, "pid": os.getpid(), "start": 1, "pidns": 0, "host": "gpu1", "job": "sge:4711.3",
    "command": "python train.py",
}  # fmt: skip
ENTRY: dict[str, Any] = {
    **_PROCESS, "since": NOW - 60, "until": NOW + 60, "queued": None, "gpus": {GPU: None}, "parts": {},
    "display": False, "token": "", "inside": "", "waited": 0.1,
}  # fmt: skip
"""What the entry of a claim says; the rest of what lies in a state directory follows."""

TICKET: dict[str, Any] = {
    **_PROCESS, "nb_gpus": 1, "gpus": [GPU], "hold_for": 60.0, "inside": "", "min_memory": None, "turn": 1.5,
}  # fmt: skip
FAULT = {"when": NOW, "error": "CUDA_ERROR_ECC_UNCORRECTABLE", "for": 3600}
CLAIM: dict[str, Any] = {
    "v": 1, "claim": [os.getpid(), NOW - 60], "uid": 1000, "user": "anna", "host": "gpu1", "job": "sge:4711.3",
    "command": "python train.py", "gpus": [GPU], "labels": ["0"], "until": NOW + 60, "waited": 0.1,
}  # fmt: skip
ENDING = {"v": 1, "claim": [os.getpid(), NOW - 60], "ended": [NOW - 20, NOW]}


def examples(quick: int) -> settings:
    """This many examples by default, and more by the same factor under a profile with more than hypothesis's 100."""
    factor = settings.default.max_examples // 100
    return settings(
        max_examples=max(1, quick * factor),
        phases=[phase for phase in Phase if factor > 1 or phase != Phase.shrink],  # it takes minutes
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def with_examples(*rows: Any) -> Callable[[Any], Any]:
    """A test of hypothesis with these examples: a tuple holds all arguments, anything else is the only one."""

    def decorate(test: Any) -> Any:
        for row in rows:
            test = example(*row if isinstance(row, tuple) else (row,))(test)
        return test

    return decorate


class Refused:
    """How a call under :func:`refusing` ended: ``error`` is None, or an error of this package."""

    error: SafeGpuError | None = None


@contextmanager
def refusing() -> Iterator[Refused]:
    """Let errors of this package pass, whose text a terminal can show; every other exception fails the test."""
    refused = Refused()
    try:
        yield refused
    except SafeGpuError as err:
        refused.error = err
        assert_shown_safely(str(err), own=True)


class TooSlow(BaseException):
    """The input cost too much CPU time. No handler of the code under test takes it for one of its own errors."""


@contextmanager
def bounded(seconds: float = 10.0, mebibytes: int = 512) -> Iterator[None]:
    """Fail where the body takes more CPU time or memory than this; other processes on the host do not count.

    The bounds are far above what any input may cost, so only growth without a limit reaches them.
    """

    def stop(*_: object) -> None:
        raise TooSlow(f"more than {seconds:g} s of CPU time")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (size + (mebibytes << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def assert_shown_safely(text: str, most: int = 30_000, *, own: bool = False) -> None:
    """Fail unless a text is lines of printable characters, and not more of them than somebody may be shown.

    Args:
        own: whether it tells of what this user has set, which may have any lines.
    """
    assert len(text) <= most, f"{len(text)} characters: {text[:200]!r} ..."
    for line in text.split("\n"):
        assert line.isprintable(), repr(line)
        assert own or not line.startswith("GPU 0 is free"), "a line that somebody else wrote"


def assert_plain(value: Any) -> None:
    """Fail unless all texts in a decoded document are printable, so that a program may show them."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        for one in value:
            assert_plain(one)
    assert not isinstance(value, str) or value.isprintable(), repr(value)


def assert_gpus_shown_safely(snapshot: HostSnapshot) -> None:
    """Fail unless what a driver says of GPUs tells them apart, and tables and documents with it can be shown."""
    for gpu in snapshot.gpus:
        assert_plain([gpu.uuid, gpu.name, gpu.pci_bus_id, gpu.process_error, gpu.unusable])
        assert len(gpu.uuid) <= 100
        assert "/.." not in gpu.pci_bus_id
    assert len({gpu.uuid for gpu in snapshot.gpus}) == len(snapshot.gpus)
    shown = status_of(snapshot)
    assert_shown_safely(render(shown, width=100, color=False), most=10_000 + 4000 * len(snapshot.gpus))
    assert_plain(shown.to_dict())


class _Raw(str):
    """Text that stands in a JSON document as it is."""


_VALUES = st.one_of(
    st.sampled_from([None, True, False, [], {}, [[]], {"": 0}, *TEXTS, *NUMBERS, *map(_Raw, _RAW)]),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.none() | st.integers() | st.text(max_size=5), max_size=3),
)

LINES = st.one_of(
    st.sampled_from(TEXTS),
    st.text(max_size=40),
    st.sampled_from(NUMBERS).map(str),
    st.sampled_from(["9" * 5000, "-5", "0x10", "1_000", "\u0663", "1e400", "infinity", str(2**32 - 1), str(2**64 - 1)]),
)
"""Texts for places that hold one: a field, a file of sysfs, a variable."""


@st.composite
def broken_json(draw: Any, document: Any, *, most: int = 4) -> bytes:
    """One line of JSON like ``document``, changed in up to ``most`` places, perhaps torn or with junk in it."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, most))):
        document = draw(_changed(document))
    text = _encode(document, draw(st.booleans()))
    return draw(_torn(text.encode("utf-8", "surrogatepass")))


@st.composite
def _changed(draw: Any, document: Any) -> Any:
    """The document with one change at any depth."""
    parent, key = None, None
    place = document
    while isinstance(place, (dict, list)) and place and draw(st.integers(0, 3)):
        parent, key = place, draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place = place[key]
    if parent is None or key is None:
        return copy.deepcopy(draw(_VALUES)) if draw(st.integers(0, 9)) == 0 else document
    change = draw(st.sampled_from(["replace", "replace", "drop", "nest", "swap", "many", "rename"]))
    if change == "drop":
        del parent[key]
    elif change == "nest":
        parent[key] = [place] if draw(st.booleans()) else {"x": place}
    elif change == "many":
        text = _encode(place, True)[:100]
        parent[key] = _Raw(f"[{', '.join([text] * draw(st.sampled_from([2, 300, 5000])))}]")
    elif change == "swap" and len(parent) > 1:
        other = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        parent[key], parent[other] = parent[other], parent[key]
    elif change == "rename" and isinstance(parent, dict):
        parent[draw(st.sampled_from(["", "k" * 70_000, TRICK, "__class__", f"{key} "]))] = parent.pop(key)
    else:
        parent[key] = copy.deepcopy(draw(_VALUES))
    return document


def _encode(value: Any, ascii_only: bool) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)}: {_encode(one, ascii_only)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(_encode(one, ascii_only) for one in value)}]"
    return json.dumps(value, ensure_ascii=ascii_only)


@st.composite
def _torn(draw: Any, data: bytes) -> bytes:
    place = draw(st.integers(0, len(data)))
    before, after = data[:place], data[place:]
    torn = [before, after, before + draw(st.sampled_from(JUNK)) + after, data + data, data + b"\n"]
    return draw(st.sampled_from([data] * 4 + [*torn, draw(st.binary(max_size=60))]))


_MUCH = 1 << 20  # characters of one line that is repeated


@st.composite
def broken_text(draw: Any, text: str, words: tuple[str, ...] = (), *, most: int = 4) -> str:
    """A text like this one with lines dropped, doubled, cut and swapped, and with numbers and ``words`` replaced."""
    lines = text.split("\n")
    junk = LINES
    if words:
        junk |= st.builds(lambda word, often: word * often, st.sampled_from(words), st.sampled_from([1, 2, 20_000]))
    for _ in range(draw(st.integers(0, most))):
        if not lines:
            break
        place = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(["drop", "often", "often", "swap", "cut", *["value"] * 3, "junk", "junk"]))
        line = lines[place]
        if how == "drop":
            del lines[place]
        elif how == "often":
            lines[place : place + 1] = [line] * min(draw(st.sampled_from([2, 20, 3000])), 1 + _MUCH // (len(line) + 1))
        elif how == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[place], lines[other] = lines[other], lines[place]
        elif how == "cut":
            lines[place] = line[: draw(st.integers(0, len(line)))]
        elif how == "junk":
            lines.insert(place, draw(junk))
        else:
            lines[place] = draw(_with_another_value(line))
    return "\n".join(lines)


@st.composite
def _with_another_value(draw: Any, line: str) -> str:
    """The line with one of its numbers, or what stands between marks, replaced."""
    found = list(re.finditer(r"\d+|(?<=[>=:\" ])[^<>=:\" ]+", line))
    if not found:
        return draw(LINES)
    one = draw(st.sampled_from(found))
    return line[: one.start()] + draw(LINES) + line[one.end() :]


def open_files() -> int:
    """How many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))
