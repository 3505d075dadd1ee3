"""Scenarios on a Ray cluster of two hosts: on_ray.py ADDRESS SCENARIO [ARGUMENTS]."""

import os
import subprocess
import sys
import time
from functools import partial
from typing import NamedTuple

import ray
import scenarios
from scenarios import Worker, me, raises, using, wait

import safe_gpu
from safe_gpu.engines.ray import claim


class Found(NamedTuple):
    """What a worker of a claim finds, before and in a claim of its own, of which the rest is told."""

    before: Worker
    inside: Worker
    uuid: str
    threads: set[int]
    hook: str | None
    mine: str | None
    ray: str


def look(import_ray: bool = False) -> Found:
    before = me()
    with safe_gpu.GPUOwner(1, timeout=10, affinity=None) as owner, using(owner.gpus[0].uuid):
        threads = {cpu for tid in os.listdir("/proc/self/task") for cpu in os.sched_getaffinity(int(tid))}
        named = (os.environ.get(name) for name in ("JOB_HOOK_RAN", "MINE"))
        # Ray asks for its own variable again and again; some versions refuse ROCR's
        command = [sys.executable, "-c", "import ray; print(ray.__version__)"]
        version = subprocess.check_output(command, text=True).strip() if import_ray else ""
        return Found(before, me(), owner.gpus[0].uuid, threads, *named, version)


task = ray.remote(look)


@ray.remote(num_gpus=1)  # what options() say replaces this
class Trainer:
    def look(self) -> Found:
        return look()

    def train(self, uuid: str, go_on: str) -> str:
        with safe_gpu.GPUOwner(1, timeout=0, affinity=None), using(uuid):
            open(f"{go_on}.started", "w").close()
            wait(lambda: os.path.exists(go_on), "the end of training", 300)
        return uuid


def job_hook() -> None:
    os.environ["JOB_HOOK_RAN"] = "yes"


def workers() -> None:
    """Every worker sees its own GPU alone, next to its own CPUs, and may claim it; all of it ends with the claim."""
    single = safe_gpu.AffinityOptions(mode="single_unique")  # CPU 0 for GPU 0, CPU 1 for GPU 1, on this host
    assert len(safe_gpu.get_free_gpus()) == 8
    with claim(nodes=2, gpus_per_node=2, affinity=single) as held:
        assert set(held.hosts) == {"hosta", "hostb"}
        assert safe_gpu.get_free_gpus() == [str(number) for number in range(2, 8)]
        mine = {"env_vars": {"MINE": "kept"}}
        found = ray.get([task.options(**held.options(gpu, runtime_env=mine, num_cpus=0)).remote() for gpu in held.gpus])
        actors = [Trainer.options(**held.options(gpu, num_cpus=0)).remote() for gpu in held.gpus[::3]]
        found += ray.get([actor.look.remote() for actor in actors])
        for gpu, worker in zip((*held.gpus, *held.gpus[::3]), found, strict=True):
            alone = Worker(gpu.host, (gpu.index,), str(gpu.index), "PCI_BUS_ID", None, None)
            assert (worker.before, worker.uuid, worker.threads) == (alone, gpu.uuid, gpu.cpus), worker
            assert worker.hook == "yes", worker
        assert found[0].mine == "kept"
        for actor in actors:
            ray.kill(actor)
        held.check()
        other = held.gpus[0]
    wait(lambda: len(safe_gpu.get_free_gpus()) == 8, "GPUs given back")
    raises(safe_gpu.UnsatisfiableRequestError, "claim again", call=lambda: held.options(other))
    with claim(nodes=["hostb"], gpus_per_node=1, affinity=None, visible_as="uuid") as held:
        assert held.hosts == ("hostb",)
        assert held.gpus[0].cpus == frozenset()
        assert ray.get(task.options(**held.options(held.gpus[0])).remote()).before.cuda == held.gpus[0].uuid
        raises(safe_gpu.UnsatisfiableRequestError, "is not a GPU of", call=lambda: held.options(other))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None


