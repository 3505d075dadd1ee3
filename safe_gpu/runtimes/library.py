"""A vendor's library, as a claim asks it: whether this process uses it, which GPUs it shows, and what holds one.

A library reads the variables that choose its GPUs once, when it is initialised. After that the choice is fixed in the
process. The questions whether it is in use must not initialise it, so they go only to a library that is mapped already.
In the process of a claim, only :class:`HeldGpu` initialises one.

None of this has run on AMD or Intel hardware. ``tests/gpu/test_amd.py`` checks there what is taken for granted here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..errors import CudaInitializedError, NoDriverError
from ..gpus.devices import Gpu
from ..host.procfs import is_forked, open_files
from .calls import NO_DEVICE, NO_GPU, Calls, CudaCallError
from .child import visible_in_child

if TYPE_CHECKING:
    import ctypes

HELD_BYTES = 1 << 16
"""The size of the allocation that holds a GPU. Drivers round it up to their own granularity."""


class Runtime:
    """What a claim asks of the library through which programs use its GPUs.

    This class answers for GPUs that no library knows: simulated ones. A GPU that the library shows is named by a text
    that only :meth:`is_same` compares with a GPU of the driver.

    Attributes:
        title: what messages call the library.
        asks_library: whether there is such a library, and the GPUs of the driver are those that it sees here.
    """

    title: ClassVar[str] = "CUDA"
    asks_library: ClassVar[bool] = False

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """Return the GPUs that the library sees in this process, in the order of its ordinals; None while it is not
        initialised. This never initialises it.

        Raises:
            CudaInitializedError: it is initialised but its GPUs cannot be listed (``visible`` is empty), or this
                process was forked from one in which it was.
        """
        return None

    def shown_at(self, ordinal: int) -> str | None:
        """Return the GPU with this ordinal in this process; "" if there is none, None while the library is not
        initialised or cannot be asked."""
        return None

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """Return whether a GPU that the library shows is this GPU of the driver."""
        return shown == gpu.uuid

    def contexts(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs on which this process has a context that is known to the library."""
        return frozenset()

    def visible_in_child(self, env: Mapping[str, str] | None = None, patience: float | None = None) -> tuple[str, ...]:
        """Return the GPUs that the library shows to a child process.

        Args:
            env: its environment; None is that of this process.
            patience: seconds that it may take; None is as long as the start of the library may take on any host.

        Raises:
            NoDriverError: it could not be asked.
        """
        raise NoDriverError("these GPUs are simulated", driver="simulated")

    def default_placeholder(self, logger: Any = None) -> Any:
        """Return the placeholder that holds these GPUs when the caller names none."""
        raise NotImplementedError


