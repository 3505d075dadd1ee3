"""Many processes race for few GPUs, and some are killed in the middle of it."""

from __future__ import annotations

import fcntl
from functools import partial
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination import host_lock, leases, waiting
from safe_gpu.referee import Watch

NOTHING = safe_gpu.NoPlaceholder()


class Field:
    """Racers that race again and again; whoever is killed is replaced before the next round."""

    def __init__(self, track: Any, size: int) -> None:
        self._track = track
        self._gun = track.state_dir.parent / "gun"
        self._gun.touch()
        self.racers = [self._new() for _ in range(size)]

    def _new(self) -> Any:
        return self._track.start(self._race)

    def _race(self, line: Any) -> None:
        while True:
            nb_gpus, options = line.recv()
            with self._gun.open() as gun:
                fcntl.flock(gun, fcntl.LOCK_SH)
            self._track.claim_and_hold(line, nb_gpus, **options)

    def round(self, orders: list[tuple[int, dict[str, Any]]], *, at_once: bool) -> dict[str, list[Any]]:
        """Everybody claims at the same moment. GPUs are held until all have tried, or let go at once.

        Returns:
            What was said, by its first word.
        """
        with self._gun.open() as gun:
            fcntl.flock(gun, fcntl.LOCK_EX)
            for racer, order in zip(self.racers, orders, strict=True):
                racer.line.send(order)
        said: dict[str, list[Any]] = {"holds": [], "refused": [], "gone": []}
        silent = list(self.racers)
        holding = []
        while silent:
            racer, word = self._track.next_word(silent)
            silent.remove(racer)
            said[word[0]].append(word[1:])
            if word[0] == "holds":
                holding.append(racer)
                if at_once:
                    racer.tell("let go")
            elif word[0] == "gone":
                self.racers[self.racers.index(racer)] = self._new()
        for racer in holding:
            if not at_once:
                racer.tell("let go")
            assert racer.hear() == ("done",)
        return said


@pytest.mark.timeout(300)
def test_64_processes_race_for_8_gpus_and_some_are_killed(track: Any, steps: Any) -> None:
    """Half of the rounds without waiting, half where everyone waits for a turn; a fifth of the racers is killed."""
    with_placeholder = steps(lambda: safe_gpu.GPUOwner(1, None, timeout=0, affinity=None).release_gpus())
    field = Field(track, 64)
    claims = killed = 0
    for number in range(50):
        waits = number % 2 == 1
        orders = []
        for i in range(64):
            victim = number % 5 != 0 and track.random.random() < 0.2
            options = {
                "timeout": 60.0 if waits else 0.0,
                "placeholder": NOTHING if i % 2 else None,
                "die_at": track.random.randint(1, with_placeholder) if victim else 0,
            }
            orders.append((track.random.choice((1, 1, 1, 2)), options))
        said = field.round(orders, at_once=waits)

        assert [rivals for _, rivals in said["holds"] if rivals] == []
        claims += sum(len(uuids) for uuids, _ in said["holds"])
        assert track.counters.total() == claims, f"round {number}: a lost update, so two held one GPU"
        killed += len(said["gone"])
        if waits:
            assert said["refused"] == []
        for (refusal,) in said["refused"]:
            assert len(refusal.verdicts) == 8
            assert refusal.nb_gpus in (1, 2)
            told = [verdict for verdict in refusal.verdicts if not verdict.free]
            assert all(verdict.state in ("claimed", "busy") and verdict.pid for verdict in told)
            if not said["gone"]:
                assert 8 - len(told) < refusal.nb_gpus
        track.claim_all()
    assert killed > 100
    assert track.files() == []


def test_without_the_locks_the_referee_sees_collisions(track: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (host_lock, leases, waiting):
        monkeypatch.setattr(module, "lock_file", lambda fd: True)
    said = Field(track, 16).round([(1, {"placeholder": NOTHING})] * 16, at_once=False)
    assert len(said["holds"]) == 16
    assert sum(len(rivals) for _, rivals in said["holds"]) >= 8
    assert track.counters.total() < 16


class Stop:
    """A placeholder that stays on its GPU for as long as the test wants."""

    def __init__(self, track: Any, line: Any) -> None:
        self._track = track
        self._line = line

    def __call__(self, device_no: int) -> Any:
        context = self._track.driver.default_placeholder()(device_no)
        self._line.send(("placed",))
        self._line.recv()
        return context

    def release(self, context: Any) -> None:
        context.close()


def place(track: Any, line: Any) -> None:
    line.recv()
    track.claim_and_hold(line, placeholder=Stop(track, line))


@pytest.mark.parametrize("locks", [True, False])
def test_the_process_lists_tell_too(track: Any, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    if not locks:
        for module in (host_lock, leases, waiting):
            monkeypatch.setattr(module, "lock_file", lambda fd: True)
    watch = Watch(lambda: track.driver, 0.001)
    racers = [track.start(partial(place, track)) for _ in range(8)]
    for racer in racers:
        racer.tell("go")  # whoever polls before all others have placed something picks from the same free GPUs
    for racer in racers:
        assert racer.hear() == ("placed",)
    looks, sightings = watch.stop()
    assert looks > 0
    pids = frozenset(racer.pid for racer in racers)
    seen = [sighting for sighting in sightings if sighting.concerns(pids)]
    assert bool(seen) is not locks
