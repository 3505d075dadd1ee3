"""A claim from its first step to its end, whatever ends it: the order of its steps, what it leaves, what it logs."""

import fcntl
import gc
import itertools
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.claims import claim, try_claim
from support.forks import json_from_child
from support.guard import is_locked

import safe_gpu
from safe_gpu import GPUAffinityError, GPUOwner, NotEnoughGpusError, claim_gpus


def claim_two(spies: Any, **arguments: Any) -> Any:
    usual = {"debug_sleep": spies.PAUSE, "timeout": 0, "affinity": "node"}
    return safe_gpu.claim_gpus(2, spies.placeholder, **{**usual, **arguments})


def test_the_steps_come_in_the_order_of_the_protocol(host: Any, spies: Any) -> None:
    seen: list[str | None] = []
    host.on_poll = lambda number: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    owner = claim_two(spies)
    visible = ",".join(map(str, owner.devices_taken))
    assert seen == [None, None, visible], "the environment is set after the second poll and not before"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert ", ".join(host.events) == (
        "options, prepare, poll, visible_limit, host.lock, door, door, entry, unlock, legacy lock, usage, "
        f"sleep, CUDA_VISIBLE_DEVICES={visible}, placeholder 0, placeholder 1, verify, usage, legacy release, "
        "bind, bound, close"
    )
    host.events.clear()
    safe_gpu.release_gpus()
    assert host.events == ["placeholder released"] * 2


