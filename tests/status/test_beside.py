"""Processes on a claimed GPU that are not of the claim: who is told, in which words, and who is not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim
from support.entries import remove_entry
from support.findings import expect
from support.state import locked_host

BEN = 12345
CHECK = "processes beside claims"
ME = os.getpid()
USER = api.procfs.user_name(os.geteuid())

PRELUDE = """
import os, signal, subprocess, sys
import safe_gpu
from safe_gpu.runtimes.placeholders import NoPlaceholder
def hold(number=1, **options): return safe_gpu.claim_gpus(number, NoPlaceholder(), affinity=None, timeout=0, **options)
started = []
def start(code, **options):
    '''Start a process that runs some code and then lives as long as this one; return its pid.'''
    code = f"import os, sys\\n{code}\\nprint(os.getpid(), flush=True)\\nsys.stdin.read()"
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    started.append(subprocess.Popen([sys.executable, "-c", code], text=True, **pipes, **options))
    return int(started[-1].stdout.readline())
"""

ORPHAN = "if os.fork(): os._exit(0)"  # which runs on in a child, whose parent is gone
CHILD_OF_ORPHAN = rf"{ORPHAN}\nif os.fork(): os.wait(), os._exit(0)"


class Driver:
    """A driver that lists what a test puts on its GPUs, of which there are three."""

    def __init__(self, **facts: object) -> None:
        gpus = api.find_preset("dgx-a100").gpus[:3]
        self.gpus = [gpu._replace(**facts) for gpu in gpus]

    def put(self, index: int, *processes: api.GpuProcess) -> None:
        self.gpus[index] = self.gpus[index]._replace(processes=processes)

    def look(self) -> api.HostStatus:
        return api.status_of(api.HostSnapshot(tuple(self.gpus), "test", "1"))

    def remarks(self, index: int = 0) -> list[str]:
        """What status tells of processes on a GPU beside its claims."""
        return [one.text for one in self.look().gpus[index].beside]


def on_gpu(pid: int, gib: float | None = 2, **facts: Any) -> api.GpuProcess:
    memory = None
    if gib is not None:
        memory = int(gib * (1 << 30))
    return api.GpuProcess(pid, memory_used=memory, **facts)


@pytest.fixture
def driver(driver_libraries: object) -> Driver:
    return Driver()


@pytest.fixture
def sleeper() -> Iterator[Callable[..., int]]:
    """Start a process in a session of its own that does nothing; with ``uid``, one of another user."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str, uid: int | None = None) -> int:
        if os.geteuid() != 0 and uid is not None:
            pytest.skip("needs root, to act as other users")
        command = [*words, "sleep", "infinity"]
        started.append(subprocess.Popen(command, user=uid, start_new_session=True))
        return started[-1].pid

    yield start
    for one in started:
        with one:
            os.killpg(one.pid, signal.SIGKILL)  # what it has started too


@pytest.fixture
def holder(forked: Any) -> Callable[..., int]:
    """Let another process claim some GPUs of the host that is simulated, and return its pid."""

    def start(only: str, **options: object) -> int:
        code = f"hold(len({only!r}.split(',')), only={only!r}, **{options}); say('held'); listen()"
        return int(forked(PRELUDE + code, says="held").pid)

    return start


@pytest.fixture
def after() -> Iterator[list[int]]:
    """Processes that are ended after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# Who is told


def test_a_process_of_another_user_beside_a_claim(
    driver: Driver, forked: Any, sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the table, the document, the page, the metrics and by doctor: by its user and its memory."""
    ben = sleeper(uid=BEN)
    anna = forked(PRELUDE + "hold(only=0); say('held'); listen()", says="held")
    driver.put(0, on_gpu(anna.pid), on_gpu(ben, 69.8))
    text = f"process {ben} of {BEN} uses 69.8 GiB beside this claim"
    status = driver.look()
    assert status.gpus[0].state == "claimed"
    for width in (80, 200):
        assert f"GPU 0: {text}" in " ".join(api.render(status, width=width, color=False).split())
    document = json.loads(json.dumps(status.to_dict()))
    (told,) = document["gpus"][0]["beside"]
    size = int(69.8 * (1 << 30))
    assert told == {"pid": ben, "user": str(BEN), "command": "sleep infinity", "memory_used": size, "text": text}
    assert [one["beside"] for one in document["gpus"][1:]] == [[], []]
    label = f'{{gpu="0",UUID="{driver.gpus[0].uuid}",vendor="nvidia",user="{USER}"}}'
    assert f"safe_gpu_claim_beside_bytes{label} {float(size)}" in api.render_metrics(status)
    assert f"GPU 0: {text}" in api.render_page({"h": document}, now=time.time(), every=300.0, use={})
    for one in document["gpus"]:
        del one["beside"]  # as an older version
    assert text not in api.render_page({"h": document}, now=time.time(), every=300.0, use={})
    host = api.CheckedHost()
    monkeypatch.setattr(type(host), "snapshot", api.HostSnapshot(tuple(driver.gpus), "test", "1"))
    expect(CHECK, "warning", f"GPU 0: {text}", host, fix="safe-gpu run")
    anna.kill()
    assert driver.remarks() == [], "without a claim the GPU is busy, and its row names the process"
    expect(CHECK, "passed", host=host)


