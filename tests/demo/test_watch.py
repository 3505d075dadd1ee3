"""The process that asks the driver again and again who is on which GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from safe_gpu.demo.referee import Watch
from safe_gpu.devices import HostSnapshot
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.errors import NoDriverError


def test_it_sees_processes_that_meet(child: Any) -> None:
    resident, newcomer = child("listen()").pid, child("listen()").pid
    driver = SimulatedDriver("dgx-a100")
    first, second, third = (gpu.uuid for gpu in driver.idle.gpus[:3])
    with driver.occupy(first), driver.occupy(first, pid=resident):
        watch = Watch(lambda: driver, 0.001)
        with driver.occupy(second), driver.occupy(first, pid=newcomer), driver.occupy(third, kind="graphics"):
            watched = watch.stop()
    assert watched.looks > 0
    assert watched.trouble == ""
    assert watched.shown == {(first, newcomer), (second, os.getpid())}
    (sighting,) = watched.sightings
    assert sighting.uuid == first
    assert sighting.newcomers == {newcomer}
    assert sighting.residents == {resident, os.getpid()}
    assert sighting.concerns(frozenset({newcomer}))
    assert not sighting.concerns(frozenset({resident}))


class Played:
    """A driver whose devices and failures a test decides; each look takes the next of ``snapshots``."""

    def __init__(self, *snapshots: HostSnapshot) -> None:
        self._snapshots = list(snapshots)

    def snapshot(self) -> HostSnapshot:
        if not self._snapshots:
            raise NoDriverError("it went away")
        return self._snapshots.pop(0)

    def close(self) -> None:
        pass


def watched(*snapshots: HostSnapshot) -> Any:
    watch = Watch(lambda: Played(*snapshots), 0.0)  # type: ignore[arg-type,return-value]
    return watch.stop()


def test_a_gpu_with_mig_on_lists_all_its_instances_processes_and_none_of_them_meet() -> None:
    driver = SimulatedDriver("mig-h100")
    parent, first, second = driver.idle.gpus[:3]
    with driver.occupy(first.uuid, pid=1), driver.occupy(second.uuid, pid=2):
        now = driver.snapshot()
    both = tuple(process for gpu in now.gpus[1:3] for process in gpu.processes or ())
    now = HostSnapshot((replace(parent, processes=both), *now.gpus[1:]))
    found = watched(driver.idle, *[now] * 1000)
    assert found.shown == {(first.uuid, 1), (second.uuid, 2)}
    assert found.sightings == ()


def test_a_driver_that_goes_away_is_reported() -> None:
    idle = SimulatedDriver("dgx-a100").idle
    assert watched().trouble == "it went away"
    assert watched(idle).trouble == "it went away"


def test_a_watch_that_was_killed_says_so() -> None:
    watch = Watch(lambda: SimulatedDriver("dgx-a100"), 0.001)
    os.kill(watch._child.pid, 9)
    assert "died" in watch.stop().trouble


def test_a_driver_that_kills_its_watch_at_once() -> None:
    assert "died" in Watch(lambda: os._exit(1), 0.001).stop().trouble
