"""What racers do in each scene, and the referee: who may have which GPU, by what they said and by nothing else."""

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from interleave_racer import CONTENT, Racer
from support.referee import Part, booked_twice
from support.stage import left_behind, simulate

import safe_gpu
from safe_gpu.coordination import older_package as legacy
from safe_gpu.coordination import own_entry
from safe_gpu.coordination.directory import PARTS
from safe_gpu.coordination.holders import living_claims
from safe_gpu.drivers.simulated import PRESETS, WHOLE, SimulatedContext, SimulatedDriver, find_preset
from safe_gpu.gpus.devices import Gpu

_HOST = find_preset("dgx-a100")
_FACTS, _CARDS = PRESETS["dgx-a100"]
for _number in (1, 2):
    PRESETS[f"gpus-{_number}"] = [_FACTS, " ".join(_CARDS.split(" ")[: 3 + _number])]
PRESETS["amd-1"] = [_FACTS, "AMD Instinct MI300X; 196480; 05:0"]
PRESETS["intel-1"] = [_FACTS, "Intel Data Center GPU Max 1550; 131072; 18:0"]
GIB = 1 << 30
CAPACITY = (_HOST.devices[0].memory_total or 0) - GIB // 2  # of one GPU, about, bytes

_FIRST_USER = 12000

Act = Callable[[Racer], None]


class Plan(NamedTuple):
    """What one racer does.

    Attributes:
        act: in the racer.
        at: the number of its state directory.
        inside: the racer inside whose claim it claims.
        after: it begins when that one has its GPUs, or is over.
    """

    act: Act
    at: int = 1
    inside: str = ""
    after: str = ""


class Device(NamedTuple):
    """What a racer has: a card, or a piece of it.

    Attributes:
        card: its number among the cards of the host.
        piece: the name of the piece; "" of the whole card.
        mode: of the card, where it has several in which it has pieces.
    """

    card: int
    piece: str = ""
    mode: str = ""


def device_of(gpu: Gpu) -> Device:
    """Return what a device of the driver is."""
    cards = [card.gpu.whole for card in find_preset(os.environ["SAFE_GPU_DRIVER"].partition(":")[2]).cards]
    return Device(cards.index(gpu.whole), gpu.uuid if gpu.is_piece else "", gpu.mode)


def claims(
    nb_gpus: int = 1,
    *,
    at: int = 1,
    inside: str = "",
    after: str = "",
    hold: float = 0.03,
    times: int = 1,
    context: bool = False,
    lingers: float = 0.0,
    ends: str = "by release",
    older: bool = False,
    **options: Any,
) -> Plan:
    """A racer that claims, holds and gives back; or that becomes a command, which exits.

    Args:
        lingers: for so many seconds a context of its own stays on a GPU that it has given back.
    """
    options = {"timeout": 0, **options}

    def act(racer: Racer) -> None:
        os.environ["SAFE_GPU_LEGACY_LOCK"] = "auto" if older else "never"
        if inside:
            os.environ["SAFE_GPU_SCOPE"] = _scope_of(racer.base, inside)
        for _ in range(times):
            placeholder = None if context else safe_gpu.NoPlaceholder()
            try:
                owner = safe_gpu.GPUOwner(nb_gpus, placeholder, affinity=None, **options)
            except (safe_gpu.SafeGpuError, KeyboardInterrupt) as err:
                racer.say("refused", type(err).__name__)
                continue
            if options.get("delegate"):
                Path(racer.base, f"scope-{racer.name}").write_text(os.environ["SAFE_GPU_SCOPE"])
            devices = [device_of(gpu) for gpu in owner.gpus]
            racer.say("has", devices, owner.share)
            kept = simulated_driver().occupy(owner.gpus[0].uuid) if lingers else None
            try:
                if ends == "by exec":
                    owner.keep_across_exec()
                    racer.exec()
                time.sleep(hold)
                racer.say("gives back")
                if ends == "by exec":
                    racer.die()
                owner.release_gpus()
            except KeyboardInterrupt:
                racer.say("gives back")
                owner.release_gpus()
            racer.say("has given back")
            if kept is not None:
                stay(racer, kept, devices[:1], lingers)

    return Plan(act, at, inside, after or inside)


