"""A driver or a disk that fails while somebody waits."""

import re
import subprocess
import sys
import threading
import time
from threading import Timer
from types import SimpleNamespace
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
    monkeypatch.setattr("safe_gpu.claim.search._LONGEST_ABSENCE", 1.0)
    monkeypatch.setattr(host, "usage", Mock(side_effect=api.NoDriverError("no answer", driver="nvml")))
    began = time.monotonic()
    Timer(0.5, host.stranger(0).close).start()
    with pytest.raises(api.NoDriverError):
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=60, affinity=None)
    assert time.monotonic() - began < 20


def test_one_thread_tells_what_is_awaited_and_ends(monkeypatch) -> None:
    started: list[object] = []
    real = api.telling.start_new_thread
    monkeypatch.setattr(api.telling, "start_new_thread", lambda *about: started.append(about) or real(*about))
    monkeypatch.setattr(api.telling, "_FIRST", 0.2)
    said: list[str] = []
    dog = api.telling.Watchdog(SimpleNamespace(warning=lambda what, *more: said.append(what % more)))
    for _ in range(3):
        with dog.telling("a"):
            pass
    assert (len(started), said) == (1, [])
    with dog.telling("outer"):
        with dog.telling("inner"):
            time.sleep(0.3)
        time.sleep(0.1)
    assert [one.split(",")[0] for one in said] == ["still inner", "still outer"]
    dog.close()
    dog.close()
    with dog.telling("b"):
        pass
    time.sleep(0.5)
    assert dog._thread is None, "where nothing is awaited it ends by itself"
    assert len(started) == 2


def test_who_waits_keeps_no_session_with_the_driver(host, monkeypatch) -> None:
    closed: list[float] = []
    monkeypatch.setattr(host, "close", lambda: closed.append(time.monotonic()))
    monkeypatch.setattr("safe_gpu.claim.search._SHORT", 0.0)
    context = host.stranger(0)
    Timer(1.0, context.close).start()
    with safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=30, affinity=None):
        assert closed


def test_a_driver_that_takes_long_is_told_of_and_of_one_that_hangs_since_when(host, caplog, monkeypatch) -> None:
    monkeypatch.setattr("safe_gpu.claim.telling._FIRST", 0.2)
    monkeypatch.setattr("safe_gpu.claim.telling._LATE", 0.4)
    threads = threading.active_count()
    with safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None):
        pass
    assert not caplog.records
    host.on_poll = lambda number: time.sleep(0.6 if number == host.polls == 4 else 0)
    with safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None):
        pass
    first, late = (record.getMessage() for record in caplog.records)
    assert first.startswith("still asking the driver")
    assert re.search(r", since \d\d:\d\d:\d\d .*dmesg", late)
    caplog.clear()
    with safe_gpu.claim_gpus(1, lambda device_no: time.sleep(0.3), timeout=0, affinity=None):
        pass
    assert "to hold GPU 0" in caplog.records[0].getMessage()
    assert threading.active_count() == threads


def test_where_a_driver_hangs_a_command_ends_when_its_time_is_over(command, monkeypatch) -> None:
    code = "import sys, time, safe_gpu.claim.telling as telling; telling._FIRST = telling._LATE = 0.2; "
    code += "from safe_gpu.claim.telling import Watchdog; from safe_gpu.cli.output import Log; "
    code += "dog = Watchdog(Log(), time.monotonic() + 0.4)\nwith dog.telling('x'): time.sleep(30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, "time to wait is over" in done.stderr) == (75, True)
