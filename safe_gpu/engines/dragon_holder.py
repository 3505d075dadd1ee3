"""Holders in processes of a Dragon runtime, both ends: what starts and asks them, and what runs in them.

Dragon's own waits spin, so both ends look, sleep and look again. A holder makes its request queue itself, where it is,
and all holders answer into one queue of the driver's: a look at a queue of the own node costs 0.2 ms, one across the
network several.

The holder must not outlive its driver, however that ends. It asks Dragon now and then whether the driver is alive. (To
have Dragon answer when the driver ends would be cheaper, but Dragon 0.14's global services break when the one who
waits ends first.) It also watches its parent, the node's local services, for the case that Dragon itself is gone.

No two threads of ours ask Dragon's global services at the same time: in 0.14 and 0.15 the one that gets its reply wakes
the other just before it lets go of the lock that the other tries once, and on a busy host that one then waits for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from queue import Empty
from threading import Lock, Thread
from typing import Any

from ..errors import HolderLostError
from .holder import Holder, Wishes

__all__ = ["DragonHolder", "start_holders"]

_PAUSE = 0.005
_IDLE_PAUSE = 0.02
# Seconds between two questions whether the driver, or the holder, is alive; longer for many holders, who all ask.
_LIFE_SIGN = 0.5
_LIFE_SIGNS_PER_SECOND = 200
_PARENT_SIGN = 0.1


def start_holders(nodes: Sequence[Any], wishes: Wishes) -> list[DragonHolder]:
    """A holder on each of these nodes.

    Dragon is asked for one after the other, some tens of milliseconds each, and Python starts on all of them meanwhile.

    Raises:
        HolderLostError: Dragon refused; none is left.
    """
    from dragon.native.queue import Queue

    answers = _Answers(Queue())
    sign = max(_LIFE_SIGN, len(nodes) / _LIFE_SIGNS_PER_SECOND)
    holders: list[DragonHolder] = []
    try:
        for node in nodes:
            holder = DragonHolder(node, wishes, answers, sign)
            holders.append(holder)
            holder.start()
    except BaseException:
        for holder in holders:
            holder.end()
        raise
    return holders


class _Answers:
    """What holders put into the driver's queue, kept for whoever asks for it."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self._lock = Lock()
        self._kept: dict[str, list[Any]] = {}

    def take(self, node_id: str) -> list[Any]:
        """The next message of that node's holder, or []."""
        with self._lock:
            try:
                sender, message = self.queue.get(timeout=0)
            except Empty:
                pass
            else:
                self._kept.setdefault(sender, []).append(message)
            kept = self._kept.get(node_id)
            return [kept.pop(0)] if kept else []


class DragonHolder:
    """A :class:`~safe_gpu.engines.remote.RemoteHolder` in a process of its own."""

    def __init__(self, node: Any, wishes: Wishes, answers: _Answers, sign: float) -> None:
        from dragon.infrastructure.policy import Policy
        from dragon.native.process import Process, current

        self.node = node
        self.host: str = node.hostname
        self.node_id = str(node.h_uid)
        self._answers = answers
        self._sign = sign
        self._requests: Any = None
        self._asked: list[tuple[str, tuple[Any, ...]]] = []
        self._started = False
        label = f"dragon: claim of process {os.getpid()} on {os.uname().nodename}"
        self._process = Process(
            target=_serve,
            args=(self.node_id, wishes, label, answers.queue, current().puid, sign),
            # The numbers in the CUDA_VISIBLE_DEVICES that Dragon sets there are nvidia-smi's.
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            policy=Policy(placement=Policy.Placement.HOST_NAME, host_name=self.host),
        )

    def start(self) -> None:
        try:
            self._process.start()
        except Exception as err:
            raise HolderLostError(f"{self.host}: Dragon starts no holder there: {err}", host=self.host) from err
        self._started = True

    def call(self, method: str, *arguments: Any) -> None:
        if self._requests is None:  # it is still starting
            self._asked.append((method, arguments))
        else:
            self._requests.put((method, arguments))

    def answer(self, limit: float | None) -> Any:
        began = asked = time.monotonic()
        while True:
            for kind, content in self._answers.take(self.node_id):
                if kind == "answer":
                    return content
                self._requests = content
                for request in self._asked:
                    self._requests.put(request)
                self._asked = []
            now = time.monotonic()
            if limit is not None and now - began > limit:
                raise HolderLostError(
                    f"{self.host}: the holder does not answer within {limit:g} s; is the node overloaded or cut off?",
                    host=self.host,
                )
            if now - asked > self._sign:
                asked = now
                self._check_alive()
            time.sleep(_PAUSE)

    def _check_alive(self) -> None:
        try:
            alive = self._process.is_alive
        except Exception:
            alive = False
        if not alive:
            raise HolderLostError(
                f"{self.host}: the process that held the GPUs there is gone, another may have taken them: claim again",
                host=self.host,
            )

    def end(self) -> None:
        if self._started:
            self._started = False
            try:
                self._process.kill()
            except Exception:
                pass  # it has ended, or Dragon has


def _serve(node_id: str, wishes: Wishes, label: str, answers: Any, driver: int, sign: float) -> None:
    """The life of a holder."""
    from dragon.native.queue import Queue

    Thread(target=_end_with_parent, daemon=True).start()
    holder = Holder(wishes, label)
    requests = Queue()
    answers.put((node_id, ("ready", requests)))
    Thread(target=_end_with_driver, args=(driver, sign), daemon=True).start()  # from here it alone asks Dragon
    while True:
        try:
            method, arguments = requests.get(timeout=0)
        except Empty:
            time.sleep(_IDLE_PAUSE)
        else:
            answers.put((node_id, ("answer", getattr(holder, method)(*arguments))))


def _end_with_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_PARENT_SIGN)
    os._exit(0)


def _end_with_driver(driver: int, sign: float) -> None:
    from dragon.native.process import Process

    try:
        process = Process(None, ident=driver)
        while process.is_alive:
            time.sleep(sign)
    finally:  # dead, or nobody left to ask
        os._exit(0)