def simulated_driver() -> SimulatedDriver:
    """The driver of a racer's host."""
    return SimulatedDriver(os.environ["SAFE_GPU_DRIVER"].partition(":")[2])


def stay(racer: Racer, context: SimulatedContext, devices: list[Any], seconds: float) -> None:
    """Be on a GPU without a claim."""
    racer.say("comes", devices)
    time.sleep(seconds)
    context.close()
    racer.say("goes")


def _scope_of(base: str, racer: str) -> str:
    """Return what the claim of a racer passes on to its children; before it has claimed, what names no claim."""
    with suppress(FileNotFoundError):
        return Path(base, f"scope-{racer}").read_text()
    return "0" * 16


def stranger(gpu: int, hold: float = 0.03) -> Plan:
    """A process without safe_gpu that is on a GPU for a while."""

    def act(racer: Racer) -> None:
        driver = simulated_driver()
        stay(racer, driver.occupy(driver.idle.gpus[gpu].uuid), [gpu], hold)

    return Plan(act)


def old_package(hold: float = 0.03) -> Plan:
    """Safe-gpu 2.0: an exclusive lock, a look at the driver, a context, the lock given back."""

    def act(racer: Racer) -> None:
        driver = simulated_driver()
        with open(legacy.LOCK_FILE, "a") as file:
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX)
            free = [gpu for gpu in driver.snapshot().gpus if not gpu.processes]
            context = driver.occupy(free[0].uuid) if free else None
            if context is not None:
                racer.say("has", [device_of(free[0])], None)
            fcntl.lockf(file.fileno(), fcntl.LOCK_UN)
        if context is None:
            racer.say("refused", "by the driver")
            return
        time.sleep(hold)
        racer.say("gives back")
        context.close()

    return Plan(act)


def drains(gpu: int, hold: float = 0.03) -> Plan:
    """The owner of the state directory drains a GPU for a while, and looks once whether a claim holds it."""

    def act(racer: Racer) -> None:
        path = os.path.join(os.environ["SAFE_GPU_DIR"], "closed")
        Path(f"{path}.new").write_text(f"{_HOST.devices[gpu].uuid} - - - a fan\n")
        racer.step(f"write {racer.label(path)}")
        os.rename(f"{path}.new", path)
        racer.say("drains", [gpu])
        if not any(_HOST.devices[gpu].uuid in one.gpus for one in living_claims()):
            racer.say("empty", gpu)
        time.sleep(hold)
        racer.say("undrains", [gpu])
        os.unlink(path)

    return Plan(act)


def divides(*modes: str, hold: float = 0.02) -> Plan:
    """An administrator who divides the first card otherwise, whoever uses it."""

    def act(racer: Racer) -> None:
        name = os.environ["SAFE_GPU_DRIVER"].partition(":")[2]
        driver = SimulatedDriver(name)
        card = driver.idle.gpus[0].whole
        label = f"simulated/{name}/{card}.mode"
        for mode in modes:
            racer.whole(driver.divide, f"write {label}")(card, mode)
            racer.say(CONTENT, label, hash(mode))
            time.sleep(hold)

    return Plan(act)


def unlinks() -> Plan:
    """The owner of the state directory removes host.lock."""

    def act(racer: Racer) -> None:
        for _ in range(2):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(os.environ["SAFE_GPU_DIR"], "host.lock"))

    return Plan(act)


