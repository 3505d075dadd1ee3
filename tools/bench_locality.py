#!/usr/bin/env python3
"""Measures the gain of binding next to the GPU on this host, as ratios within one run.

There are two measurements. Each runs in a new process that is bound, or not, before it allocates memory:

* copies from page-locked host memory to the GPU, in GB/s;
* a data-loading loop: worker processes generate random images, the main process copies them to the GPU, in batches/s.

The variant "far" is bound to the node furthest from the GPU, the worst placement of an unbound process. The variants
run in turns, and the medians of the rounds are compared. It needs PyTorch and a GPU; without them it prints a message
and exits with 69. On a shared host run it as ``safe-gpu run --affinity none -- tools/bench_locality.py``, so that no
other process uses the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from safe_gpu.affinity import AffinityOptions, HostTopology, bind_near, bind_process, read_topology
from safe_gpu.affinity.resolve_gpus import visible_indices
from safe_gpu.cpulist import format_cpulist
from safe_gpu.drivers import open_driver
from safe_gpu.errors import SafeGpuError

if TYPE_CHECKING:
    from safe_gpu.devices import Gpu
    from safe_gpu.drivers.base import Driver

NO_GPU = 69


def the_gpu() -> tuple[Driver, Gpu]:
    """The first GPU of CUDA_VISIBLE_DEVICES, which is device 0 of CUDA."""
    driver = open_driver()
    snapshot = driver.snapshot()
    index = visible_indices(snapshot, os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    return driver, next(gpu for gpu in snapshot.physical if gpu.index == index)


def far_node(topology: HostTopology, gpu_index: int) -> int | None:
    """The node with CPUs that is furthest from the GPU; None on a host of one node."""
    here = topology.node_of(topology.gpu(gpu_index))
    others = [node for node, cpus in topology.nodes.items() if cpus and node != here]
    if here is None or not others:
        return None
    row = topology.distances.get(here, {})
    return max(others, key=lambda node: (row.get(node, 0), node))


def bind(variant: str) -> str:
    if variant == "unbound":
        return "not bound"
    driver, gpu = the_gpu()
    if variant == "near":
        return str(bind_near([gpu], driver, options=AffinityOptions(mode="node"), memory="bind"))
    topology = read_topology(driver=driver)
    node = far_node(topology, gpu.index)
    assert node is not None
    return str(bind_process(topology.nodes[node], [node], "bind"))


def worker(variant: str, device: str, seconds: float, loaders: int) -> dict[str, Any]:
    bound = bind(variant)
    import torch
    from torch.utils.data import DataLoader, Dataset

    on_gpu = device == "cuda"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=on_gpu).random_()
    target = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    copies = 0
    for _ in range(3):
        target.copy_(source, non_blocking=True)
    wait()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        wait()
        copies += 4
    bandwidth = copies * source.numel() / (time.perf_counter() - start) / 1e9

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, index: int) -> Any:
            return torch.randn(3, 512, 512), index % 1000

    # Forked workers inherit the mask and the memory policy of this process.
    batches = iter(
        DataLoader(Images(), batch_size=32, num_workers=loaders, pin_memory=on_gpu, multiprocessing_context="fork")
    )
    model = torch.nn.Conv2d(3, 8, 7, stride=8).to(device)

    def step() -> None:
        images, _ = next(batches)
        with torch.no_grad():
            model(images.to(device, non_blocking=True)).mean()

    for _ in range(loaders + 2):
        step()
    wait()
    done = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        step()
        done += 1
    wait()
    return {"bandwidth": bandwidth, "batches": done / (time.perf_counter() - start), "bound": bound}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement")
    parser.add_argument("--loaders", type=int, default=4, help="data-loading processes")
    parser.add_argument("--cpu", action="store_true", help="run without CUDA: the copies stay in host memory")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    if options.variant:
        print(json.dumps(worker(options.variant, device, options.seconds, options.loaders)))
        return 0
    try:
        import torch
    except ImportError:
        print("This benchmark needs PyTorch: pip install torch", file=sys.stderr)
        return NO_GPU
    try:
        driver, gpu = the_gpu()
        topology = read_topology(driver=driver)
    except SafeGpuError as err:
        print(f"This benchmark needs an NVIDIA GPU: {err}", file=sys.stderr)
        return NO_GPU
    # Not torch.cuda.is_available(): only the processes that measure use the GPU, and they report any error.
    if not options.cpu and torch.version.cuda is None:
        print("This benchmark needs a PyTorch that is built with CUDA; this one is not", file=sys.stderr)
        return NO_GPU
    place = topology.gpu(gpu.index)
    print(
        f"GPU {gpu.index} {gpu.name} {gpu.pci_bus_id}: node {topology.node_of(place)}, "
        f"CPUs {format_cpulist(topology.node_set(place))} (by {place.source or 'nothing'}); "
        f"{len(topology.nodes)} NUMA nodes, {len(topology.cpus)} CPUs"
    )
    variants = ["unbound", "near"]
    if far_node(topology, gpu.index) is None:
        print("This host has one NUMA node with CPUs, so all CPUs are near: expect ratios close to 1.")
    else:
        variants.append("far")
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # so that device 0 of CUDA is the GPU named above
    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    for _ in range(options.rounds):
        for variant in variants:
            command = [sys.executable, __file__, "--variant", variant, "--seconds", str(options.seconds)]
            command += ["--loaders", str(options.loaders), *(["--cpu"] if options.cpu else [])]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                print(f"{variant} failed:\n{done.stderr}", file=sys.stderr)
                return 1
            results[variant].append(json.loads(done.stdout.splitlines()[-1]))
    for what, unit in (("bandwidth", "GB/s host to device"), ("batches", "batches/s")):
        medians = {variant: statistics.median(found[what] for found in results[variant]) for variant in variants}
        for variant in variants:
            spread = [found[what] for found in results[variant]]
            print(
                f"{variant:8} {medians[variant]:8.2f} {unit} ({min(spread):.2f} to {max(spread):.2f}), "
                f"{medians[variant] / medians['unbound']:.2f} of unbound"
            )
    print(f"near: {results['near'][0]['bound']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
