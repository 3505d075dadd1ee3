"""Many processes race for few GPUs, and some are killed in the middle of it."""

import fcntl
from typing import Any

import pytest
from support.broken import BROKEN
from support.real import REQUIRED

import safe_gpu

NOTHING = safe_gpu.NoPlaceholder()
ROUNDS = 15 if REQUIRED else 5


class Field:
    """Racers that race again and again; whoever is killed is replaced before the next round."""

    def __init__(self, track: Any, size: int) -> None:
        self._track = track
        self.claims = self.met = 0  # claimed GPUs, and how often a racer met another one there
        self.doubled: list[str] = []  # GPUs on which the driver showed several processes while they were held
        self._gun = track.state_dir.parent / "gun"
        self._gun.touch()
        self.racers = [self._new() for _ in range(size)]

    def _new(self) -> Any:
        return self._track.start(self._race)

    def _replaced(self, racer: Any) -> Any:
        racer.end()
        self._track.bury(racer)
        return self._new()

    def _race(self, line: Any) -> None:
        while True:
            nb_gpus, options = line.recv()
            with self._gun.open() as gun:
                fcntl.flock(gun, fcntl.LOCK_SH)
            self._track.claim_and_hold(line, nb_gpus, **options)

    def round(
        self, orders: list[tuple[int, dict[str, Any]]], *, at_once: bool, work: bool = False
    ) -> dict[str, list[Any]]:
        """Everybody claims at the same moment. GPUs are held until all have tried, or let go at once.

        ``work``: when all have tried, those that hold GPUs compute on them, and the driver is asked who is where.

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
                self.racers[self.racers.index(racer)] = self._replaced(racer)
        if work and not at_once:
            for racer in holding:
                racer.tell("work")
                assert racer.hear() == ("works",)
            self.doubled += self._track.doubled()
        for racer in holding:
            if not at_once:
                racer.tell("let go")
            assert racer.hear() == ("done",)
        if self._track.claims_once:
            self.racers = [self._replaced(racer) for racer in self.racers]
        self.claims += sum(len(uuids) for uuids, _ in said["holds"])
        self.met += sum(len(rivals) for _, rivals in said["holds"])
        assert not (at_once and said["refused"]), "these wait"
        return said


@pytest.mark.timeout(300)
def test_64_processes_race_for_8_gpus_and_some_are_killed(track: Any) -> None:
    """Half of the rounds without waiting, half where everyone waits for a turn; a fifth of the racers is killed."""
    field = Field(track, 64)
    killed = 0
    for number in range(ROUNDS):
        waits = number % 2 == 1
        orders = []
        for i in range(64):
            victim = number % 5 != 0 and track.random.random() < 0.2
            options = {
                "timeout": 60.0 if waits else 0.0,
                "placeholder": NOTHING if i % 2 else None,
                "die_at": track.random.randint(1, 120) if victim else 0,
            }
            orders.append((track.random.choice((1, 1, 1, 2)), options))
        said = field.round(orders, at_once=waits)

        assert field.met == 0
        assert track.counted() == field.claims, f"round {number}: a lost update, so two held one GPU"
        killed += len(said["gone"])
        for (refusal,) in said["refused"]:
            assert len(refusal.verdicts) == 8
            assert refusal.nb_gpus in (1, 2)
            told = [verdict for verdict in refusal.verdicts if not verdict.free]
            assert {verdict.state for verdict in told} <= {"claimed", "busy"}
            if not said["gone"]:  # a holder that is just being killed may have no name any more
                assert all(verdict.pid for verdict in told), told
                assert 8 - len(told) < refusal.nb_gpus
        track.claim_all()
    assert killed > 2 * ROUNDS
    assert track.files() == []


# A host, how many GPUs a racer may ask for (all together want more than there are), and the number of rounds.
AMD_HOSTS = [("mi250x", (1, 2, 3), 6), ("mi300x-cpx", (1, 8, 24), 4), ("hip", (1, 2, 3), 4)]
on_amd_hosts = pytest.mark.parametrize(
    ("track", "sizes", "rounds"), AMD_HOSTS, indirect=["track"], ids=[host for host, _, _ in AMD_HOSTS]
)


def run_eight(track: Any, sizes: tuple[int, ...], rounds: int, *, kills: bool = True) -> Field:
    """Eight racers that use what they claim."""
    field = Field(track, 8)
    for number in range(rounds):
        waits = kills and number % 3 == 2
        orders = [
            (
                track.random.choice(sizes),
                {
                    "timeout": 60.0 if waits else 0.0,
                    "placeholder": NOTHING if i % 2 or not kills else None,
                    "die_at": track.random.randint(1, 120) if kills and track.random.random() < 0.2 else 0,
                },
            )
            for i in range(8)
        ]
        field.round(orders, at_once=waits, work=True)
    return field


@pytest.mark.timeout(300)
@on_amd_hosts
def test_eight_processes_race_on_an_amd_host(track: Any, sizes: tuple[int, ...], rounds: int) -> None:
    """Neither locks nor counters nor the list of processes see a collision, and those that are killed leave nothing."""
    field = run_eight(track, sizes, rounds)
    assert field.met == 0
    assert track.counted() == field.claims > rounds * 2, "a lost update, so two held one GPU"
    assert field.doubled == []
    track.claim_all()
    assert track.files() == []


@on_amd_hosts
def test_on_an_amd_host_all_three_see_that_locks_are_missing(track: Any, sizes, rounds, monkeypatch) -> None:
    without_locks(monkeypatch)
    field = run_eight(track, sizes, min(rounds, 2), kills=False)
    assert field.met > 0
    assert track.counted() < field.claims
    assert field.doubled


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    for build in ("no doors nor locks", "no second listing"):
        for broken in BROKEN[build]:
            monkeypatch.setattr(*broken)