@dataclass
class Scene:
    """Racers and what is expected of them.

    Attributes:
        plans: what each racer does, by its name.
        gpus: of the host.
        preset: the host; "" is one with so many GPUs.
        mode: in which its first card is at first; "" is whole.
        kill: the racers of which one is killed, at any step.
        deaths: how: keys of DEATHS.
        interrupt: those of which one gets SIGINT, at any step.
        served: how many claims must get their GPUs, if nobody is killed or interrupted.
        in_turn: who has the earlier ticket gets its GPUs first, or by ``users`` who has the lower turn.
        users: a letter for each racer, its user; they are served by turns. Needs root.
        limit: how many GPUs each of these users may hold at once, by the policy; 0 is any number.
        host_lock: whether host.lock is one. No GPU may be booked twice without it, either.
        apart: whether nobody sees the doors of others, as where each has a network of its own.
    """

    plans: dict[str, Plan]
    gpus: int = 1
    preset: str = ""
    mode: str = ""
    kill: str = ""
    deaths: str = "!^"
    interrupt: str = ""
    served: int = 0
    in_turn: bool = False
    users: str = ""
    limit: int = 0
    host_lock: bool = True
    apart: bool = False

    def visit(self, base: str, number: int) -> None:
        """Let this process use the state directory of that number."""
        policy = {"SAFE_GPU_POLICY": f"{base}/etc/policy.ini"} if self.users else {}
        simulate(self.host, f"{base}/{number}", SAFE_GPU_SIMULATED_DIR=f"{base}/simulated", **policy)

    def user(self, name: str) -> str:
        """The user of a racer."""
        return self.users["ABCDEF".index(name)]

    def become(self, racer: Racer) -> None:
        """In the process of a racer, when its stand-ins are there: be its user."""
        if not self.users:
            return

        make_entry = own_entry.make_entry

        def make_and_tell(directory: Any, number: int, said: Any, **options: Any) -> Any:
            if "turn" in said:
                racer.say("turn", said["turn"])
            return make_entry(directory, number, said, **options)

        own_entry.make_entry = make_and_tell
        os.setresuid(*[_FIRST_USER + ord(self.user(racer.name))] * 3)

    @property
    def host(self) -> str:
        """The simulated host."""
        return self.preset or f"gpus-{self.gpus}"

    @property
    def closes(self) -> bool:
        """Whether somebody closes GPUs."""
        return any(plan.act.__qualname__.startswith("drains") for plan in self.plans.values())

    @property
    def directories(self) -> list[int]:
        """Return the numbers of the state directories."""
        return sorted({plan.at for plan in self.plans.values()})


def _scene(*plans: Plan, **about: Any) -> Scene:
    """Racers, named A, B, C in this order, and what else is so."""
    return Scene(dict(zip("ABCDEF", plans, strict=False)), **about)


_OUTER: dict[str, Any] = {"delegate": True}
_INNER: dict[str, Any] = {"inside": "A"}
_ANY = "!^%&"
_BIG, _SMALL = "60GiB", "25GiB"
_PATIENT: dict[str, Any] = {"timeout": 60}
_MIG, _CPX, _DPX, _FUNCTIONS = "mig 3g.40gb/2 40320 1g.10gb 9856", "partitions 8", "partitions 2", "functions 2"
_UNLOCKED: dict[str, Any] = {"host_lock": False, "apart": True}

