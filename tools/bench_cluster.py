#!/usr/bin/env python3
"""Measures the time of a claim across 1, 2 and 4 hosts, which are namespaces of this machine.

The time must not grow with the number of hosts.

    tools/bench_cluster.py ray             with a Python that has Ray, as root
    tools/bench_cluster.py dragon          the same for Dragon 0.14

It has the requirements of tools/hosts.sh. GPUs are simulated. Medians in milliseconds for each number of hosts:

    claim    a whole claim: holders start, import modules, and claim
    leases   the claims themselves, from the request to all hosts until all have answered
    slow     the same as leases, with placeholders that take 0.25 s per GPU, that is 2 s for the eight GPUs of a host
    release  until all GPUs are released

The "hosts" share the cores of one machine. So everything that takes processor time (the start of holders, the agents
of the engine) grows with their number, unlike on real hosts. The column slow is dominated by sleeps and must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("hosta", "hostb", "hostc", "hostd")
SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
MARK = "bench_cluster: "


class SlowContext:
    """A placeholder that takes as long as a CUDA context on a busy host."""

    holds_gpu = False

    def __call__(self, device_no: int) -> None:
        time.sleep(0.25)


def measure(engine: str, hosts: int, rounds: int) -> None:
    """Runs on the first host, inside the engine."""
    from safe_gpu.engines import remote

    if engine == "ray":
        import ray

        from safe_gpu.engines.ray import claim

        ray.init(address="10.77.0.1:6379", _node_ip_address="10.77.0.1", log_to_driver=False)
    else:
        from safe_gpu.engines.dragon import claim

    spent = []
    real = remote.claim_on_all

    def timed(*arguments: object, **more: object) -> object:
        began = time.perf_counter()
        try:
            return real(*arguments, **more)  # type: ignore[arg-type]
        finally:
            spent.append(time.perf_counter() - began)

    remote.claim_on_all = timed  # type: ignore[assignment]
    claims, releases = [], []
    for placeholder in [None] * (rounds + 1) + [SlowContext()] * 3:
        began = time.perf_counter()
        held = claim(nodes=hosts, gpus_per_node=8, timeout=60, placeholder_fn=placeholder)
        claims.append(time.perf_counter() - began)
        began = time.perf_counter()
        held.release()
        releases.append(time.perf_counter() - began)
    quick = slice(1, rounds + 1)  # the first claim imports the engine
    row = [statistics.median(times) for times in (claims[quick], spent[quick], spent[-3:], releases[quick])]
    print(MARK + json.dumps([1000 * seconds for seconds in row]), flush=True)


class Bench:
    """One measurement: hosts, and an engine across them."""

    def __init__(self, engine: str, hosts: int, rounds: int) -> None:
        self.engine, self.names, self.rounds = engine, NAMES[:hosts], rounds
        self.scratch = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
        (self.scratch / "home").mkdir()
        self.env = {
            "HOME": str(self.scratch / "home"),
            "PATH": ":".join(
                [str(self.scratch), str(HERE / "ssh-stand-in"), str(Path(sys.executable).parent), *SYSTEM_PATH]
            ),
            "PYTHONPATH": str(HERE.parent),
            "HOSTS_SCRATCH": str(self.scratch),
            "SAFE_GPU_DIR": str(self.scratch / "state"),
            "SAFE_GPU_DRIVER": "simulated:dgx-a100",
            "RAY_USAGE_STATS_ENABLED": "0",
            "DRAGON_RT_UID": str(os.getpid()),
        }

    def run(self) -> list[float]:
        self._tool("up", str(len(self.names)))
        try:
            output = self._ray() if self.engine == "ray" else self._dragon()
        finally:
            self._tool("down")
            shutil.rmtree(self.scratch, ignore_errors=True)
        for line in output.splitlines():
            if line.startswith(MARK):
                row: list[float] = json.loads(line.removeprefix(MARK))
                return row
        raise RuntimeError(f"{self.engine} on {len(self.names)} hosts did not work:\n{output}")

    def _tool(self, *words: str) -> None:
        subprocess.run([HERE / "hosts.sh", *words], env=self.env, stdin=subprocess.DEVNULL, check=True)

    def _on(self, host: str, *command: str, timeout: float = 120) -> str:
        with tempfile.TemporaryFile(
            "w+"
        ) as output:  # not a pipe: processes that an engine leaves running would keep it open
            subprocess.run(
                ["timeout", "-k", "2", str(timeout), str(HERE / "hosts.sh"), "run", host, *command],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            output.seek(0)
            return output.read()

    def _inside(self) -> list[str]:
        return [str(Path(__file__).resolve()), self.engine, "--inside", str(len(self.names)), f"--rounds={self.rounds}"]

    def _ray(self) -> str:
        options = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
        for number, host in enumerate(self.names):
            role = ["--address=10.77.0.1:6379"]
            if number == 0:
                role = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.scratch}/ray"]
            self._on(host, "ray", "start", *role, f"--node-ip-address=10.77.0.{number + 1}", *options)
        return self._on("hosta", sys.executable, *self._inside())

    def _dragon(self) -> str:
        # dragon-cleanup kills processes by name, and these hosts share their pid namespace with the machine.
        lines = {"nvidia-smi": "for i in 0 1 2 3 4 5 6 7; do echo GPU $i; done", "dragon-cleanup": "true"}
        for name, line in lines.items():
            (self.scratch / name).write_text(f"#!/bin/sh\n{line}\n")
            (self.scratch / name).chmod(0o755)
        prefix = "--network-prefix=^hsn0"
        nodes = {}
        passed = " ".join(f"{name}={self.env[name]}" for name in self.env if name.startswith("SAFE_GPU_"))
        for number, host in enumerate(self.names):
            text = self._on(host, "dragon-network-config-launch-helper", prefix, "--port=6565")
            nodes[str(number)] = json.loads(text[text.index("{") : text.rindex("}") + 1])
            (self.scratch / f"{host}.env").write_text(f"{passed} PATH={self.env['PATH']}")
        nodes["0"]["is_primary"] = True
        config = self.scratch / "network.json"
        config.write_text(json.dumps(nodes))
        kind = ["-w", "ssh", "-t", "tcp", f"--hostlist={','.join(self.names)}", prefix, f"--network-config={config}"]
        return self._on("hosta", "dragon", "-m", *kind, *self._inside())


def measured(engine: str, hosts: int, rounds: int, tries: int = 4) -> list[float]:
    """One row. It retries, because on few cores the agents of an engine sometimes fail to connect at the start."""
    while True:
        tries -= 1
        try:
            return Bench(engine, hosts, rounds).run()
        except RuntimeError:
            if not tries:
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("ray", "dragon"))
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4], help="numbers of hosts (1 2 4)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inside", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        measure(arguments.engine, arguments.inside, arguments.rounds)
        return
    print(f"{arguments.engine}, 8 GPUs per host, ms\n")
    print("| hosts | claim | leases | slow | release |\n|---|---|---|---|---|", flush=True)
    for hosts in arguments.hosts:
        row = measured(arguments.engine, hosts, arguments.rounds)
        print(f"| {hosts} | {' | '.join(f'{value:.0f}' for value in row)} |", flush=True)


if __name__ == "__main__":
    main()
