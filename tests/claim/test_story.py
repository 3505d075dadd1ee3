"""What a claim does, in which order, and that it leaves nothing when any step of it fails."""

import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest

import safe_gpu
from safe_gpu.errors import NoDriverError

pytestmark = pytest.mark.usefixtures("spies")


def claim(spies: Any, **arguments: Any) -> Any:
    return safe_gpu.claim_gpus(
        2, spies.placeholder, **{"debug_sleep": spies.PAUSE, "timeout": 0, "affinity": "node", **arguments}
    )


def test_the_steps_come_in_the_order_of_the_protocol(host: Any, spies: Any) -> None:
    seen: list[str | None] = []
    host.on_poll = lambda number: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    owner = claim(spies)
    visible = ",".join(map(str, owner.devices_taken))
    assert seen == [None, None, visible], "the environment is set after the second poll and not before"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert host.events == [
        "options",
        "prepare",
        "poll",
        "visible_limit",
        "host.lock",
        *["door"] * 2,
        "entry",
        "unlock",
        "legacy lock",
        "usage",
        f"sleep, CUDA_VISIBLE_DEVICES={visible}",
        "placeholder 0",
        "placeholder 1",
        "verify",
        "usage",
        "legacy release",
        "bind",
        "bound",
        "close",
    ]
    host.events.clear()
    safe_gpu.release_gpus()
    assert host.events == ["placeholder released"] * 2


class Boom(BaseException):
    """Not an Exception: like KeyboardInterrupt, it passes every handler that does not clean up."""


@pytest.mark.parametrize("kind", [Boom, RuntimeError, OSError, NoDriverError])
def test_a_failure_at_any_step_leaves_nothing(host, spies, untouched, kind: type[BaseException], monkeypatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    claim(spies, delegate=True)
    steps = list(host.events)
    safe_gpu.release_gpus()
    assert len(steps) > 15
    for failing, step in enumerate(steps):
        if step == "legacy release" or (step == "door" and kind is OSError):  # without doors the entry counts
            continue
        host.events.clear()

        def fail(event: str, failing: int = failing) -> None:
            if len(host.events) == failing + 1:
                raise kind(f"at {event}")

        host.on_event = fail
        with untouched():
            with pytest.raises(BaseException) as caught:
                claim(spies, delegate=True)
            assert f"at {step}" in f"{caught.value} {caught.value.__cause__}"
            host.on_event = lambda event: None
            assert not spies.legacy_held, host.events
        placed = [event for event in host.events[:failing] if event in ("placeholder 0", "placeholder 1")]
        assert host.events.count("placeholder released") == len(placed), host.events
    claim(spies)


class Breaking(logging.Logger):
    """A logger that fails at its nth line."""

    def __init__(self, number: int) -> None:
        super().__init__("breaking", logging.INFO)
        self.left = number

    def handle(self, record: logging.LogRecord) -> None:
        self.left -= 1
        if self.left < 0 and "Releasing" not in record.getMessage():
            raise Boom(record.getMessage())


def test_a_logger_that_fails_at_any_line_leaves_nothing(host: Any, spies: Any, untouched: Callable[[], Any]) -> None:
    for number in itertools.count():
        with untouched():
            try:
                claim(spies, logger=Breaking(number))
            except Boom:
                continue
            assert number > 5
            safe_gpu.release_gpus()
            break


def test_a_release_that_is_interrupted_takes_its_other_steps(host, spies, untouched, monkeypatch) -> None:
    genuine = spies.placeholder.release

    def interrupted(thing: Any) -> None:
        genuine(thing)
        raise KeyboardInterrupt

    with untouched():
        owner = claim(spies)
        monkeypatch.setattr(spies.placeholder, "release", interrupted)
        with pytest.raises(KeyboardInterrupt):
            owner.release_gpus()
        assert host.events.count("placeholder released") == 2


def test_a_placeholder_that_cannot_be_released_is_told_and_the_rest_is_given_back(
    spies: Any, untouched: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    genuine = spies.placeholder.release

    def failing(thing: Any) -> None:
        genuine(thing)
        raise RuntimeError("context is corrupt")

    with untouched():
        claim(spies)
        monkeypatch.setattr(spies.placeholder, "release", failing)
        safe_gpu.release_gpus()
    assert caplog.text.count("context is corrupt") == 2


def test_the_environment_of_before_comes_back(spies, untouched, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("SAFE_GPU_SCOPE", "stale")
    with untouched():
        owner = claim(spies, delegate=True)
        assert os.environ["SAFE_GPU_SCOPE"] not in ("stale", "")
        assert set(owner.devices_taken) < {0, 1, 2, 3}
        safe_gpu.release_gpus()
    claim(spies)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    safe_gpu.release_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "what the program set since stays as it set it"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