SCENES: dict[str, Scene] = {
    # Claim by claim
    "claims": _scene(claims(), claims(), kill="A", served=1),
    "claims-3": _scene(claims(), claims(), claims(), served=1),
    "claims-2-of-2": _scene(claims(2), claims(2), gpus=2, kill="A", served=1),
    "claims-delegating": _scene(claims(**_OUTER), claims(**_OUTER), kill="A", served=1),
    "directories-2": _scene(claims(), claims(at=2), kill="A", served=1),
    "directories-2-delegating": _scene(claims(**_OUTER), claims(at=2, **_OUTER), kill="A", served=1),
    "directories-2-of-2": _scene(claims(2), claims(2, at=2), gpus=2, kill="A", served=1),
    "directories-3": _scene(claims(), claims(at=2), claims(at=3), served=1),
    # Shares: 60 and 30 of 80 GiB do not fit
    "shares": _scene(claims(share=_BIG), claims(share=_SMALL), kill="A", served=1),
    "shares-that-fit": _scene(claims(share=_SMALL), claims(share=_SMALL), kill="A", served=2),
    "shares-3": _scene(claims(share=_BIG), claims(share=_SMALL), claims(share=_SMALL), kill="A", served=1),
    "shares-whole": _scene(claims(share=_SMALL), claims(), kill="A", served=1),
    "shares-whole-delegating": _scene(claims(share=_SMALL), claims(**_OUTER), kill="AB", served=1),
    "shares-directories": _scene(claims(share=_SMALL), claims(share=_SMALL, at=2), kill="A", served=1),
    "shares-directories-3": _scene(claims(share=_SMALL), claims(share=_SMALL, at=2), claims(at=3), kill="A", served=1),
    # A gives its share back while B comes beside it, and C from another directory
    "shares-directories-again": _scene(
        claims(share=_SMALL), claims(share=_SMALL), claims(share=_BIG, at=2), kill="A", served=1
    ),
    "shares-whole-directories": _scene(claims(share=_SMALL), claims(at=2), kill="AB", served=1),
    # Claims inside claims
    "nested": _scene(claims(**_OUTER), claims(**_INNER), claims(), kill="A", deaths=_ANY),
    "nested-directories": _scene(claims(**_OUTER), claims(**_INNER), claims(at=2), kill="A", deaths=_ANY),
    "nested-both-delegate": _scene(claims(**_OUTER), claims(**_INNER), claims(at=2, **_OUTER), kill="A", deaths=_ANY),
    "nested-inner-elsewhere": _scene(claims(**_OUTER), claims(at=2, **_INNER), claims(), kill="A", deaths=_ANY),
    "nested-both-elsewhere": _scene(claims(**_OUTER), claims(at=2, **_INNER), claims(at=3), kill="A", deaths=_ANY),
    "nested-two-inner": _scene(claims(**_OUTER), claims(**_INNER), claims(**_INNER), kill="A", deaths=_ANY),
    "nested-inner-killed": _scene(claims(**_OUTER), claims(**_INNER), claims(at=2), kill="B", deaths=_ANY),
    "nested-exec": _scene(claims(ends="by exec", **_OUTER), claims(**_INNER), claims(at=2), kill="A", deaths=_ANY),
    "nested-share-beside": _scene(claims(**_OUTER), claims(**_INNER), claims(at=2, share=_BIG), kill="A", deaths=_ANY),
    "nested-waits": _scene(
        claims(**_OUTER), claims(**_INNER, **_PATIENT), claims(at=2, **_PATIENT), kill="A", deaths=_ANY
    ),
    # Commands that have taken the place of who claimed
    "exec": _scene(claims(ends="by exec"), claims(), claims(at=2), kill="A", served=1),
    "exec-share": _scene(claims(ends="by exec", share=_BIG), claims(share=_SMALL, at=2), kill="A", served=1),
    # The end of a claim, and who comes then
    "release": _scene(claims(times=2), claims(times=2), served=1),
    "release-directories": _scene(claims(times=2, **_OUTER), claims(at=2, times=2), served=1),
    "release-shares": _scene(claims(times=2, share=_BIG), claims(times=2, share=_SMALL), served=1),
    # The queue
    "queue": _scene(claims(), claims(**_PATIENT), claims(**_PATIENT), kill="AB", served=2, in_turn=True),
    "queue-directories": _scene(claims(), claims(**_PATIENT), claims(at=2, **_PATIENT), kill="A", served=2),
    "queue-shares": _scene(
        claims(share=_BIG), claims(share=_BIG, **_PATIENT), claims(share=_SMALL, **_PATIENT), kill="A", served=2
    ),
    "queue-large": _scene(
        claims(), claims(2, **_PATIENT), claims(**_PATIENT), gpus=2, kill="B", in_turn=True, served=2
    ),
    "queue-stranger": _scene(
        stranger(1, 0.05),
        claims(only=0, hold=0.06),
        claims(2, **_PATIENT),
        claims(only=0, **_PATIENT),
        gpus=2,
        in_turn=True,
        served=2,
    ),
    # A stranger comes between the two polls: who gives back keeps its place
    "queue-contended": _scene(claims(), claims(**_PATIENT), claims(**_PATIENT), stranger(0), in_turn=True, served=2),
    "queue-contended-2": _scene(
        claims(2), claims(2, **_PATIENT), claims(**_PATIENT), stranger(0), gpus=2, in_turn=True, served=2
    ),
    "queue-contended-late": _scene(
        claims(), claims(**_PATIENT), stranger(0), claims(**_PATIENT), in_turn=True, served=2, kill="B"
    ),
    "queue-contended-both": _scene(
        claims(2), claims(**_PATIENT), claims(**_PATIENT), stranger(0), stranger(1), gpus=2, in_turn=True, served=2
    ),
    # What a claim has left is known without a poll, and where that is wrong, by the second one
    "queue-contexts": _scene(
        claims(context=True), *[claims(context=True, **_PATIENT)] * 2, kill="A", in_turn=True, served=2
    ),
    "queue-lingers": _scene(claims(lingers=0.03), *[claims(**_PATIENT)] * 2, kill="B", in_turn=True, served=2),
    # A's user holds and waits: the turns are 1.5 of B, 3 of C and 2 of D
    "queue-turns": _scene(
        claims(), *(claims(**_PATIENT, after=after) for after in ("A", "A", "A")), in_turn=True, served=4, users="aaab"
    ),
    "queue-turns-killed": _scene(
        claims(), *(claims(**_PATIENT, after="A") for _ in "BC"), kill="B", in_turn=True, users="aab"
    ),
    "queue-turns-contended": _scene(
        claims(), *(claims(**_PATIENT, after="A") for _ in "BC"), stranger(0), in_turn=True, users="aabc", served=2
    ),
    "limits": _scene(claims(), claims(), claims(), gpus=2, users="aab", limit=1, kill="A", served=2),
    "timeouts": _scene(claims(), claims(timeout=0.03), claims(timeout=0.05), in_turn=True),
    "interrupt": _scene(claims(), claims(**_PATIENT), claims(**_PATIENT), interrupt="B", in_turn=True),
    "interrupt-claim": _scene(claims(**_OUTER), claims(), interrupt="A"),
    # Beside others
    "contexts": _scene(claims(context=True), claims(context=True, at=2), stranger(0), kill="A"),
    "older": _scene(claims(context=True, older=True, **_PATIENT), old_package(), kill="A"),
    "older-directories": _scene(
        claims(context=True, older=True), claims(at=2, context=True, older=True), old_package()
    ),
    "drain": _scene(drains(0), claims(), claims(**_PATIENT, only=0), kill="B"),
    # GPUs and their pieces, while an administrator divides them
    "pieces": _scene(claims(), claims(), divides(_MIG), divides(WHOLE), kill="A"),
    "pieces-3": _scene(claims(), claims(), claims(), divides(_MIG)),
    "pieces-two": _scene(claims(), claims(), mode=_MIG, served=2),
    "pieces-whole": _scene(claims(), claims(), divides(WHOLE), divides(_MIG), mode=_MIG, kill="A"),
    "pieces-share": _scene(claims(share=_SMALL), claims(), divides(_MIG), kill="A"),
    "pieces-directories": _scene(claims(), claims(at=2), divides(_MIG), divides(WHOLE), kill="AB"),
    "pieces-directories-whole": _scene(claims(), claims(at=2), divides(WHOLE), divides(_MIG), mode=_MIG, kill="AB"),
    "pieces-directories-3": _scene(claims(), claims(at=2), claims(at=3), divides(_MIG)),
    "pieces-directories-share": _scene(claims(share=_SMALL), claims(at=2), divides(_MIG), divides(WHOLE), kill="AB"),
    "pieces-directories-again": _scene(claims(times=2, **_OUTER), claims(at=2, times=2), divides(_MIG)),
    "pieces-modes": _scene(claims(), claims(), divides(_DPX), mode=_CPX, preset="amd-1", kill="A"),
    "pieces-modes-whole": _scene(claims(), claims(), divides(WHOLE), divides(_DPX), mode=_CPX, preset="amd-1"),
    "pieces-modes-directories": _scene(claims(), claims(at=2), divides(_DPX), mode=_CPX, preset="amd-1", kill="AB"),
    "pieces-functions": _scene(claims(only=0), claims(only=1), claims(only=2), mode=_FUNCTIONS, preset="intel-1"),
    "pieces-functions-directories": _scene(
        claims(only=0),
        claims(only=1, at=2),
        divides(WHOLE),
        divides(_FUNCTIONS),
        mode=_FUNCTIONS,
        preset="intel-1",
        kill="AB",
    ),
    "pieces-nested": _scene(claims(**_OUTER), claims(**_INNER), claims(at=2), divides(_MIG), kill="A"),
    "pieces-nested-whole": _scene(
        claims(**_OUTER), claims(**_INNER), claims(at=2), divides(WHOLE), mode=_MIG, kill="A"
    ),
    "pieces-exec": _scene(claims(ends="by exec"), claims(at=2), divides(_MIG), kill="A"),
    "pieces-queue": _scene(
        claims(only=1),
        claims(only=0, **_PATIENT),
        claims(only=2, **_PATIENT),
        mode=_FUNCTIONS,
        preset="intel-1",
        kill="A",
        in_turn=True,
    ),
    "pieces-queue-divided": _scene(claims(), claims(**_PATIENT), claims(**_PATIENT), divides(_MIG), kill="B"),
    "pieces-apart": _scene(claims(), claims(), divides(_MIG), kill="A", apart=True),
    "pieces-unlocked": _scene(claims(), claims(), divides(WHOLE), divides(_MIG), mode=_MIG, kill="A", **_UNLOCKED),
    "pieces-unlocked-doors": _scene(claims(), claims(), divides(WHOLE), divides(_MIG), mode=_MIG, host_lock=False),
    "pieces-unlocked-share": _scene(claims(share=_SMALL), claims(), divides(_MIG), divides(WHOLE), **_UNLOCKED),
    "pieces-unlocked-modes": _scene(
        claims(), claims(), divides(_DPX), divides(_CPX), mode=_CPX, preset="amd-1", **_UNLOCKED
    ),
    # Entries alone; and host.lock keeps the order, and no GPU
    "apart": _scene(claims(), claims(), kill="A", apart=True, served=1),
    "apart-shares": _scene(claims(share=_BIG), claims(share=_SMALL), kill="A", apart=True, served=1),
    "apart-queue": _scene(claims(), claims(**_PATIENT), claims(**_PATIENT), kill="AB", apart=True, in_turn=True),
    "unlinked": _scene(unlinks(), claims(), claims(), kill="B", apart=True),
    "unlinked-queue": _scene(unlinks(), claims(), claims(**_PATIENT), kill="B", apart=True),
    "unlocked": _scene(claims(), claims(), kill="A", **_UNLOCKED),
    "unlocked-3": _scene(claims(), claims(), claims(), **_UNLOCKED),
    "unlocked-again": _scene(claims(times=2), claims(), claims(), kill="A", **_UNLOCKED),
    "unlocked-dead": _scene(claims(), claims(), claims(times=2), kill="A", **_UNLOCKED),
    "unlocked-waits": _scene(claims(times=2), claims(**_PATIENT), kill="A", **_UNLOCKED),
    "unlocked-shares": _scene(claims(share=_BIG), claims(share=_SMALL), claims(), kill="A", **_UNLOCKED),
    "unlocked-drain": _scene(drains(0), claims(), kill="B", **_UNLOCKED),
    "unlocked-nested": _scene(
        claims(**_OUTER), claims(**_INNER), claims(**_INNER), claims(), kill="A", deaths=_ANY, host_lock=False
    ),
}


