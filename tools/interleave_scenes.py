"""What racers do in each scene, and what is expected of them."""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from interleave_racer import CONTENT, Racer

import safe_gpu
from safe_gpu.coordination import older_package as legacy
from safe_gpu.coordination import own_entry
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
        closes: whether it closes GPUs.
    """

    act: Act
    at: int = 1
    inside: str = ""
    after: str = ""
    closes: bool = False


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
    """What a device of the driver is."""
    cards = [card.gpu.whole for card in find_preset(host_of_racer()).cards]
    piece = ""
    if gpu.is_piece:
        piece = gpu.uuid
    return Device(cards.index(gpu.whole), piece, gpu.mode)


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
        ends: "by release" or "by exec".
        options: of the claim.
    """
    claimer = Claimer(
        nb_gpus,
        inside=inside,
        hold=hold,
        times=times,
        context=context,
        lingers=lingers,
        becomes_command=ends == "by exec",
        older=older,
        options={"timeout": 0, **options},
    )
    return Plan(claimer.act, at, inside, after or inside)


@dataclass
class Claimer:
    """What a racer does that claims; see :func:`claims`."""

    nb_gpus: int
    inside: str
    hold: float
    times: int
    context: bool
    lingers: float
    becomes_command: bool
    older: bool
    options: dict[str, Any]

    def act(self, racer: Racer) -> None:
        """Claim, hold and give back, as often as it is to."""
        os.environ["SAFE_GPU_LEGACY_LOCK"] = "auto" if self.older else "never"
        if self.inside:
            os.environ["SAFE_GPU_SCOPE"] = _scope_of(racer.base, self.inside)
        for _ in range(self.times):
            owner = self._claim(racer)
            if owner is not None:
                self._use(racer, owner)

    def _claim(self, racer: Racer) -> safe_gpu.GPUOwner | None:
        """Claim; None if that was refused or interrupted."""
        placeholder = None if self.context else safe_gpu.NoPlaceholder()
        try:
            return safe_gpu.GPUOwner(self.nb_gpus, placeholder, affinity=None, **self.options)
        except (safe_gpu.SafeGpuError, KeyboardInterrupt) as err:
            racer.say("refused", type(err).__name__)
            return None

    def _use(self, racer: Racer, owner: safe_gpu.GPUOwner) -> None:
        """Hold what was claimed, and give it back."""
        if self.options.get("delegate"):
            Path(racer.base, f"scope-{racer.name}").write_text(os.environ["SAFE_GPU_SCOPE"])
        devices = [device_of(gpu) for gpu in owner.gpus]
        racer.say("has", devices, owner.share)
        kept = None
        if self.lingers:
            kept = simulated_driver().occupy(owner.gpus[0].uuid)
        try:
            if self.becomes_command:
                owner.keep_across_exec()
                racer.exec()
            time.sleep(self.hold)
            racer.say("gives back")
            if self.becomes_command:
                racer.die()
            owner.release_gpus()
        except KeyboardInterrupt:
            racer.say("gives back")
            owner.release_gpus()
        racer.say("has given back")
        if kept is not None:
            stay(racer, kept, devices[:1], self.lingers)


def host_of_racer() -> str:
    """The name of the simulated host on which this racer is."""
    return os.environ["SAFE_GPU_DRIVER"].partition(":")[2]


def simulated_driver() -> SimulatedDriver:
    """The driver of a racer's host."""
    return SimulatedDriver(host_of_racer())


def stay(racer: Racer, context: SimulatedContext, devices: list[Any], seconds: float) -> None:
    """Be on a GPU without a claim."""
    racer.say("comes", devices)
    time.sleep(seconds)
    context.close()
    racer.say("goes")


def _scope_of(base: str, racer: str) -> str:
    """What the claim of a racer passes on to its children; before it has claimed, what names no claim."""
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
            context = None
            if free:
                context = driver.occupy(free[0].uuid)
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

    return Plan(act, closes=True)


def divides(*modes: str, hold: float = 0.02) -> Plan:
    """An administrator who divides the first card otherwise, whoever uses it."""

    def act(racer: Racer) -> None:
        driver = simulated_driver()
        card = driver.idle.gpus[0].whole
        label = f"tree/{host_of_racer()}/{card}.mode"
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
        uid = _FIRST_USER + ord(self.user(racer.name))
        os.setresuid(uid, uid, uid)

    @property
    def host(self) -> str:
        """The simulated host."""
        return self.preset or f"gpus-{self.gpus}"

    @property
    def closes(self) -> bool:
        """Whether somebody closes GPUs."""
        return any(plan.closes for plan in self.plans.values())

    @property
    def directories(self) -> list[int]:
        """The numbers of the state directories."""
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
