"""Scenarios in a Dragon runtime of two hosts: on_dragon.py SCENARIO [ARGUMENTS]."""

import json
import os
import pickle
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import scenarios
from dragon.infrastructure.facts import PMIBackend
from dragon.infrastructure.policy import Policy
from dragon.native.pool import Pool
from dragon.native.process import Process, ProcessTemplate
from dragon.native.process_group import ProcessGroup
from scenarios import MARKS, Worker, me, put, raises, using, wait

import safe_gpu
from safe_gpu.engines.dragon import WorkerCheck, claim

RESULTS = f"{MARKS}/results"
REFUSED = safe_gpu.UnsatisfiableRequestError


def place(everyone: int) -> Worker:
    """One piece of work for each of a pool's workers: nobody ends before all have begun."""
    open(f"{RESULTS}/place-{socket.gethostname()}-{os.getpid()}", "w").close()
    wait(lambda: len(list(Path(RESULTS).glob("place-*"))) == everyone, "all workers of the pool")
    return me()


def report(name: str, check: WorkerCheck) -> None:
    """A process of a ProcessGroup: what it has before the check and after it, or what the check says, into a file."""
    result: Any
    try:
        before, gpu, after = me(), check(), me()
        with safe_gpu.GPUOwner(1, timeout=10, affinity=None) as owner, using(gpu.uuid):  # inside the claim
            assert owner.gpus[0].uuid == gpu.uuid
        result = before, after
    except safe_gpu.SafeGpuError as err:
        result = err
    put(Path(RESULTS, name), pickle.dumps(result))


def results(*names: str) -> list[Any]:
    paths = [Path(RESULTS, name) for name in names]
    wait(lambda: all(path.exists() for path in paths), "results")
    found = [pickle.loads(path.read_bytes()) for path in paths]
    for path in paths:
        path.unlink()
    return found


def group(*templates: ProcessTemplate) -> None:
    processes = ProcessGroup()
    for template in templates:
        processes.add_process(nproc=1, template=template)
    processes.init()
    processes.start()
    processes.join()
    processes.close(patience=60)


def reports(check: WorkerCheck, policies: dict[str, Policy]) -> list[Any]:
    """What the processes of a group report, one with each of these policies, by name."""
    group(*(ProcessTemplate(report, args=(name, check), policy=policy) for name, policy in policies.items()))
    return results(*policies)


def on(host: str, **more: Any) -> Policy:
    return Policy(placement=Policy.Placement.HOST_NAME, host_name=host, **more)


def workers() -> None:
    """Pool, ProcessGroup, functions, more workers than GPUs; what Dragon gives away is noticed."""
    with claim(nodes=2, gpus_per_node=2) as held:
        assert set(held.hosts) == {"hosta", "hostb"}
        assert held.find_gpus() == [(gpu.host, gpu.index) for gpu in held.gpus]
        gpus = [(gpu.host, str(gpu.index)) for gpu in held.gpus]
        assert safe_gpu.get_free_gpus() == [str(number) for number in range(2, 8)]

        policies = held.policies(processes_per_gpu=2)
        ends = policies[0::4] + policies[3::4]  # more workers than these take minutes on few cores with Dragon 0.15
        pool = Pool(policy=ends, processes_per_policy=1, initializer=held.check_worker)
        found = set(pool.map_async(place, [4] * 4, 1).get(90))
        pool.close()
        pool.join()
        for worker in found:
            assert worker.order == "PCI_BUS_ID"
            assert worker.cpus in ((0,), (1,)), "two workers of a GPU divide its two cores"
        assert {(worker.host, worker.cuda) for worker in found} == {min(gpus), max(gpus)}, found
        assert len(found) == 4, found

        policies = held.make_policies(held.find_gpus(), nprocs=5)
        named = {f"worker{number}": policy for number, policy in enumerate(policies)}
        for nth, (_, worker) in enumerate(reports(held.check_worker, named)):
            gpu = held.gpus[nth % 4]
            assert (worker.host, worker.cuda) == (gpu.host, str(gpu.index)), worker
            assert set(worker.cpus) == ({0} if nth == 0 else {1} if nth == 4 else set(gpu.cpus)), worker

        failing = {"no-gpu": on("hostb", cpu_affinity=[0]), "not-ours": on("hosta", gpu_affinity=[7])}
        for name, error in zip(failing, reports(held.check_worker, failing), strict=True):
            assert isinstance(error, safe_gpu.WrongDeviceError), (name, error)

        raises(REFUSED, "GPU 7 of hosta", call=lambda: held.make_policies([("hosta", 7)]))
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in os.environ
    raises(REFUSED, "claim again", call=held.policies)


def executables() -> None:
    """Executables get their GPU and may claim it; on any other GPU ``run`` and ``bind`` refuse to start them."""
    with claim(nodes=2, gpus_per_node=2) as held:
        policies = held.policies()
        first, last = policies[0], policies[-1]
        right = {
            "run-first": ("run --timeout 10", first, first),
            "run-last": ("run --timeout 10", last, last),
            "bind-last": ("bind", last, last),
        }
        wrong = {
            "no-gpu": ("bind", on("hostb"), last),
            "not-ours": ("run --timeout 10", on("hosta", gpu_affinity=[7]), first),
            "another-host": ("bind", on("hostb", gpu_affinity=list(first.gpu_affinity)), first),
        }
        group(*(_executable(held, name, *what) for name, what in {**right, **wrong}.items()))
        for name, (_, _, meant) in right.items():
            code, output = _outcome(name)
            assert code == 0, (name, output)
            assert output.split() == [meant.host_name, str(meant.gpu_affinity[0]), "PCI_BUS_ID"], (name, output)
        for name, said in {"no-gpu": "8 GPUs", "not-ours": "it sees", "another-host": "no longer held"}.items():
            code, output = _outcome(name)
            assert (code, said in output) == (70, True), (name, code, output)