_TICKET = re.compile(r"(rename|unlink) \d+/queue/(\d+)\.")
_CLAIM = re.compile(r"rename \d+/claims/")
_CLAIM_GONE = re.compile(r"unlink \d+/claims/")


class Referee:
    """Hears what racers say, in the order in which they say it, and knows nothing of entries.

    Attributes:
        faults: what must not be.
    """

    def __init__(self, scene: Scene) -> None:
        self.faults: list[str] = []
        self._scene = scene
        self._has: dict[str, tuple[list[int], int | None]] = {}
        self._served = 0
        self._drained: dict[int, set[str]] = {}
        self._empty: set[int] = set()  # GPUs that were found so after they were drained
        self._began: set[str] = set()
        self._turns: dict[str, float] = {}
        self._tickets: dict[str, tuple[float, int]] = {}  # turn and number, of who waits or has made an entry
        self._waiting: set[str] = set()
        self._waited: dict[str, tuple[str, ...]] = {}  # who waited when a racer made its entry: others join later
        self._stranger_since_wait: set[str] = set()  # racers that may have seen one
        self._strangers: set[str] = set()
        self._leaving: set[str] = set()  # who gives back, and has not done so
        self._disturbed = False

    def step(self, who: str, what: str) -> None:
        """Hear of a step of a racer."""
        self._began.add(who)
        if _CLAIM.match(what):
            self._waited[who] = tuple(sorted(self._waiting))
        if _CLAIM_GONE.match(what) and self._lost_its_place(who):
            self.faults.append(f"{who} gives its claim back, and has not made its ticket again")
        found = _TICKET.match(what)
        if found is None:
            return
        call, number = found[1], int(found[2])
        if call == "rename":
            self._joins(who, number)
        elif self._tickets.get(who, (0.0, 0))[1] == number:
            self._waiting.discard(who)

    def _joins(self, who: str, number: int) -> None:
        """Hear that a racer has a ticket: its first one since it began to wait, or at the place that it had."""
        place = self._turns.get(who, 0.0), number
        if self._scene.in_turn and place > self._tickets.get(who, place):
            self.faults.append(f"{who} comes back with ticket {number}, and had ticket {self._tickets[who][1]}")
        self._tickets[who] = place
        self._waiting.add(who)

    def _lost_its_place(self, who: str) -> bool:
        """Whether a racer waits, and others cannot see that. One that is interrupted gives up."""
        gives_up = who in self._has or who in self._leaving or self._disturbed or who in self._scene.interrupt
        return self._scene.in_turn and who in self._tickets and who not in self._waiting and not gives_up

    def stands(self, who: str) -> None:
        """Hear that a racer waits. What it saw before does not count any more."""
        if not self._strangers:
            self._stranger_since_wait.discard(who)

    def hear(self, who: str, what: str, *about: Any) -> None:
        """Hear what a racer says."""
        if what == "has":
            self._take(who, *about)
        elif what in ("gives back", "dies"):
            self._has.pop(who, None)
            self._leaving.add(who)
        elif what == "has given back":
            self._leaving.discard(who)
        elif what == "turn":
            self._turns[who] = about[0]
        elif what == "fails":
            self.faults.append(f"{who} fails: {about[0]}")
        elif what == "comes":
            self._strangers.add(who)
            self._stranger_since_wait = set(self._scene.plans)
        elif what == "goes":
            self._strangers.discard(who)
        elif what == "drains":
            self._drained |= {gpu: set(self._began) for gpu in about[0]}
        elif what == "empty":
            self._empty.add(*about)
        elif what == "undrains":
            self._drained.clear()
            self._empty.clear()
        if what in ("dies", "refused"):
            # What is half given back is taken, and whoever meets a stranger gives all back.
            met = "GpuContendedError" in about and who in self._stranger_since_wait
            self._disturbed |= what == "dies" or "KeyboardInterrupt" in about or met or bool(self._leaving)
            self._waiting.discard(who)
            self._tickets.pop(who, None)

    def _take(self, who: str, devices: list[Device], share: int | None) -> None:
        gpus = [device.card for device in devices]
        self._served += 1
        mine = self._tickets.pop(who, None)
        self._waiting.discard(who)
        if self._scene.in_turn and mine is not None and who not in self._stranger_since_wait:
            for other in self._waiting.intersection(self._waited.get(who, ())):
                if self._tickets[other] < mine:
                    self.faults.append(
                        f"{who} has GPU {gpus} before {other}, whose ticket is {self._tickets[other][1]}"
                    )
        self._has[who] = devices, share
        if limit := self._scene.limit:
            user = self._scene.user
            if sum(len(held) for one, (held, _) in self._has.items() if user(one) == user(who)) > limit:
                self.faults.append(f"{who} has GPU {gpus} beyond the limit of its user")
        for gpu in gpus:
            if gpu in self._drained and who not in self._drained[gpu]:
                self.faults.append(f"{who} gets GPU {gpu}, which was drained before it began")
            if gpu in self._empty:
                self.faults.append(f"{who} gets GPU {gpu}, which was drained and held by nobody")
            self._judge(gpu)

    def _judge(self, card: int) -> None:
        """Judge who has some of a card now."""
        holders = [one for one, (devices, _) in self._has.items() if card in [device.card for device in devices]]
        parts: list[Part] = []
        told: list[str] = []
        for one in holders:
            devices, share = self._has[one]
            for device in devices:
                if device.card == card:
                    is_inside = self._scene.plans[one].inside in holders
                    parts.append(Part(share, is_inside, device.piece, device.mode))
                    told.append(f"{one} has {_amount(device, share)} of it")
        what = booked_twice(parts, CAPACITY)
        if what:
            self.faults.append(f"GPU {card} is booked twice ({what}): {', '.join(told)}")

    def state(self) -> str:
        """Return what matters to its judgement of what is to come."""
        about = {name: value for name, value in vars(self).items() if name not in ("faults", "_scene")}
        return repr([(name, sorted(one) if isinstance(one, set) else one) for name, one in about.items()])

    def end(self) -> None:
        """Judge what all got."""
        if not self._disturbed and self._served < self._scene.served:
            self.faults.append(f"{self._served} claims got GPUs, and {self._scene.served} could have")