@pytest.mark.parametrize(
    ("visible", "only", "expected"),
    [
        (None, "3,1,2", [3, 1, 2]),
        (None, (2, 1, 3), [2, 1, 3]),
        (None, "1-3", [1, 2, 3]),
        (None, "3,1-2", [3, 1, 2]),
        ("3,1,2", (), [3, 1, 2]),
        ("3,1,2", "2,3,1", [2, 3, 1]),
        ("3,1,2", "0-7", [1, 2, 3]),
    ],
)
def test_gpus_are_numbered_in_the_order_of_a_list(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, only: Any, expected: list[int]
) -> None:
    """That of ``only``, else that of the variable; a range is in index order."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with claim(3, only=only) as owner:
        assert [gpu.index for gpu in owner.gpus] == owner.devices_taken == expected
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, expected))


def test_which_gpus_are_best_does_not_depend_on_the_order_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    with claim(2) as owner:
        best = owner.devices_taken
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    with claim(2) as owner:
        assert owner.devices_taken == best[::-1]
        monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    with claim(2) as owner:
        assert owner.devices_taken == best, "the variable is disregarded, with its order"


class Boom(BaseException):
    """Not an Exception: like KeyboardInterrupt, it passes every handler that does not clean up."""


@pytest.mark.parametrize("kind", [Boom, OSError, safe_gpu.NoDriverError])
def test_a_failure_at_any_step_leaves_nothing(host, spies, untouched, kind: type[BaseException]) -> None:
    claim_two(spies, delegate=True)
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
                claim_two(spies, delegate=True)
            assert f"at {step}" in f"{caught.value} {caught.value.__cause__}"
            host.on_event = lambda event: None
            assert not spies.legacy_held, host.events
        placed = [event for event in host.events[:failing] if event in ("placeholder 0", "placeholder 1")]
        assert host.events.count("placeholder released") == len(placed), host.events
    claim_two(spies)


def test_a_logger_that_fails_at_any_line_leaves_nothing(host: Any, spies: Any, untouched: Callable[[], Any]) -> None:
    logger = logging.Logger("breaking", logging.INFO)
    for number in itertools.count():
        lines = itertools.count()

        def handle(record: logging.LogRecord, lines: Any = lines, number: int = number) -> None:
            if next(lines) >= number and "Releasing" not in record.getMessage():
                raise Boom(record.getMessage())

        logger.handle = handle  # type: ignore[method-assign]
        with untouched():
            try:
                claim_two(spies, logger=logger)
            except Boom:
                continue
            assert number > 5
            safe_gpu.release_gpus()
            break


@pytest.mark.parametrize("trouble", [KeyboardInterrupt, RuntimeError])
def test_a_release_that_is_interrupted_or_fails_goes_on(host, spies, untouched, monkeypatch, caplog, trouble) -> None:
    """A placeholder that cannot be released is told, and an interrupt reaches the program."""
    genuine = spies.placeholder.release

    def failing(thing: Any) -> None:
        genuine(thing)
        raise trouble("context is corrupt")

    with untouched():
        owner = claim_two(spies)
        monkeypatch.setattr(spies.placeholder, "release", failing)
        with pytest.raises(trouble) if trouble is KeyboardInterrupt else nullcontext():
            owner.release_gpus()
        assert host.events.count("placeholder released") == 2
    assert caplog.text.count("context is corrupt") == 2 * (trouble is RuntimeError)


def test_the_environment_of_before_comes_back(spies, untouched, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("SAFE_GPU_SCOPE", "stale")
    with untouched():
        owner = claim_two(spies, delegate=True)
        assert os.environ["SAFE_GPU_SCOPE"] not in ("stale", "")
        assert set(owner.devices_taken) < {0, 1, 2, 3}
        safe_gpu.release_gpus()
    claim_two(spies)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    safe_gpu.release_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7", "what the program set since stays as it set it"


# What a look takes and reads: nothing slow under host.lock


def test_a_process_is_looked_up_once_and_never_under_host_lock(
    host, join_queue, cleanup: ExitStack, monkeypatch
) -> None:
    """Others wait for host.lock. The waiter ahead is judged too: it wants what the stranger has, and is passed. Whose
    process it is, a directory service may have to say, and only who is refused is told."""
    cleanup.enter_context(host.stranger(0))
    join_queue(8)
    looked_up, command_of, user_of = [], api.procfs.command_of, Mock(return_value="anna")

    def look_up(pid: int) -> Any:
        looked_up.append((pid, is_locked(Path(os.environ["SAFE_GPU_DIR"], "host.lock"))))
        return command_of(pid)

    monkeypatch.setattr(api.procfs, "command_of", look_up)
    monkeypatch.setattr(api.procfs, "user_of", user_of)
    assert try_claim(1) == (1,)
    assert (looked_up, user_of.called) == ([(host.stranger_pid, False)], False)
    assert (try_claim(8), user_of.called) == (None, True)


@pytest.mark.parametrize(("age", "polls"), [(0.5, 0), (2.0, 1)])
def test_who_passes_a_waiter_knows_the_host_of_this_second(age, polls, host, join_queue, cleanup, monkeypatch) -> None:
    """What blocks the waiter may have ended since the poll, and then it may not be passed."""
    cleanup.enter_context(host.stranger(7))
    assert try_claim(1) == (6,)
    usual = host.polls
    monkeypatch.setattr(api.view.Polls, "age", property(lambda self: age if host.polls == usual + 1 else 0.0))
    join_queue(8)
    assert try_claim(1) == (6,)
    assert host.polls == 2 * usual + polls


def test_an_interrupt_while_it_is_prepared_for_exec_leaves_all_of_a_claim_prepared(host, monkeypatch) -> None:
    """Else the command may hold a part of its GPUs."""
    genuine, kept = fcntl.fcntl, list[int]()

    def keep(fd: int, command: int, argument: Any = 0) -> Any:
        answer = genuine(fd, command, argument)
        if command == fcntl.F_DUPFD:
            kept.append(answer)
            if len(kept) == 1:
                signal.raise_signal(signal.SIGINT)
        return answer

    monkeypatch.setattr(fcntl, "fcntl", keep)
    with GPUOwner(2, timeout=0) as owner:
        with pytest.raises(KeyboardInterrupt):
            owner.keep_across_exec()
        assert [os.get_inheritable(fd) for fd in kept] == [True] * 4, "the entry, its directory, two doors"


def test_a_claim_withdraws_from_what_others_take_meanwhile(host, dgx, cleanup, untouched, monkeypatch) -> None:
    """As if somebody had removed host.lock: two claims see each other."""
    make_entry = api.Claim.make_entry
    held: list[api.Held] = []

    def claim_too() -> None:
        if not held:
            directory = cleanup.enter_context(api.Directory(str(dgx.state_dir), "claims"))
            held.append(api.make_entry(directory, 99, {"gpus": {host.uuids[0]: None}}, by_children=False)[1])

    def drain(number: int) -> None:
        lines = (f"{uuid} - - - a fan is broken\n" for uuid in host.uuids[:number])
        (dgx.state_dir / "closed").write_text("".join(lines))

    def while_it_claims(act: Callable[[], None]) -> None:
        def make_entry_and_act(taken: api.Claim, *arguments: Any, **more: Any) -> None:
            make_entry(taken, *arguments, **more)
            act()

        monkeypatch.setattr(api.Claim, "make_entry", make_entry_and_act)

    while_it_claims(claim_too)
    assert try_claim(1) == (1,)
    held[0].release()
    assert try_claim(1) == (0,)
    while_it_claims(lambda: drain(2))
    assert try_claim(2) == (2, 3)
    while_it_claims(lambda: drain(8))
    with untouched(), pytest.raises(NotEnoughGpusError, match="a fan is broken"), claim(1):
        pass


# How long it lives: release, with, garbage collection, exit, kill, forked children, other threads


CLAIM = "import os, safe_gpu\nowner = safe_gpu.claim_gpus(2, timeout=0)\nsay(*owner.devices_taken)\n"
OTHERS = [str(index) for index in range(2, 8)]
ALL = [str(index) for index in range(8)]


def test_release_ends_it_and_may_be_said_twice_and_so_does_the_end_of_with(host: Any, untouched: Any) -> None:
    with untouched():
        owner = safe_gpu.claim_gpus(2, timeout=0)
        assert safe_gpu.gpu_owner is owner
        assert safe_gpu.get_free_gpus() == OTHERS
        for release in (owner.release_gpus, owner.release_gpus, safe_gpu.release_gpus):
            release()
        assert (owner.devices_taken, safe_gpu.gpu_owner) == ([], None)
        with suppress(ZeroDivisionError), GPUOwner(3, timeout=0):
            assert safe_gpu.gpu_owner is None, "only claim_gpus() has an implicit owner"
            raise ZeroDivisionError
    assert safe_gpu.get_free_gpus() == ALL


def test_a_dropped_owner_lets_go_of_nothing(host: Any) -> None:
    GPUOwner(2, timeout=0)
    gc.collect()
    assert safe_gpu.get_free_gpus() == OTHERS
    safe_gpu.release_gpus()
    assert safe_gpu.get_free_gpus() == ALL


LEAVE_A_PROGRAM = """
import subprocess
left = subprocess.Popen(["sleep", "20"], stdin=-3, stdout=-3, stderr=-3, close_fds=False)  # it inherits no claim
say(left.pid)
os._exit(5)
"""
ENDS = ["sys.exit(3)", LEAVE_A_PROGRAM, "1 / 0", signal.SIGTERM, signal.SIGKILL, signal.SIGINT]


@pytest.mark.parametrize("end", ENDS, ids=["exit", "leaves a program", "error", "TERM", "KILL", "INT"])
def test_any_end_of_the_process_frees_its_gpus(child: Any, eventually: Any, end: str | int) -> None:
    process = child(f"{CLAIM}listen()\n{end if isinstance(end, str) else ''}\n")
    assert process.hear() == "0 1"
    assert safe_gpu.get_free_gpus() == OTHERS

    def ended() -> bool:
        if not isinstance(end, str):
            process.process.send_signal(end)  # again, since Python may miss one just before its read(2) blocks
        return process.process.poll() is not None

    if isinstance(end, str):
        process.tell()
    if end == LEAVE_A_PROGRAM:
        left = int(process.hear())
    eventually(ended)
    assert safe_gpu.get_free_gpus() == ALL
    if end == LEAVE_A_PROGRAM:
        os.kill(left, signal.SIGKILL)


def test_an_affinity_that_cannot_be_had_fails_only_claims_that_ask_for_it(host, untouched, monkeypatch, caplog) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise GPUAffinityError("the CPUs are not to be had")

    monkeypatch.setattr("safe_gpu.affinity.binding.bind_process", refuse)
    with untouched():
        with GPUOwner(1, timeout=0) as owner:
            assert (owner.cpus, owner.binding) == (set(), None)
        assert "the CPUs are not to be had" in caplog.text
        for arguments in ({"affinity": "node"}, {"memory": "preferred"}):
            with pytest.raises(GPUAffinityError):
                GPUOwner(1, timeout=0, **arguments)


def test_a_second_claim_while_another_thread_is_at_it_is_refused(host: Any) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        if number == 2:
            begun.set()
            assert go.wait(30)

    host.on_poll = wait
    thread = threading.Thread(target=safe_gpu.claim_gpus, args=(2,))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(safe_gpu.AlreadyClaimedError, match="another thread of this process is claiming") as caught:
        safe_gpu.claim_gpus(1, timeout=0)
    assert caught.value.devices == ()
    go.set()
    thread.join(30)
    with pytest.raises(safe_gpu.AlreadyClaimedError, match=r"holds GPU 0,1 already: release_gpus\(\) first") as caught:
        GPUOwner(1, timeout=0)
    assert caught.value.devices == (0, 1)


def test_a_forked_child_frees_nothing_and_leaves_the_placeholders_alone(host: Any, spies: Any) -> None:
    owner = claim_two(spies)
    environment = dict(os.environ)

    def work() -> list[object]:
        safe_gpu.release_gpus()
        owner.release_gpus()
        released = host.events.count("placeholder released")
        return [safe_gpu.gpu_owner is None, safe_gpu.get_free_gpus(), dict(os.environ) == environment, released]

    assert json_from_child(work) == [True, OTHERS, True, 0]
    assert safe_gpu.get_free_gpus() == OTHERS
    assert owner.devices_taken == [0, 1]
    owner.release_gpus()
    assert host.events.count("placeholder released") == 2


def test_a_forked_child_that_claims_its_parents_gpus_is_told_so(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    safe_gpu.claim_gpus(2, timeout=0)
    name, message, _ = json_from_child(lambda: safe_gpu.claim_gpus(1, timeout=None).devices_taken)
    assert (name, "delegate=True" in message) == ("NotEnoughGpusError", True)
    assert f"process {os.getpid()}, a parent of this one, holds GPU 0,1" in message
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    assert json_from_child(lambda: safe_gpu.claim_gpus(6, timeout=0).devices_taken) == [2, 3, 4, 5, 6, 7]


def test_a_process_of_another_container_with_our_parents_number_is_not_our_parent(host: Any, dgx: Any) -> None:
    # Containers that share the state directory number their processes alike: most have a process 1.
    dgx.hold(*range(8), pid=os.getpid(), start=1)
    told: list[Any] = []

    def on_wait(status: Any) -> None:
        told.append(status)
        dgx.let_go()

    assert api.owner_type(on_wait=on_wait)(2, timeout=60).devices_taken == [0, 1]
    assert told


def test_claims_share_the_only_gpu_where_a_display_is_on_it(child: Any, host_of: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    host_of("laptop")
    code = "import safe_gpu\nsay(safe_gpu.claim_gpus(timeout=0).devices_taken)\nlisten()"
    child(code, says="[0]")
    assert safe_gpu.get_free_gpus() == ["0"]
    with safe_gpu.claim_gpus(timeout=0, delegate=True) as owner:
        assert owner.devices_taken == [0]
        for inside in [child(code) for _ in range(2)]:
            assert inside.hear() == "[0]"
    assert caplog.text.count("Running on a machine with single GPU used for actual display") == 1
    with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="only 1"):
        safe_gpu.claim_gpus(2, timeout=0)


def test_the_entry_and_the_owner_say_who_holds_which_gpus(dgx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "4711", "SGE_TASK_ID": "3", "SGE_ROOT": "/opt/sge"}.items():
        monkeypatch.setenv(name, value)
    with claim(3) as owner:
        (entry,) = dgx.claims()
        assert (entry.pid, entry.uid, entry.job, entry.token) == (os.getpid(), os.geteuid(), "sge:4711.3", "")
        assert entry.gpus == {gpu.uuid: None for gpu in owner.gpus}
        told = f"<GPUOwner: GPU 0-2 (NVIDIA A100-SXM4-80GB), held by process {os.getpid()}>"
        assert json_from_child(lambda: repr(owner)) == told


# The logger ``safe_gpu``: silent unless asked, one line a step, and the same facts as data


def test_a_bare_script_hears_nothing(child) -> None:
    one = child("""
