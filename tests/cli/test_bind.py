"""``safe-gpu bind`` for ranks that a script starts, and the two names of its option, which ``run`` has too."""

from typing import Any

import pytest

from safe_gpu.cli.commands import parse
from safe_gpu.drivers.presets import preset


@pytest.mark.parametrize(
    ("options", "environment", "warned"),
    [
        ("", {}, True),
        ("", {"LOCAL_RANK": "2"}, False),
        ("", {"CUDA_VISIBLE_DEVICES": "3"}, False),
        ("", {"CUDA_VISIBLE_DEVICES": "3,5"}, True),
        ("--ordinal 2", {}, False),
        ("--gpu 0-7", {}, False),
    ],
)
def test_a_rank_without_a_number_gets_all_cpus_and_is_told(
    command: Any, options: str, environment: dict[str, str], warned: bool
) -> None:
    """As where a launcher sets LOCAL_RANK behind the binding: ``safe-gpu bind -- env LOCAL_RANK=2 ./train``."""
    done = command.run("bind", *options.split(), "--", "env", "LOCAL_RANK=2", "true", env=environment)
    assert done.returncode == 0
    assert ("no local rank is set" in done.stderr) == ("--ordinal" in done.stderr) == warned
    if warned:
        assert f"{len(environment.get('CUDA_VISIBLE_DEVICES', '0,1,2,3,4,5,6,7').split(','))} GPUs are" in done.stderr


@pytest.mark.parametrize("verb", ["run", "bind"])
def test_either_name_of_the_option_means_the_same(verb: str, ask: Any) -> None:
    for mode in ("none", "socket", "unique_contiguous"):
        for name in ("--affinity", "--mode"):
            assert parse([verb, name, mode, "--", "true"]).affinity == mode
    shown = ask("help", verb).stdout
    assert ("--affinity M" in shown, "--mode M" in shown) == (True, False)


@pytest.mark.parametrize(("mode", "count"), [("single", 1), ("none", 0)])
def test_run_and_bind_take_every_mode(command: Any, mode: str, count: int) -> None:
    code = "import os; print(len(os.sched_getaffinity(0)))"
    everything = int(command.run("run", "--affinity", "none", "--", "python3", "-c", code).stdout)
    for words in (("run", "--affinity", mode), ("bind", "--mode", mode, "--ordinal", "0")):
        done = command.run(*words, "--", "python3", "-c", code)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) in (count or everything, everything)


def test_the_host_of_the_article() -> None:
    """Its lists: ``gpus_per_numa_node`` and ``cpus_per_numa_node``, and the bus ids that it shows."""
    host = preset("p4d")
    assert [gpu.numa_node for gpu in host.gpus()] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [gpu.pci_bus_id for gpu in host.gpus()[:2]] == ["0000:10:1c.0", "0000:10:1d.0"]
    nodes = host.topology.nodes
    assert nodes[0] == {*range(24), *range(48, 72)}
    assert nodes[1] == {*range(24, 48), *range(72, 96)}