def _amount(device: Device, share: int | None) -> str:
    what = f"{device.piece} {device.mode}".rstrip() or "all"
    return f"{share / GIB:.0f} GiB of {what}" if share else what


def furnish(scene: Scene, base: str) -> None:
    """Make what the first claims on a host would make, so that all schedules find the same."""
    legacy.LOCK_FILE = os.path.join(base, "older", "lock")
    places = [f"{base}/{number}/{part}" for number in scene.directories for part in ("", *PARTS)]
    for place in (*places, os.path.dirname(legacy.LOCK_FILE)):
        os.mkdir(place)
        os.chmod(place, 0o1777)
    os.close(os.open(legacy.LOCK_FILE, os.O_CREAT | os.O_WRONLY))
    os.chmod(legacy.LOCK_FILE, 0o666)
    if scene.users:
        os.mkdir(f"{base}/etc")
        limit = f"[default]\nmax_gpus = {scene.limit}\n" if scene.limit else ""
        Path(base, "etc", "policy.ini").write_text(f"[host]\norder = fair\n{limit}")
    everything(scene, base)
    driver = SimulatedDriver(scene.host)
    with driver.occupy(driver.idle.gpus[0].uuid):
        pass  # the driver's own directories


def renew(scene: Scene, base: str) -> None:
    """Let the files be as before the first schedule."""
    for number in scene.directories:
        for part in PARTS:
            for entry in os.scandir(f"{base}/{number}/{part}"):
                os.unlink(entry.path)
        Path(base, str(number), "closed").unlink(missing_ok=True)
    for entry in (*os.scandir(f"{base}/simulated/{scene.host}"), *os.scandir(base)):
        if not entry.is_dir():
            os.unlink(entry.path)
    if scene.mode:
        scene.visit(base, scene.directories[0])
        driver = SimulatedDriver(scene.host)
        driver.divide(driver.idle.gpus[0].whole, scene.mode)


def everything(scene: Scene, base: str) -> list[str]:
    """Claim all GPUs, whole, in each state directory, one after the other. Returns what is wrong."""
    found = []
    for path in Path(base, "simulated").glob("*/*.mode"):
        path.unlink()
    for number in scene.directories:
        Path(base, str(number), "closed").unlink(missing_ok=True)
        scene.visit(base, number)
        try:
            safe_gpu.GPUOwner(scene.gpus, safe_gpu.NoPlaceholder(), timeout=0, affinity=None).release_gpus()
        except safe_gpu.SafeGpuError as err:
            found.append(f"afterwards not all can be claimed in directory {number}: {err}")
        found += [f"left: {path}" for path in left_behind(f"{base}/{number}")]
    return found