def test_memory_that_is_not_known_and_many_at_once(driver: Driver, holder: Any, sleeper: Any) -> None:
    holder("0")
    some = [sleeper(uid=BEN) for _ in range(6)]
    driver.put(0, *(on_gpu(pid, number) for number, pid in enumerate(some[:5])), on_gpu(some[5], None))
    status = driver.look()
    told = [one.pid for one in status.gpus[0].beside]
    assert told[:4] == some[4:0:-1], "that with the most memory first"
    assert f"process {some[5]} of {BEN} uses an unknown amount of memory beside this claim" in driver.remarks()
    lines = " ".join(api.render(status, width=200, color=False).split())
    assert "GPU 0: and 2 more like these (safe-gpu status -v lists all processes)" in lines
    assert "claim_beside_bytes{" not in api.render_metrics(status)


def test_a_process_of_the_user_of_the_claim_is_not_called_a_stranger(driver: Driver, holder: Any, sleeper: Any) -> None:
    """As one in tmux, or in a container with the processes of the host."""
    holder("0")
    own = sleeper()
    driver.put(0, on_gpu(own))
    said = "and was not started by this claim, as far as can be seen (a container, tmux?)"
    assert driver.remarks() == [f"process {own} of {USER} uses 2 GiB {said}"]


def test_whose_a_process_in_a_container_is_nobody_knows(
    driver: Driver, holder: Any, sleeper: Any, eventually: Any
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    holder("0")
    (pid,) = api.procfs.descendants(forking(sleeper("unshare", "--pid", "--fork"), eventually))
    driver.put(0, on_gpu(pid))
    status = driver.look()
    (told,) = status.gpus[0].beside
    assert told.text == f"process {pid} uses 2 GiB in a container; its user is not known"
    assert (told.user, status.gpus[0].idle) == (None, False)


def forking(pid: int, eventually: Any) -> int:
    """A process, once it has a child that has become another program."""
    eventually(lambda: "sleep infinity" in [api.procfs.command_of(one) for one in api.procfs.descendants(pid)])
    return pid


def test_a_claim_whose_process_uses_another_gpu(driver: Driver, holder: Any) -> None:
    """On a GPU that is free, and on one that somebody else holds."""
    pid = holder("0,1")
    driver.put(2, on_gpu(pid))
    assert driver.remarks(2) == [f"process {pid} of {USER} uses 2 GiB here, and its own claim holds GPU 0,1"]
    assert driver.look().gpus[2].state == "busy"
    holder("2")
    text = f"process {pid} of {USER} uses 2 GiB beside this claim, and its own claim holds GPU 0,1"
    assert driver.remarks(2) == [text]


# Who is not told: what belongs to a claim


def test_a_descendant_is_of_the_claim(driver: Driver, child: Any, eventually: Any) -> None:
    """A child, one that has a session of its own, one in a PID namespace of its own, and an orphan."""
    code = "hold(only=0)\n"
    code += "say(start(''), start('', start_new_session=True), start('" + ORPHAN + "'))\nlisten()"
    parent = child(PRELUDE + code, start_new_session=True)
    pids = [int(word) for word in parent.hear().split()]
    driver.put(0, on_gpu(parent.pid), *map(on_gpu, pids))
    eventually(lambda: parent.pid not in api.procfs.ancestors(pids[2]))
    assert driver.remarks() == []


def test_a_descendant_in_a_pid_namespace_is_of_the_claim(
    driver: Driver, child: Any, after: list[int], eventually: Any
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make namespaces")
    words = "['unshare', '--pid', '--fork', '--kill-child', 'sleep', 'infinity']"
    parent = child(PRELUDE + f"hold(only=0); say(subprocess.Popen({words}).pid); listen()")
    after.append(int(parent.hear()))
    (pid,) = api.procfs.descendants(forking(after[-1], eventually))
    driver.put(0, on_gpu(pid))
    assert api.procfs.family_of(pid) is None
    assert driver.remarks() == []


def test_who_keeps_the_entry_is_of_the_claim(driver: Driver, child: Any, eventually: Any) -> None:
    """A forked child in a session of its own, while its parent lives and once that is gone."""
    fork = f"if os.fork() == 0:\n  {ORPHAN}\n  os.setsid(); say(os.getpid()); listen()"
    parent = child(PRELUDE + f"hold(only=0)\n{fork}\nlisten()", start_new_session=True)
    pid = int(parent.hear())
    driver.put(0, on_gpu(pid))
    eventually(lambda: parent.pid not in api.procfs.ancestors(pid))
    assert driver.remarks() == []
    parent.kill()
    assert driver.look().gpus[0].claim.pid == pid
    assert driver.remarks() == []


def test_what_a_command_leaves_is_of_the_claim_that_it_keeps(
    driver: Driver, command: Any, after: list[int], eventually: Any
) -> None:
    """``run`` becomes the command, which keeps the entry across exec, and so do its children."""
    code = f"import os, signal\n{ORPHAN}\nos.setsid(); print(os.getpid(), flush=True); signal.pause()"
    started = command.start(
        "run", "--only", "0", "--", "sh", "-c", f'"{sys.executable}" -c "$0"; exec sleep 1000', code
    )
    pid = int(started.stdout.readline())
    after.append(pid)
    driver.put(0, on_gpu(started.pid), on_gpu(pid))
    eventually(lambda: started.pid not in api.procfs.ancestors(pid))
    assert driver.look().gpus[0].claim.pid == started.pid
    assert driver.remarks() == []


def test_a_claim_inside_another_one_uses_its_gpus(driver: Driver, child: Any) -> None:
    """It may be of a process that is no descendant, as of a worker of an engine."""
    with claim(2, only="0,1", delegate=True):
        scope = {"SAFE_GPU_SCOPE": os.environ["SAFE_GPU_SCOPE"]}
        inner = child(PRELUDE + "hold(1, only=0); say(start('')); listen()", env=scope, start_new_session=True)
        worker = int(inner.hear())
        driver.put(0, on_gpu(inner.pid), on_gpu(worker))
        assert driver.remarks() == []


def test_sharers_are_not_strangers_to_each_other(driver: Driver, child: Any, sleeper: Any) -> None:
    code = PRELUDE + "hold(only=0, share='20GiB'); say(start('')); listen()"
    sharers = [child(code) for _ in range(2)]
    workers = [int(one.hear()) for one in sharers]
    driver.put(0, *(on_gpu(one.pid) for one in sharers), *map(on_gpu, workers))
    assert driver.remarks() == []
    ben = sleeper(uid=BEN)
    driver.put(0, on_gpu(sharers[0].pid), on_gpu(ben, 5))
    assert driver.remarks() == [f"process {ben} of {BEN} uses 5 GiB beside these claims"]


def test_an_mps_server_is_no_stranger_and_a_client_is_one(driver: Driver, holder: Any, sleeper: Any) -> None:
    server, client = sleeper(uid=BEN), sleeper(uid=BEN)
    idle = api.GpuProcess(server, memory_used=27 << 20, name="/usr/bin/nvidia-cuda-mps-server")
    driver.put(0, idle)
    driver.put(1, idle, on_gpu(client, 3, kind="mps"))
    holder("0,1")
    assert driver.remarks(0) == []
    assert driver.remarks(1) == [f"process {client} of {BEN} uses 3 GiB beside this claim"]


def test_who_only_draws_is_no_stranger(driver: Driver, holder: Any, sleeper: Any) -> None:
    driver.put(0, on_gpu(sleeper(uid=BEN), 0.3, kind="graphics"))
    holder("0")
    assert driver.remarks() == []


def test_a_process_on_a_mig_instance_is_of_the_claim_of_that(
    fake_gpus: Any, state_dir: Path, holder: Any, sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process on an instance is of the claim of it, also where the driver lists it on its GPU; a stranger there is
    told on the instance. One on a GPU whose instances are gone is a stranger to the claims that are still in its
    way."""
    fake_gpus.set(2)
    fake_gpus.use_nvml_here()
    for name, value in fake_gpus.env.items():  # for the holders
        monkeypatch.setenv(name, value)
    first, second = (fake_gpus.uuid("MIG", number) for number in (1, 2))
    fake_gpus.change(0, mig=1, instances=f"{first},{second}", imem=10 << 30)
    claims = [holder(name) for name in ("0:0", "0:1")]
    ben = sleeper(uid=BEN)
    with closing(api.open_driver()) as driver:
        snapshot = driver.detailed(driver.snapshot())
    parent, *instances, _ = snapshot.gpus
    everybody = (*map(on_gpu, claims), on_gpu(ben, 4))
    shown = [parent._replace(processes=everybody)]
    shown += [one._replace(processes=(on_gpu(pid), on_gpu(ben, 4))) for one, pid in zip(instances, claims, strict=True)]
    text = f"process {ben} of {BEN} uses 4 GiB beside"
    told = [[each.text for each in gpu.beside] for gpu in api.status_of(snapshot.updated(shown)).gpus]
    assert told == [[], [f"{text} this claim"], [f"{text} this claim"], []]
    whole = parent._replace(mig_enabled=False, unusable=None, processes=everybody)
    gone = snapshot._replace(gpus=(whole, snapshot.gpus[-1]))
    assert [each.text for each in api.status_of(gone).gpus[0].beside] == [f"{text} these claims"]


def test_an_mps_server_whose_name_is_hidden_is_no_stranger(
    driver: Driver, holder: Any, sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with hidepid=1. It is small, and on every GPU of the host."""
    server = sleeper(uid=BEN)
    for number in range(3):
        driver.put(number, api.GpuProcess(server, memory_used=27 << 20))
    holder("0")
    assert len(driver.remarks()) == 1
    monkeypatch.setattr(api.procfs, "command_of", lambda pid: None)
    assert driver.remarks() == []


# Who is not told: what cannot be seen


def test_a_number_that_is_another_process_s_in_a_container_too(driver: Driver, holder: Any, sleeper: Any) -> None:
    ben = sleeper(uid=BEN)
    holder("0")
    driver.put(0, on_gpu(ben), on_gpu(ben, 7, elsewhere=True))
    assert driver.remarks() == [f"process {ben} of {BEN} uses 2 GiB beside this claim"]


def test_who_uses_another_gpu_and_holds_one_that_is_not_shown(driver: Driver, holder: Any) -> None:
    pid = holder("5")
    driver.put(2, on_gpu(pid))
    assert driver.remarks(2) == []


def test_who_uses_another_gpu_that_is_held_in_another_state_directory(driver: Driver, holder: Any) -> None:
    """It may be of the claim there too."""
    pid = holder("0,1")
    driver.put(2, on_gpu(pid))
    doors = api.Doors("")
    assert doors.take_whole(driver.gpus[2].uuid, ())
    try:
        assert driver.remarks(2) == []
    finally:
        doors.release()
    assert len(driver.remarks(2)) == 1


def test_what_cannot_be_seen_is_nobody_s(driver: Driver, holder: Any, sleeper: Any) -> None:
    """A process of another PID namespace, one that has ended, and all beside a claim that is known by its door
    alone."""
    ben = sleeper(uid=BEN)
    holder("0")
    driver.put(0, on_gpu(1 << 30), on_gpu(ben, elsewhere=True), on_gpu(ben, ended=True))
    assert driver.remarks() == []
    driver.put(1, on_gpu(ben))
    doors = api.Doors("")
    assert doors.take_whole(driver.gpus[1].uuid, ())  # as of a claim in another state directory
    try:
        assert driver.look().gpus[1].claim.elsewhere
        assert driver.remarks(1) == []
    finally:
        doors.release()


def test_beside_a_claim_in_a_container(driver: Driver, sleeper: Any, dgx: Any) -> None:
    """Its own processes cannot be told from those of its user, or from those of other containers."""
    dgx.hold(0, pid=1, pidns=1, uid=4711)
    carla, ben = sleeper(uid=4711), sleeper(uid=BEN)
    driver.put(0, on_gpu(carla), on_gpu(ben))
    assert driver.remarks() == [f"process {ben} of {BEN} uses 2 GiB beside this claim"]


@pytest.mark.parametrize(("real", "effective", "is_told"), [(4711, BEN, False), (BEN, 4711, False), (BEN, BEN, True)])
def test_who_has_changed_the_user_may_be_of_a_claim_in_a_container(
    driver: Driver, sleeper: Any, dgx: Any, eventually: Any, real: int, effective: int, is_told: bool
) -> None:
    """By ``su`` or a program with the set-user-ID bit: by both users."""
    dgx.hold(0, pid=1, pidns=1, uid=4711)
    ids = {"ruid": real, "euid": effective}
    pid = sleeper("setpriv", *(f"--{name}={uid}" for name, uid in ids.items()), "--clear-groups")
    eventually(lambda: api.procfs.command_of(pid) == "sleep infinity")
    driver.put(0, on_gpu(pid))
    assert bool(driver.remarks()) is is_told


def test_a_process_in_a_container_beside_a_claim_in_a_container(
    driver: Driver, sleeper: Any, dgx: Any, eventually: Any
) -> None:
    """It may be of that claim."""
    dgx.hold(0, pid=1, pidns=1, uid=4711)
    (pid,) = api.procfs.descendants(forking(sleeper("unshare", "--pid", "--fork", "--kill-child"), eventually))
    driver.put(0, on_gpu(pid))
    assert driver.remarks() == []


def test_beside_a_claim_whose_user_cannot_be_known(
    driver: Driver, sleeper: Any, dgx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a user namespace, which shows all users of the host but one as 65534."""
    dgx.hold(0, uid=4711)
    driver.put(0, on_gpu(sleeper(uid=BEN)))
    assert len(driver.remarks()) == 1
    monkeypatch.setattr(api.procfs, "is_unknown_user", lambda uid: uid == 4711)
    assert driver.remarks() == []


def test_beside_more_claims_than_are_looked_at(driver: Driver, sleeper: Any, dgx: Any) -> None:
    """A process of a user of one of the others may be of that one."""
    carla, ben = sleeper(uid=4711), sleeper(uid=BEN)
    made = []
    for number in range(api.MOST_PARTS + 1):
        with locked_host() as host:
            said = {"pid": 1, "pidns": api.procfs.pid_namespace() or 0, "since": time.time(), "host": "h"}
            said["gpus"] = {driver.gpus[0].uuid: 1 << 30}
            directory = api.Directory(os.environ["SAFE_GPU_DIR"], "claims")
            name, entry = api.make_entry(directory, host.claims.next_number, said, by_children=False)
        os.fchown(entry.fd, 4711 if number == api.MOST_PARTS else 4712, 0)
        made.append((directory, name, entry))
    driver.put(0, on_gpu(carla), on_gpu(ben))
    try:
        assert driver.remarks() == [f"process {ben} of {BEN} uses 2 GiB beside these claims"]
    finally:
        for directory, name, entry in made:
            remove_entry(directory, name, entry)
            directory.close()


# Which processes a process may have left behind


@pytest.mark.parametrize("session", [True, False])
def test_who_may_descend_from_whom(child: Any, eventually: Any, session: bool) -> None:
    """The children, also those whose parents have ended, in one session; nobody who was there before."""
    code = f"say(start('{ORPHAN}'), start('{CHILD_OF_ORPHAN}'), start(''))\nlisten()"
    parent = child(PRELUDE + code, start_new_session=session)
    orphan, grandchild, worker = (int(word) for word in parent.hear().split())
    eventually(lambda: parent.pid not in {*api.procfs.ancestors(orphan), *api.procfs.ancestors(grandchild)})
    for one in (orphan, grandchild, worker, parent.pid):
        assert api.procfs.may_descend_from(one, parent.pid)
    assert not api.procfs.may_descend_from(ME, parent.pid)
    assert not api.procfs.may_descend_from(parent.pid, worker)
    assert not api.procfs.may_descend_from(orphan, 1 << 30)


def test_a_process_of_another_session_descends_from_nobody_here(sleeper: Any) -> None:
    first, second = sleeper(), sleeper()
    assert not api.procfs.may_descend_from(second, first)