def _executable(held: Any, name: str, verb: str, policy: Policy, meant: Policy) -> ProcessTemplate:
    """An executable with this policy, in the environment for a worker with the policy ``meant``."""
    shown = "$(hostname) $CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $ROCR_VISIBLE_DEVICES $HIP_VISIBLE_DEVICES"
    script = f"""cd {RESULTS}
        {sys.executable} -m safe_gpu {verb} -- sh -c 'echo {shown}' >{name}.out 2>{name}.err
        echo $? >{name}.new
        mv {name}.new {name}"""
    return ProcessTemplate("/bin/sh", args=["-c", script], env=held.template_env(meant), policy=policy)


def _outcome(name: str) -> tuple[int, str]:
    """Exit code and output of an executable; on an error what it said instead."""
    wait(lambda: os.path.exists(f"{RESULTS}/{name}"), name)
    code = int(Path(RESULTS, name).read_text())
    return code, Path(RESULTS, f"{name}.{'err' if code else 'out'}").read_text()


def amd() -> None:
    """Dragon, started with HIP_VISIBLE_DEVICES, gives each worker one AMD GPU, and HIP shows it that one."""
    left_over = os.environ["HIP_VISIBLE_DEVICES"]
    with claim(nodes=2, only=[6]) as held:
        assert held.find_gpus() == [(host, 6) for host in held.hosts]
        assert {gpu.vendor for gpu in held.gpus} == {"amd"}
        first, last = held.policies()
        group(
            ProcessTemplate(report, args=("function", held.check_worker), policy=first),
            ProcessTemplate(report, args=("wrong", held.check_worker), policy=on("hosta", gpu_affinity=[1])),
            _executable(held, "executable", "bind", last, last),
            _executable(held, "no-gpu", "bind", on("hostb"), last),
        )
        (before, after), wrong = results("function", "wrong")
        assert (before.rocr, before.hip, before.cuda) == ("6", left_over, None), before
        assert (after.rocr, after.hip, after.cuda) == (held.gpus[0].uuid, "0", "0"), after
        assert isinstance(wrong, safe_gpu.WrongDeviceError), wrong
        code, output = _outcome("executable")
        assert (code, output.split()[3:]) == (0, ["6", "0"]), output
        assert _outcome("no-gpu")[0] == 70


def mpi() -> None:
    """MPI ranks on two hosts: each sees its own GPU, claims it, and is of one world with the others.

    The group is neither joined nor closed: on two cores Dragon 0.14 may take minutes to end a group with PMIx.
    """
    command = ["-m", "safe_gpu", "bind", "--", sys.executable, scenarios.__file__, "mpi_rank", RESULTS]
    with claim(nodes=2, gpus_per_node=2) as held:
        ranks = ProcessGroup(pmi=PMIBackend.PMIX)
        for policy in held.policies():
            env = held.template_env(policy)
            ranks.add_process(nproc=1, template=ProcessTemplate(sys.executable, args=command, env=env, policy=policy))
        ranks.init()
        ranks.start()
        paths = [Path(RESULTS, f"rank{number}") for number in range(4)]
        wait(lambda: all(path.exists() for path in paths), "the ranks", 200)
        found = [json.loads(path.read_text()) for path in paths]
        assert [(one["ranks"], one["expect"]) for one in found] == [(4, None)] * 4, found
        places = {tuple(one["place"]) for one in found}
        assert places == {(gpu.host, str(gpu.index), gpu.uuid) for gpu in held.gpus}, found
    open(f"{MARKS}/mpi-done", "w").close()


def train(check: WorkerCheck, go_on: str) -> None:
    gpu = check()
    with safe_gpu.GPUOwner(1, timeout=0, affinity=None), using(gpu.uuid):
        open(f"{go_on}.started", "w").close()
        wait(lambda: os.path.exists(go_on), "the end of training", 300)


def losses() -> None:
    """A holder that dies gives its node's GPUs back, but not those that a worker holds; the claim says it is broken."""
    held = claim(nodes=["hosta", "hostb"], gpus_per_node=4)
    worker = Process(target=train, args=(held.check_worker, scenarios.GO_ON), policy=held.policies()[0])
    worker.start()
    scenarios.lose_holder(held, held.policies)
    scenarios.lose_worker(held.gpus[0])
    worker.join()
    held.release()


def among_others() -> None:
    """Claims and their workers among users who take one and two GPUs all the time, on both hosts."""
    for _ in range(2):
        with claim(nodes=2, gpus_per_node=6, timeout=100) as held:
            names = [f"among{number}" for number in range(2)]
            for name, policy in zip(names, held.policies()[::6], strict=True):
                process = Process(target=report, args=(name, held.check_worker), policy=policy)
                process.start()
                process.join()
            assert [after.host for _, after in results(*names)] == list(held.hosts)


def race() -> None:
    hosts = enumerate(("hosta", "hostb"))
    racers = [Process(target=scenarios.race, args=(claim, number, 8), policy=on(host)) for number, host in hosts]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
        assert racer.returncode == 0


refusals = partial(scenarios.refusals, claim)


def main() -> None:
    open(f"{MARKS}/started", "w").close()
    os.makedirs(RESULTS, exist_ok=True)
    if sys.argv[1] == "driver":
        scenarios.driver(claim, sys.argv[2])
        return
    try:
        for name in sys.argv[1:]:
            globals()[name]()
            print(f"{name}: done", flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of a pool that is open still would wait for ever


if __name__ == "__main__":
    main()
