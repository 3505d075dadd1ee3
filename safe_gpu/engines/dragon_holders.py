"""Holders in processes of a Dragon runtime."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, Timer
from typing import Any

from ..errors import HolderLostError
from ..host import procfs
from .holder import ClaimArguments, HolderProcess
from .order import Holder

_PAUSE = 0.005

_IDLE_PAUSE = 0.02

# Seconds between two checks whether the driver, or the holder, is alive. The pause is longer if there are many holders,
# because all of them ask Dragon.
_LIFE_SIGN = 0.5

_LIFE_SIGNS_PER_SECOND = 200

_PARENT_SIGN = 0.1

# Seconds that the driver waits for a holder which is still starting and must end, and that a holder waits for Dragon's
# clean-up before it exits.
_FAREWELL = 10.0


def start_holders(nodes: Sequence[Any], wishes: ClaimArguments) -> list[DragonHolder]:
    """Start a holder on each of these nodes.

    The requests to Dragon are sequential and take some tens of milliseconds each. The Python interpreters of all
    holders start in parallel.

    Raises:
        HolderLostError: Dragon could not start a holder. All holders have been ended.
    """
    sign = max(_LIFE_SIGN, len(nodes) / _LIFE_SIGNS_PER_SECOND)
    holders: list[DragonHolder] = []
    try:
        for node in nodes:
            holder = DragonHolder(node, wishes, sign)
            holders.append(holder)
            holder.start()
    except BaseException:
        for holder in holders:
            holder.end()
        raise
    return holders


class _Answers:
    """The one queue into which all holders of this process put their messages, and the messages not taken yet."""

    def __init__(self) -> None:
        from dragon.native.queue import Queue

        self.queue = Queue()
        self._lock = Lock()
        self._kept: dict[int, list[tuple[str, Any]]] = {}

    def take(self, number: int) -> tuple[str, Any] | None:
        """Return the next message of a holder, or None: ("ready", its request queue) or ("answer", a method's
        result)."""
        with self._lock:
            try:
                sender, message = self.queue.get(timeout=0)
            except Empty:
                pass
            else:
                self._kept.setdefault(sender, []).append(message)
            kept = self._kept.get(number)
            return kept.pop(0) if kept else None


# One queue for all claims of a process: a Dragon queue takes much memory and time to create.
_answers: _Answers | None = None

_numbers = count(1)


class DragonHolder(Holder):
    """A :class:`~safe_gpu.engines.order.Holder` in a process of its own."""

    def __init__(self, node: Any, wishes: ClaimArguments, sign: float) -> None:
        from dragon.infrastructure.policy import Policy
        from dragon.native.process import Process, current

        global _answers
        if _answers is None:
            _answers = _Answers()
        self._answers = _answers
        self.node = node
        self.host: str = node.hostname
        self.node_id = str(node.h_uid)
        self._number = next(_numbers)
        self._sign = sign
        self._requests: Any = None
        self._asked: list[tuple[str, tuple[Any, ...]]] = []
        self._started = False
        # By these a process of this node can tell whether this one is alive.
        this_process = (os.uname().nodename, os.getpid(), procfs.start_time(os.getpid()))
        label = f"dragon: claim of process {os.getpid()} on {os.uname().nodename}"
        self._process = Process(
            target=_serve,
            args=(self._number, wishes, label, self._answers.queue, current().puid, this_process, sign),
            # With this order the numbers in the CUDA_VISIBLE_DEVICES that Dragon sets are those of nvidia-smi.
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            policy=Policy(placement=Policy.Placement.HOST_NAME, host_name=self.host),
        )

    def start(self) -> None:
        try:
            self._process.start()
        except Exception as err:
            raise HolderLostError(f"{self.host}: Dragon could not start a holder there: {err}", host=self.host) from err
        self._started = True

    def call(self, method: str, *arguments: Any) -> None:
        if self._requests is None:  # it is still starting
            self._asked.append((method, arguments))
        else:
            self._requests.put((method, arguments))

    def answer(self, limit: float | None) -> Any:
        began = asked = time.monotonic()
        while True:
            message = self._answers.take(self._number)
            if message is not None and message[0] == "answer":
                return message[1]
            if message is not None:
                self._connect(message[1])
            now = time.monotonic()
            if limit is not None and now - began > limit:
                raise self.is_mute(limit)
            if now - asked > self._sign:
                asked = now
                self._check_alive()
            time.sleep(_PAUSE)

    def _connect(self, requests: Any) -> None:
        self._requests = requests
        for request in self._asked:
            requests.put(request)
        self._asked = []

    def _check_alive(self) -> None:
        try:
            alive = self._process.is_alive
        except Exception:
            alive = False
        if not alive:
            raise self.exited()

    def end(self) -> None:
        if not self._started:
            return
        self._started = False
        try:
            self.call("end")
            deadline = time.monotonic() + _FAREWELL
            while self._requests is None and time.monotonic() < deadline:  # it is still starting
                message = self._answers.take(self._number)
                if message is not None and message[0] == "ready":
                    self._connect(message[1])
                time.sleep(_PAUSE)
            self._requests = None
        except Exception:
            pass  # the holder or Dragon has exited


def _serve(
    number: int,
    wishes: ClaimArguments,
    label: str,
    answers: Any,
    driver: int,
    process: tuple[str, int, int | None],
    sign: float,
) -> None:
    """Run a holder process. ``driver`` is Dragon's number of the ``process`` that started it."""
    from dragon.native.queue import Queue

    Thread(target=_end_with_processes, args=process, daemon=True).start()
    holder = HolderProcess(wishes, label)
    requests = Queue(maxsize=16)
    todo: SimpleQueue[tuple[str, tuple[Any, ...]]] = SimpleQueue()
    idle, over = Event(), Event()
    idle.set()
    answers.put((number, ("ready", requests)))
    Thread(target=_listen, args=(requests, todo, idle), daemon=True).start()
    watch = Thread(target=_end_with_driver, args=(driver, sign, over), daemon=True)
    watch.start()  # from now on only this thread may call Dragon's global services
    while True:
        method, arguments = todo.get()
        if method == "end":
            break
        answer = getattr(holder, method)(*arguments)
        idle.set()
        answers.put((number, ("answer", answer)))
    holder.release()
    goodbye = Timer(_FAREWELL, os._exit, (0,))
    goodbye.daemon = True
    goodbye.start()
    over.set()
    watch.join()


def _listen(requests: Any, todo: SimpleQueue[tuple[str, tuple[Any, ...]]], idle: Event) -> None:
    """Take requests in a thread, so that a request to end reaches a holder that waits for GPUs."""
    while True:
        try:
            request = requests.get(timeout=0)
        except Empty:
            time.sleep(_IDLE_PAUSE)
            continue
        if request[0] == "end" and not idle.is_set():
            os._exit(0)
        if request[0] != "end":
            idle.clear()
        todo.put(request)
        if request[0] == "end":
            return


def _end_with_processes(node: str, pid: int, start: int | None) -> None:
    """Exit when the parent has ended, or the driver if it is a process of this node."""
    is_here = node == os.uname().nodename and start is not None and procfs.start_time(pid) == start
    parent = os.getppid()
    while os.getppid() == parent and not (is_here and procfs.has_ended(pid)):
        time.sleep(_PARENT_SIGN)
    os._exit(0)


def _end_with_driver(driver: int, sign: float, over: Event) -> None:
    from dragon.native.process import Process

    try:
        process = Process(None, ident=driver)
        while process.is_alive:
            if over.wait(sign):
                return
    except Exception:
        pass  # Dragon has exited
    os._exit(0)
