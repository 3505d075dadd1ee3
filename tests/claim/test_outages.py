"""A driver or a disk that fails while somebody waits."""

import time
from threading import Timer
from unittest.mock import Mock

import pytest
from support import api

import safe_gpu


def test_a_driver_that_is_away_when_its_turn_comes_is_waited_for(host, caplog) -> None:
    """Of the second poll too: the GPUs are given back meanwhile, and the place is kept."""
    context, away = host.stranger(0), []

    def fail(number: int) -> None:
        if number == 2:
            context.close()
        if number in (3, 5):  # the second poll, and one of the queue
            away.append(time.monotonic())
            raise api.NoDriverError("the driver is being loaded", driver="nvml")

    host.on_poll = fail
    owner = safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=30, affinity=None)
    assert owner.devices_taken == [0]
    assert away
    assert "the driver is being loaded; waiting" in caplog.text


@pytest.mark.parametrize("timeout", [0, 2])
def test_but_no_longer_than_the_claim_waits(host, timeout: float) -> None:
    host.stranger(0)

    def fail(number: int) -> None:
        if number > 1:
            raise api.NoDriverError("the driver has gone", driver="nvml")

    host.on_poll = fail
    with pytest.raises(api.NotEnoughGpusError if timeout == 0 else api.NoDriverError):
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=timeout, affinity=None)


def test_a_driver_that_shows_gpus_and_not_who_uses_them_is_not_waited_for_for_ever(host, monkeypatch) -> None:
    monkeypatch.setattr("safe_gpu.claim.search._LONGEST_TROUBLE", 1.0)
    monkeypatch.setattr(host, "usage", Mock(side_effect=api.NoDriverError("no answer", driver="nvml")))
    began = time.monotonic()
    Timer(0.5, host.stranger(0).close).start()
    with pytest.raises(api.NoDriverError):
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=60, affinity=None)
    assert time.monotonic() - began < 20
