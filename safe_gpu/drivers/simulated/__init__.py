"""Hosts without GPUs, to try things on: a driver whose processes are locked files in the state directory.

It simulates the driver only. Who is on which GPU is as real as elsewhere: a context is an open, locked file, and the
kernel closes it when its process ends in whatever way, or becomes another program.

* ``cards``: a card, and how it is divided while the host runs.
* ``presets``: the hosts, as an idle driver reports their devices and the kernel their CPUs.
* ``tree``: where the files are.
* ``contexts``: the files, of which each living process on a GPU holds one.
* ``driver``: what the driver of such a host answers.
"""

from .cards import WHOLE
from .contexts import SimulatedContext
from .driver import SimulatedDriver, SimulatedPlaceholder
from .presets import PRESETS, Preset, find_preset

__all__ = ["PRESETS", "WHOLE", "Preset", "SimulatedContext", "SimulatedDriver", "SimulatedPlaceholder", "find_preset"]
