"""A driver or a disk that fails while somebody waits."""

import errno
import time
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.claims import claim

import safe_gpu

PATIENCE = 60.0  # seconds, that only a hang reaches


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


def test_a_driver_that_shows_gpus_and_not_who_uses_them_is_not_waited_for_for_ever(
    host, dgx, same_gpus, monkeypatch, in_first_pause
) -> None:
    """The error says what was tried, and has the attributes of the one that came at last."""
    monkeypatch.setattr("safe_gpu.claim.search.LONGEST_TROUBLE", 1.0)
    monkeypatch.setattr(host, "usage", Mock(side_effect=api.NoDriverError("no answer", driver="nvml")))
    dgx.hold(0)
    in_first_pause(dgx.let_go)
    with pytest.raises(api.NoDriverError, match=r"^no answer \(it was tried [2-9] times in 1 s\)$") as caught:
        claim(only=0, timeout=PATIENCE)
    assert caught.value.driver == "nvml"
    assert dgx.claimed() == []
    assert dgx.tickets() == []


# Entries that cannot be made


class Disk:
    """The next entry of a claim cannot be made, for so many times, with this errno."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int | None, times: int = 10**6) -> None:
        self.left = times
        self._code = code
        self._genuine = api.claim.ClaimEntry
        monkeypatch.setattr(api.claim, "ClaimEntry", self.make_entry)

    def make_entry(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left >= 0:
            raise api.StateDirError("no room", path="/state", errno=self._code)
        return self._genuine(*arguments)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_at_its_turn_is_waited_for(host, dgx, monkeypatch, caplog, in_first_pause, code) -> None:
    dgx.hold(0)
    in_first_pause(dgx.let_go)
    disk = Disk(monkeypatch, code, times=3)
    assert claim(only=0, timeout=PATIENCE).devices_taken == [0]
    assert disk.left < 0
    assert caplog.text.count("no room; waiting 1 min for it") == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_but_not_for_ever(host, dgx, monkeypatch, in_first_pause, code: int) -> None:
    monkeypatch.setattr("safe_gpu.claim.search.LONGEST_TROUBLE", 0.5)
    dgx.hold(0)
    in_first_pause(dgx.let_go)
    Disk(monkeypatch, code)
    with pytest.raises(api.StateDirError, match=r"^no room \(it was tried [2-9] times in 0 s\)$") as caught:
        claim(only=0, timeout=PATIENCE)
    assert (caught.value.errno, caught.value.path) == (code, "/state")
    assert dgx.tickets() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EMFILE, None])
def test_what_does_not_pass_by_itself_is_not_waited_for(host, dgx, monkeypatch, caplog, in_first_pause, code) -> None:
    dgx.hold(0)
    in_first_pause(dgx.let_go)
    disk = Disk(monkeypatch, code)
    with pytest.raises(api.StateDirError, match=r"^no room$"):
        claim(only=0, timeout=PATIENCE)
    assert disk.left == 10**6 - 1
    assert "waiting 1 min" not in caplog.text


def test_nor_are_too_many_entries_of_ones_own(host, dgx, monkeypatch, caplog, in_first_pause) -> None:
    """Nobody else ends them."""

    def others_come_while_it_waits() -> None:
        monkeypatch.setattr(api.listing.Listing, "has_room", lambda self, uid: False)
        dgx.let_go()

    dgx.hold(0)
    in_first_pause(others_come_while_it_waits)
    with pytest.raises(api.StateDirError, match="as many files of yours as count") as caught:
        claim(only=0, timeout=PATIENCE)
    assert caught.value.errno is None, "no call has failed"
    assert "waiting 1 min" not in caplog.text


def test_a_claim_that_has_not_waited_fails_at_once(host, monkeypatch, caplog) -> None:
    disk = Disk(monkeypatch, errno.ENOSPC)
    with pytest.raises(api.StateDirError, match=r"^no room$"):
        claim(only=0, timeout=PATIENCE)
    assert disk.left == 10**6 - 1
    assert not caplog.records


# NVML as it is while a driver is reloaded


WAITS = """
import safe_gpu
owner = safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0, timeout=None, affinity=None)
say(*owner.devices_taken)
"""


@pytest.mark.parametrize("code", [1, 9], ids=["uninitialised", "not loaded"])
def test_nvml_that_is_away_when_the_turn_comes_is_waited_for(fake_gpus, state_dir, child, eventually, code) -> None:
    first = child(f"{WAITS}listen()\nowner.release_gpus()\nsay('done')\nlisten()", says="0", env=fake_gpus.env)
    second = child(WAITS, env=fake_gpus.env)
    eventually(lambda: len(api.waiting_tickets(str(state_dir))) == 1)
    fake_gpus.options(session_error=code, init_error=code if code == 9 else 0, log=1)
    first.tell()
    assert first.hear() == "done"
    eventually(lambda: "nvmlInitWithFlags" in fake_gpus.calls() or "nvmlInit_v2" in fake_gpus.calls())
    fake_gpus.options()
    assert second.hear() == "0"
