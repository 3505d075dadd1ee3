"""Names that a neighbour forges: what stands in the name or path of a socket of its own is not the name of a claim."""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.name_table import read_names
from safe_gpu.drivers.presets import preset

NEIGHBOUR = 4712
LINE = "0000000000000000: 00000002 00000000 00000000 0001 01 12345 "  # of /proc/net/unix, before a name


@pytest.fixture(autouse=True)
def directory(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where paths are bound."""
    monkeypatch.chdir(open_tmp)


def forged(name: str) -> list[bytes]:
    """What a neighbour can bind to have this name shown: with a line break before or behind it, as a path that begins
    as abstract names are shown, and inside a name that looks like a message of the kernel from there on."""
    shown = b"safe-gpu/1/" + name.encode()
    message = (60).to_bytes(4, "little") + (20).to_bytes(2, "little") + bytes(26) + b"\x38\0\0\0"
    return [
        f"\0\n{LINE}@".encode()[: 108 - len(shown)] + shown,
        b"\0" + shown + b"\nx",
        b"@" + shown.replace(b"/", b"_"),
        b"\0x" + (message + b"\0" + shown)[:106],
        b"\0\0" + shown,
    ]


def bound(stack: ExitStack, name: str) -> int:
    """Bind all that, and return how much could be."""
    for address in forged(name):
        one = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        one.bind(address)
    return len(forged(name))


@pytest.mark.parametrize("form", ["GPU-{}", "GPU-5c89852c-d268-c3f3-1b07-{:.12}"])
def test_a_gpu_does_not_seem_claimed(form: str) -> None:
    uuid, token = form.format(os.urandom(8).hex()), os.urandom(8).hex()
    with ExitStack() as stack:
        assert bound(stack, names.name_of(uuid)) == 5
        bound(stack, names.scope_of(uuid, token))
        table = read_names()
        assert table.held_among([uuid]) == frozenset()
        assert table.get(names.scope_of(uuid, token)) is None


def test_the_gpus_of_a_host_seem_free_still(state_dir: Path, as_user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    uuids = [gpu.uuid for gpu in preset("mi250x").gpus()]
    prefix = names.simulated_prefix(str(state_dir / "simulated"))

    def work(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        with ExitStack() as stack:
            say(str(sum(bound(stack, names.name_of(uuid, prefix)) for uuid in uuids)))
            listen()

    assert as_user(work, uid=NEIGHBOUR).hear() == str(5 * len(uuids))
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(len(uuids))]
