"""CPU and memory binding next to GPUs: plan CPU shares of a host, bind, and report where processes run.

Nothing here claims a GPU or initialises CUDA.
"""

from ..topology.host import HostTopology

__all__ = ["HostTopology"]