import safe_gpu
with safe_gpu.GPUOwner(2) as owner: pass
for arguments in {}, {"timeout": 0}, {"nb_gpus": 8}, {"affinity": "socket"}, {"memory": "preferred"}:
    safe_gpu.claim_gpus(**arguments)
    say(safe_gpu.get_free_gpus())
    safe_gpu.release_gpus()
""")
    out, err = one.process.communicate(timeout=60)
    assert (one.process.returncode, len(out.splitlines()), err) == (0, 5, "")


def test_a_bare_script_that_waits_longer_hears_it_once(child, dgx) -> None:
    code = "from safe_gpu.claim import report; report.WARNING_DELAY = 0.01"
    code += "; import safe_gpu; safe_gpu.claim_gpus(timeout=None); say('has')"
    dgx.hold(*range(8))
    head = child(code)
    user = re.escape(api.procfs.user_name(os.geteuid()))
    holders = rf"(?:; GPU [\d-]+: {user} \(pid \d+\) for \d+ s)+"  # one for each age in whole seconds
    said = rf"safe_gpu: waiting for 1 GPU \(0 free\){holders}\n"
    assert re.fullmatch(said, head.process.stderr.readline())
    who = rf"{user} \(pid {head.process.pid}, wants 1 GPU, queued for \d+ s\)"
    behind = child(code)
    said = rf"safe_gpu: waiting for 1 GPU; behind {who}\n"
    assert re.fullmatch(said, behind.process.stderr.readline())
    dgx.let_go()
    for one in (head, behind):
        assert one.process.communicate(timeout=60) == ("has\n", "")


@pytest.mark.parametrize(("configured", "sender"), [("", "safe_gpu: "), ("logging.basicConfig()", "WARNING:safe_gpu:")])
def test_every_warning_names_its_sender_once(child, configured: str, sender: str) -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1", "SAFE_GPU_TIMOUT": "5"}
    code = f"import logging; {configured}\nfrom safe_gpu import *\nbind(9, strict=False); claim_gpus(2)"
    lines = child(code, env=environment).process.communicate(timeout=60)[1].splitlines()
    assert all(line.startswith(sender) and line.count("safe_gpu: ") == (not configured) for line in lines)
    assert len(lines) == 3


def test_one_line_a_step_and_the_same_facts_as_data(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    with claim_gpus(2, affinity=None, delegate=True) as owner:
        uuids, token = [gpu.uuid for gpu in owner.gpus], os.environ["SAFE_GPU_SCOPE"]
    lines = {record.getMessage(): record for record in caplog.records}
    leased, assigned = f"Leased GPU 0,1 ({', '.join(uuids)}) (simulated)", "Set CUDA_VISIBLE_DEVICES=0,1"
    steps = ["acquiring lock", "lock acquired", "lock released", leased, assigned, "Placeholder holds GPU 0,1"]
    assert list(lines) == [*steps, *(f"Releasing placeholder on CUDA device: {number}" for number in range(2))]
    assert (lines[leased].safe_gpu_uuids, lines[leased].safe_gpu_devices) == (uuids, [0, 1])
    variables = {"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "SAFE_GPU_SCOPE": token}
    assert lines[assigned].safe_gpu_environment == variables


def test_a_wait_is_told_with_its_data(join_queue, dgx, caplog: pytest.LogCaptureFixture) -> None:
    join_queue(8)
    dgx.hold(0)
    caplog.set_level(logging.INFO, "safe_gpu")
    with pytest.raises(NotEnoughGpusError):
        claim(1, timeout=0.5)
    (waiting,) = [record for record in caplog.records if record.getMessage().startswith("waiting for 1 GPU (")]
    assert "(7 free, kept for the claim ahead), #2 in the queue; behind " in waiting.getMessage()
    assert (waiting.safe_gpu_position, waiting.safe_gpu_free, waiting.safe_gpu_needed) == (2, 7, 1)
    assert (len(waiting.safe_gpu_verdicts), waiting.safe_gpu_ahead.nb_gpus) == (8, 8)
