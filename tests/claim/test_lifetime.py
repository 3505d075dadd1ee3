"""How long a claim lives: release, with, garbage collection, exit, kill, forked children, other threads."""

import gc
import os
import signal
import threading
import weakref
from contextlib import suppress
from typing import Any

import pytest
from support.forks import in_fork

import safe_gpu
from safe_gpu import GPUOwner
from safe_gpu.claim.owner import owner_type
from safe_gpu.errors import AlreadyClaimedError, GPUAffinityError, UnsatisfiableRequestError

CLAIM = "import os, safe_gpu\nowner = safe_gpu.claim_gpus(2, timeout=0)\nsay(*owner.devices_taken)\n"
OTHERS = [str(index) for index in range(2, 8)]
ALL = [str(index) for index in range(8)]


# The ordinary ends


def test_release_ends_it_and_may_be_said_twice(host: Any, untouched: Any) -> None:
    with untouched():
        owner = safe_gpu.claim_gpus(2, timeout=0)
        assert safe_gpu.get_free_gpus() == OTHERS
        owner.release_gpus()
        owner.release_gpus()
        safe_gpu.release_gpus()
        assert (owner.devices_taken, owner.gpus, owner.placeholders, owner.cpus) == ([], (), [], set())
    assert safe_gpu.get_free_gpus() == ALL


def test_the_end_of_with_ends_it_whatever_happens_inside(host: Any, untouched: Any) -> None:
    with untouched():
        with suppress(ZeroDivisionError), GPUOwner(3, timeout=0) as owner:
            assert len(owner.devices_taken) == 3
            assert safe_gpu.gpu_owner is None, "only claim_gpus() has an implicit owner"
            raise ZeroDivisionError
        with safe_gpu.claim_gpus(1, timeout=0) as implicit:
            assert safe_gpu.gpu_owner is implicit
        assert safe_gpu.gpu_owner is None


def test_a_dropped_owner_lets_go_of_nothing(host: Any) -> None:
    reference = weakref.ref(GPUOwner(2, timeout=0))
    gc.collect()
    assert safe_gpu.get_free_gpus() == OTHERS
    safe_gpu.release_gpus()
    assert safe_gpu.get_free_gpus() == ALL
    gc.collect()
    assert reference() is None


SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT]


@pytest.mark.parametrize("end", ["sys.exit(3)", "os._exit(4)", "1 / 0", *SIGNALS])
def test_any_end_of_the_process_frees_its_gpus(child: Any, eventually: Any, end: str | int) -> None:
    process = child(f"{CLAIM}listen()\n{end if isinstance(end, str) else ''}\n")
    assert process.hear() == "0 1"
    assert safe_gpu.get_free_gpus() == OTHERS
    if isinstance(end, str):
        process.tell()

    def ended() -> bool:
        if not isinstance(end, str):
            process.process.send_signal(end)  # again, since Python may miss one just before its read(2) blocks
        return process.process.poll() is not None

    eventually(ended)
    assert safe_gpu.get_free_gpus() == ALL


def test_the_entry_says_who_holds_it(host: Any, ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "4711", "SGE_TASK_ID": "3", "SGE_ROOT": "/opt/sge"}.items():
        monkeypatch.setenv(name, value)
    owner = safe_gpu.claim_gpus(2, timeout=0)
    (entry,) = ground.claims()
    assert (entry.pid, entry.uid, entry.job, entry.token) == (os.getpid(), os.geteuid(), "sge:4711.3", "")
    assert entry.gpus == {gpu.uuid: None for gpu in owner.gpus}