class Library(Calls, Runtime):
    """A library whose functions are called here.

    A subclass says how the library is started, and how it names, holds and frees a GPU.

    Attributes:
        counting: the function that counts the GPUs.
        device_files: how the names begin, below the root, of the files that every process opens which uses it; "" where
            the library itself says whether it is initialised.
        opened: a file that it opens when it is initialised, by which a forked child knows that it was.
        patience: seconds to wait for a child. Without persistence mode, the start of CUDA on eight GPUs can take over
            20 s.
        initialized_in: the pid of the process in which safe_gpu initialised it; another one in a forked child.
    """

    asks_library = True
    counting: ClassVar[str]
    device_files: ClassVar[str] = ""
    opened: ClassVar[str] = ""
    patience: ClassVar[float] = 120.0

    def __init__(self, handle: ctypes.CDLL | None = None) -> None:
        super().__init__(handle)
        self.initialized_in: int | None = None

    # What a subclass says

    def start(self) -> None:
        """Call what initialises the library.

        Raises:
            CudaCallError: it cannot be initialised.
        """
        raise NotImplementedError

    def shown(self, ordinal: int) -> str:
        """Return the text that names the GPU with this ordinal.

        Raises:
            CudaCallError: with code 100 or 101 if there is no such GPU.
        """
        raise NotImplementedError

    def allocate(self, ordinal: int) -> Any:
        """Allocate ``HELD_BYTES`` on a GPU; return what :meth:`free` takes. On failure nothing is kept.

        Raises:
            CudaCallError: the library refused.
        """
        raise NotImplementedError

    def free(self, held: Any) -> None:
        """Free what :meth:`allocate` returned."""
        raise NotImplementedError

    # What it shows, and what holds one of its GPUs

    def initialize(self) -> None:
        """Initialise the library in this process.

        Raises:
            CudaCallError: it cannot be initialised.
            CudaInitializedError: this process was forked from one in which it was.
        """
        self.refuse_if_forked()
        try:
            self.start()
        except CudaCallError as err:
            self._is_not_initialized(err)
            raise
        self.initialized_in = os.getpid()

    def count(self) -> int:
        """Return how many GPUs the library sees in this process.

        Raises:
            CudaCallError: it is not initialised, or fails.
        """
        import ctypes

        number = ctypes.c_int(0)
        self.call(self.counting, ctypes.byref(number))
        return number.value

    def all_shown(self) -> tuple[str, ...]:
        """Return the GPUs that it sees in this process, in the order of its ordinals."""
        return tuple(self.shown(ordinal) for ordinal in range(self.count()))

    def hold(self, device_no: int) -> HeldGpu:
        """Initialise the library if necessary, and hold the GPU with this ordinal; errors as of :class:`HeldGpu`."""
        return HeldGpu(self, device_no)

    # Whether this process uses it

    def has_opened(self) -> bool | None:
        """Return whether this process has a device file of the library open; None if nothing tells."""
        if not self.device_files:
            return None
        files = open_files("self")
        if files is None:
            return None
        root = os.environ.get("SAFE_GPU_FSROOT") or "/"
        beginnings = (f"/{self.device_files}", os.path.join(root, self.device_files))
        return any(path.startswith(beginnings) for path in files.values())

    def is_in_use(self) -> bool:
        """Return whether the library is mapped, and this process may have initialised it."""
        return self.has_opened() is not False and self.is_mapped()

    def _is_not_initialized(self, err: CudaCallError) -> bool:
        """Return whether the error means that it is not initialised, and was not in the process that forked this
        one."""
        if err.code not in self.not_initialized_codes:
            return False
        if is_forked():
            inherited = open_files("self") or {}
            if self.opened in inherited.values():
                self._refuse_fork(err)
        return True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        if self.is_in_use():
            self.refuse_if_forked()
            try:
                return self.all_shown()
            except CudaCallError as err:
                if err.code == NO_GPU:
                    return ()
                if not self._is_not_initialized(err):
                    problem = f"{self.title} is in use in this process but fails ({err}): claim GPUs in a new process"
                    raise CudaInitializedError(problem) from err
        self._refuse_if_torch_uses_it()
        return None

    def shown_at(self, ordinal: int) -> str | None:
        if not self.is_in_use():
            return None
        try:
            return self.shown(ordinal)
        except CudaCallError as err:
            if err.code in (NO_GPU, NO_DEVICE):
                return ""
            return None

    def refuse_if_forked(self) -> None:
        """Refuse to use the library in a process that was forked from one in which safe_gpu had initialised it."""
        if self.initialized_in not in (None, os.getpid()):
            self._refuse_fork()

    def _refuse_fork(self, cause: Exception | None = None) -> NoReturn:
        raise CudaInitializedError(
            f"{self.title} was initialised in the process from which this one was forked, and a forked child cannot "
            "use it: start the child with multiprocessing's 'spawn' (or 'forkserver') method, or claim before "
            f"{self.title} is used"
        ) from cause

    def _refuse_if_torch_uses_it(self) -> None:
        """Raise if PyTorch has initialised CUDA, or cannot because this process was forked; libcuda may show neither.

        ``is True`` keeps mock modules of users' tests, whose attributes are all truthy, from being taken for PyTorch.
        """
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None:
            return
        if getattr(cuda, "_is_in_bad_fork", bool)() is True:
            self._refuse_fork()
        if getattr(cuda, "is_initialized", bool)() is True:
            raise CudaInitializedError(
                "PyTorch has CUDA initialised in this process, so its choice of GPUs is fixed: claim GPUs before the "
                "first use of torch.cuda (is_available and device_count included)"
            )

    # In a child process

    def visible_in_child(self, env: Mapping[str, str] | None = None, patience: float | None = None) -> tuple[str, ...]:
        if env is None:
            env = os.environ
        if patience is None:
            patience = self.patience
        return visible_in_child(self.title, env, patience)


class HeldGpu:
    """A small allocation on one GPU, by which other processes see it in use.

    It belongs to the process that made it: :meth:`release` in a forked child does nothing.

    Attributes:
        device_no: the ordinal of the GPU.
        uuid: its UUID, or what else names it where the library has none.
        allocation: what the library returned for it; None once it is freed.
    """

    def __init__(self, library: Library, device_no: int) -> None:
        """Initialise the library if necessary, and hold the GPU with this ordinal. On failure nothing is kept.

        Raises:
            CudaCallError: the library refused.
            CudaInitializedError: this process was forked from one in which it was initialised.
            NoDriverError: this host has none.
        """
        library.load().initialize()
        self.device_no = device_no
        self.uuid: str = library.shown(device_no)
        self._library = library
        self._pid = os.getpid()
        self.allocation: Any = library.allocate(device_no)

    def release(self) -> None:
        """Free the allocation. The library stays initialised. A second call does nothing.

        Raises:
            CudaCallError: the library refused.
        """
        allocation = self.allocation
        self.allocation = None
        if allocation is not None and self._pid == os.getpid():
            self._library.free(allocation)
