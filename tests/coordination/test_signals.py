"""Handlers that raise at the worst moment: while others are being held back, or put back."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from safe_gpu.host import signals
from safe_gpu.host.signals import DeferredSignals, unwind_on_signals

NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM)


class Interrupt(BaseException):
    pass


class Meddler:
    """The module ``_signal``, in which SIGUSR1 comes right after the call of this number."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(signals_module, name)

    def signal(self, number: int, handler: Any) -> Any:
        former = signals_module.signal(number, handler)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGUSR1)
        return former


signals_module = signals._signal


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    former = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, interrupt)
    signal.signal(signal.SIGUSR2, lambda number, frame: None)
    yield {number: signal.getsignal(number) for number in NUMBERS}
    for number, handler in former.items():
        signal.signal(number, handler)


def interrupt(number: int, frame: object) -> None:
    raise Interrupt


# SIGINT, SIGUSR1 and SIGUSR2 have handlers: three calls hold them back, and three put them back.
@pytest.mark.parametrize("at", range(1, 7))
def test_what_was_held_back_is_put_back(monkeypatch: pytest.MonkeyPatch, handlers: dict[int, Any], at: int) -> None:
    monkeypatch.setattr(signals, "_signal", Meddler(at))
    held = DeferredSignals()
    inside = False
    with pytest.raises(Interrupt), held:
        inside = True
    assert inside == (at > 1)  # the first call was of SIGINT, and SIGUSR1 was not held back yet
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    held.deliver()  # once more, as after an interrupt, and nothing comes back
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.parametrize("at", range(1, 7))
def test_what_gives_back_is_run_in_any_case(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(signals, "_signal", Meddler(at))
    done: list[str] = []
    with pytest.raises(Interrupt):
        DeferredSignals().run_deferred(lambda: done.append("given back"))
    assert done == ["given back"]


def test_handlers_run_once_and_in_what_may_take_long() -> None:
    caught: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    with DeferredSignals() as held:
        held.defer()
        signal.raise_signal(signal.SIGUSR1)
        assert caught == []
        with held.delivering():
            assert len(caught) == 1
            signal.raise_signal(signal.SIGUSR1)
            assert len(caught) == 2
        signal.raise_signal(signal.SIGUSR1)
        assert len(caught) == 2
    assert len(caught) == 3


# Two calls for SIGTERM and SIGHUP, and two to put them back.
@pytest.mark.parametrize("at", range(1, 5))
def test_sigterm_has_its_default_action_again(monkeypatch: pytest.MonkeyPatch, handlers, at: int) -> None:
    monkeypatch.setattr(signals, "_signal", Meddler(at))
    with pytest.raises(Interrupt), unwind_on_signals():
        pass
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers
    caught: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: caught.append(number))
    with unwind_on_signals():  # a handler of the program is left alone
        signal.raise_signal(signal.SIGTERM)
    assert caught == [signal.SIGTERM]