def test_an_affinity_that_cannot_be_had_fails_the_claim_only_where_it_was_asked_for(
    host: Any, untouched: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise GPUAffinityError("the CPUs are not to be had")

    monkeypatch.setattr("safe_gpu.affinity.cpu_shares.bind_process", refuse)
    with untouched():
        with GPUOwner(1, timeout=0) as owner:
            assert (owner.cpus, owner.binding) == (set(), None)
        assert "the CPUs are not to be had" in caplog.text
        for arguments in ({"affinity": "node"}, {"memory": "preferred"}, {"affinity": "socket"}):
            with pytest.raises(GPUAffinityError):
                GPUOwner(1, timeout=0, **arguments)


# One claim a process


def test_a_second_claim_while_another_thread_is_at_it_is_refused(host: Any) -> None:
    begun, go = threading.Event(), threading.Event()
    taken: list[list[int]] = []

    def wait(number: int) -> None:
        if number == 2:
            begun.set()
            assert go.wait(30)

    host.on_poll = wait
    thread = threading.Thread(target=lambda: taken.append(safe_gpu.claim_gpus(2, timeout=0).devices_taken))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(AlreadyClaimedError, match="another thread of this process is claiming") as caught:
        safe_gpu.claim_gpus(1, timeout=0)
    assert caught.value.devices == ()
    go.set()
    thread.join(30)
    with pytest.raises(AlreadyClaimedError, match=r"holds GPU 0,1 already: release_gpus\(\) first") as caught:
        GPUOwner(1, timeout=0)
    assert (taken, caught.value.devices) == ([[0, 1]], (0, 1))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


# Forked children


def test_a_forked_child_frees_nothing_and_leaves_the_placeholders_alone(host: Any) -> None:
    released: list[int] = []

    class Placeholder:
        def __call__(self, device_no: int) -> int:
            return device_no

        def release(self, thing: int) -> None:
            released.append(thing)

    owner = safe_gpu.claim_gpus(2, Placeholder(), timeout=0)
    environment = dict(os.environ)

    def work() -> list[object]:
        safe_gpu.release_gpus()
        owner.release_gpus()
        return [safe_gpu.gpu_owner is None, safe_gpu.get_free_gpus(), dict(os.environ) == environment, released]

    assert in_fork(work) == [True, OTHERS, True, []]
    assert safe_gpu.get_free_gpus() == OTHERS
    assert owner.devices_taken == [0, 1]
    owner.release_gpus()
    assert released == [0, 1]


def test_a_forked_child_that_claims_its_parents_gpus_is_told_so(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    safe_gpu.claim_gpus(2, timeout=0)
    name, message, _ = in_fork(lambda: safe_gpu.claim_gpus(1, timeout=None).devices_taken)
    assert name == "NotEnoughGpusError"
    assert f"process {os.getpid()}, a parent of this one, holds GPU 0,1" in message
    assert "delegate=True" in message
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    assert in_fork(lambda: safe_gpu.claim_gpus(6, timeout=0).devices_taken) == [2, 3, 4, 5, 6, 7]


def test_a_process_of_another_container_with_our_parents_number_is_not_our_parent(host: Any, ground: Any) -> None:
    # Containers that share the state directory number their processes alike: most have a process 1.
    ground.hold(*range(8), pid=os.getpid(), start=1)
    told: list[Any] = []

    def on_wait(status: Any) -> None:
        told.append(status)
        ground.let_go()

    assert owner_type(on_wait=on_wait)(2, timeout=60).devices_taken == [0, 1]
    assert told


def test_a_started_program_does_not_inherit_the_claim(child: Any) -> None:
    code = f"{CLAIM}\nimport subprocess\nsay(subprocess.Popen(['sleep', '60']).pid)\nos._exit(0)\n"
    process = child(code)
    process.hear()
    pid = int(process.hear())
    process.process.wait(30)
    try:
        assert safe_gpu.get_free_gpus() == ALL
    finally:
        os.kill(pid, signal.SIGKILL)


# What holds the GPU


def test_claims_share_the_only_gpu_where_a_display_is_on_it(child: Any, host_of: Any) -> None:
    host_of("laptop")
    assert child("import safe_gpu\nsay(safe_gpu.claim_gpus(timeout=0).devices_taken)\nlisten()").hear() == "[0]"
    assert safe_gpu.get_free_gpus() == ["0"]
    owner = safe_gpu.claim_gpus(timeout=0, delegate=True)
    assert owner.devices_taken == [0]
    inside = [child("import safe_gpu\nsay(safe_gpu.claim_gpus(timeout=0).devices_taken)\nlisten()") for _ in range(2)]
    assert [process.hear() for process in inside] == ["[0]", "[0]"]
    owner.release_gpus()
    with pytest.raises(UnsatisfiableRequestError, match="only 1"):
        safe_gpu.claim_gpus(2, timeout=0)


def test_gpus_with_their_model_and_who_holds_them(ground) -> None:
    with GPUOwner(3, safe_gpu.NoPlaceholder(), affinity=None) as owner:
        gpus = "<GPUOwner: GPU 0-2 (NVIDIA A100-SXM4-80GB)"
        assert repr(owner) == f"{gpus}>"
        assert in_fork(lambda: repr(owner)) == f"{gpus}, held by process {os.getpid()}>"
        owner.cpus = {0, 1, 2, 3, 8}
        assert repr(owner) == f"{gpus}, CPUs 0-3,8>"
    assert repr(owner) == "<GPUOwner: released>"