def refusals() -> None:
    refused = safe_gpu.UnsatisfiableRequestError
    raises(refused, "hosta: ", call=lambda: claim(nodes=2, model="V100"))
    scenarios.refusals(claim, among_three)


def among_three() -> None:
    """Another user holds three GPUs of this host."""
    with claim(nodes=1, gpus_per_node=5, timeout=0) as held:  # of those that can, the fullest
        assert held.hosts == ("hosta",)
    with claim(nodes=2, gpus_per_node=5, timeout=0):
        pass


def losses() -> None:
    """A holder that dies gives its node's GPUs back, but not those that a worker holds; the claim says it is broken."""
    held = claim(nodes=["hosta", "hostb"], gpus_per_node=4)
    working, idle = held.gpus[0], held.gpus[1]
    trainer = Trainer.options(**held.options(working)).remote()
    training = trainer.train.remote(working.uuid, scenarios.GO_ON)
    scenarios.lose_holder(held, lambda: held.options(idle))
    held.options(held.gpus[-1])  # hostb's stand
    with claim(nodes=["hosta"], gpus_per_node=7, timeout=0) as another:
        assert working.uuid not in {gpu.uuid for gpu in another.gpus}
    scenarios.lose_worker(working)
    raises(ray.exceptions.RayError, call=lambda: ray.get(training))
    held.release()


def among_others() -> None:
    """Claims and their workers among users who take one and two GPUs all the time, on both hosts."""

    @ray.remote
    def work(uuid: str) -> str:
        with using(uuid):
            time.sleep(0.05)
        return uuid

    for _ in range(3):
        with claim(nodes=2, gpus_per_node=6, timeout=100) as held:
            tasks = [work.options(**held.options(gpu, num_cpus=0.1)).remote(gpu.uuid) for gpu in held.gpus[::3]]
            assert ray.get(tasks) == [gpu.uuid for gpu in held.gpus[::3]]


def one_host_twice() -> None:
    """Two Ray nodes on one host are one host: half of its GPUs for each, and no claim that waits for itself."""
    with claim(nodes=2, gpus_per_node=4, timeout=0) as held:
        assert len({gpu.node_id for gpu in held.gpus}) == 2
        assert len({gpu.uuid for gpu in held.gpus}) == 8
        found = ray.get([task.options(**held.options(gpu, num_cpus=0)).remote() for gpu in held.gpus[::3]])
        assert [worker.uuid for worker in found] == [gpu.uuid for gpu in held.gpus[::3]]
        raises(safe_gpu.NotEnoughGpusError, call=lambda: claim(nodes=2, gpus_per_node=1, timeout=0))


def amd() -> None:
    """Workers on AMD GPUs get HIP_VISIBLE_DEVICES alone, and what they claim for themselves keeps to that."""
    with claim(gpus_per_node=2, only=[1, 6]) as held:
        assert [(gpu.index, gpu.vendor) for gpu in held.gpus] == [(1, "amd"), (6, "amd")]
        # a variable of the user's that would contradict the claim's is left out
        wrong = {"env_vars": {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "5"}}
        options = [held.options(gpu, runtime_env=wrong, num_cpus=0.1) for gpu in held.gpus]
        found = ray.get([task.options(**one).remote(import_ray=True) for one in options])
        for gpu, worker in zip(held.gpus, found, strict=True):
            for there in (worker.before, worker.inside):
                assert (there.rocr, there.hip, there.cuda) == (None, str(gpu.index), None), worker
            assert (worker.uuid, worker.ray) == (gpu.uuid, ray.__version__), worker
    assert len(safe_gpu.get_free_gpus()) == 8


driver = partial(scenarios.driver, claim)


def race(me: str, rounds: str) -> None:
    scenarios.race(claim, int(me), int(rounds))


def main() -> None:
    address, scenario, *arguments = sys.argv[1:]
    ray.init(
        address=address,
        _node_ip_address=os.environ["MY_ADDRESS"],
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": job_hook} if scenario == "workers" else None,
    )
    globals()[scenario](*arguments)
    print("done", flush=True)


if __name__ == "__main__":
    main()
