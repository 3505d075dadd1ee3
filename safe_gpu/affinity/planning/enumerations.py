"""The enumerations of NVIDIA gpu_affinity, with the same members."""

from enum import Enum


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Mode(_Text):
    """The modes of gpu_affinity, with what they give two GPUs on a node of eight cores, 0 to 7.

    ===================  =======  =======  ==========================================================
    mode                 GPU 0    GPU 1
    ===================  =======  =======  ==========================================================
    all                  0-7      0-7      every core of the node or socket; its GPUs share them
    single               0        0        the first core; its GPUs share it
    single_unique        0        1        one core that no other GPU gets
    unique_interleaved   0,2,4,6  1,3,5,7  an equal share of the cores, dealt one by one
    unique_contiguous    0-3      4-7      an equal share of the cores, in one piece
    ===================  =======  =======  ==========================================================

    NVIDIA recommends unique_contiguous for training on DGX servers: there one job has all GPUs, and its ranks divide
    the cores. It is the default of set_affinity. A claim does not know who has the other GPUs, and a core set aside for
    a GPU that nobody uses would idle. So its default is the mode node, whose CPUs are those of all.
    """

    ALL = "all"
    SINGLE = "single"
    SINGLE_UNIQUE = "single_unique"
    UNIQUE_INTERLEAVED = "unique_interleaved"
    UNIQUE_CONTIGUOUS = "unique_contiguous"


class Scope(_Text):
    """Which CPUs count as near a GPU: those of its NUMA node, or those of its processor socket."""

    NODE = "node"
    SOCKET = "socket"


class Multithreading(_Text):
    """All hardware threads of a physical core, or only the lowest allowed one."""

    ALL_LOGICAL = "all_logical"
    SINGLE_LOGICAL = "single_logical"
