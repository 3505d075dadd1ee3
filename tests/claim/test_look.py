"""What a look takes and reads: the doors of the chosen GPUs, and nothing slow under host.lock."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.claims import try_claim
from support.traces import is_locked

from safe_gpu import GPUOwner
from safe_gpu.claim import view as host_view_module
from safe_gpu.claim import view as polls_module
from safe_gpu.host import procfs
from safe_gpu.host.held import Held


def test_a_process_is_looked_up_once_and_never_under_host_lock(
    host: Any, line: Any, cleanup: ExitStack, monkeypatch: Any
) -> None:
    """Others wait for host.lock. The waiter ahead is judged too: it wants what the stranger has, and is passed."""
    cleanup.enter_context(host.stranger(0))
    line(8)
    looked_up = []

    def describe(pid: int) -> Any:
        looked_up.append((pid, is_locked(Path(os.environ["SAFE_GPU_DIR"], "host.lock"))))
        return procfs.describe_process(pid)

    monkeypatch.setattr(host_view_module, "describe_process", describe)
    assert try_claim(1) == (1,)
    assert looked_up == [(host.stranger_pid, False)]


@pytest.mark.parametrize(("age", "polls"), [(0.5, 0), (2.0, 1), (60.0, 1)])
def test_who_passes_a_waiter_knows_the_host_of_this_second(
    age: float, polls: int, host: Any, line: Any, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What blocks the waiter may have ended since the poll, and then it may not be passed."""
    cleanup.enter_context(host.stranger(7))
    assert try_claim(1) == (6,)
    usual = host.polls
    monkeypatch.setattr(polls_module.Polls, "age", property(lambda self: age if host.polls == usual + 1 else 0.0))
    line(8)
    assert try_claim(1) == (6,)
    assert host.polls == 2 * usual + polls


def test_an_interrupt_while_it_is_prepared_for_exec_leaves_all_of_a_claim_prepared(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the command may hold a part of its GPUs."""
    kept: list[Held] = []
    genuine = Held.move

    def keep(held: Held, fd: int) -> None:
        if not kept:
            signal.raise_signal(signal.SIGINT)
        genuine(held, fd)
        kept.append(held)

    monkeypatch.setattr(Held, "move", keep)
    with GPUOwner(2, timeout=0) as owner:
        with pytest.raises(KeyboardInterrupt):
            owner.keep_across_exec()
        assert [os.get_inheritable(held.fd) for held in kept] == [True] * 4, "the entry, its directory, two doors"
