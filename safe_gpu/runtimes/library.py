"""A vendor's library, as a claim asks it: whether this process uses it, which GPUs it shows, and what holds one.

A library reads the variables that choose its GPUs once, when it is initialised. After that the choice is fixed in the
process. The questions whether it is in use must not initialise it, so they go only to a library that is mapped already.
In the process of a claim, only :class:`Held` initialises one.

Root loads nothing that another user could have put there. dlopen(3) looks through LD_LIBRARY_PATH first, which root may
have from a user: in a scheduler's prolog, or under sudo.

None of this has run on AMD or Intel hardware. ``tests/gpu/test_amd.py`` checks there what is taken for granted here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ..errors import CudaInitializedError, NoDriverError, SafeGpuError
from ..gpus.devices import Gpu
from ..gpus.vendors import VENDORS
from ..host.foreign_files import read_start
from ..host.procfs import is_forked, lines_of, open_files
from ..host.programs import Failed, TooLate, call_in_child, is_root, others_can_change

if TYPE_CHECKING:
    import ctypes

# Starts the lines of a child's answer. Libraries may print other lines.
_MARK = "cuda-sees "

HELD_BYTES = 1 << 16
"""The size of the allocation that holds a GPU. Drivers round it up to their own granularity."""

# What CUDA and HIP answer if they see no GPU at all, and if they see none with an ordinal.
_NO_GPU, _NO_DEVICE = 100, 101

_DIRECTORIES = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib")
_CACHE = "/etc/ld.so.cache"
_CACHE_LIMIT = 1 << 24


class CudaCallError(SafeGpuError):
    """A call of a vendor's library failed.

    Attributes:
        call: the function, "cuInit".
        code: its result, a CUresult or a hipError_t.
        name: "CUDA_ERROR_NO_DEVICE", where the library knows one.
    """

    def __init__(self, message: str = "", *, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


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


class Library(Runtime):
    """A library with its functions by name. Every handle is passed as the C type that its header declares.

    A subclass says how the library is started, and how it names, holds and frees a GPU.

    Attributes:
        names: the files to load, in this order.
        counting: the function that counts the GPUs.
        vendor, install: in messages: what it belongs to, and how to get it.
        device_files: how the names begin, below the root, of the files that every process opens which uses it; "" where
            the library itself says whether it is initialised.
        asleep: what it answers while it is not initialised, by code.
        opened: a file that it opens when it is initialised, by which a forked child knows that it was.
        patience: seconds to wait for a child. Without persistence mode, the start of CUDA on eight GPUs can take over
            20 s.
        initialized_in: the pid of the process in which safe_gpu initialised it; another one in a forked child.
    """

    asks_library = True
    names: ClassVar[Sequence[str]]
    counting: ClassVar[str]
    vendor: ClassVar[str]
    install: ClassVar[str]
    device_files: ClassVar[str] = ""
    patience: ClassVar[float] = 120.0
    asleep: ClassVar[Mapping[int, str]] = {}
    opened: ClassVar[str] = ""

    def __init__(self, handle: ctypes.CDLL | None = None) -> None:
        self.initialized_in: int | None = None
        self._handle = handle

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

    def texts(self, code: int) -> tuple[str, str]:
        """Return the name of a result, and what it means, "" if the library does not say."""
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

    # Calls

    def ask(self, name: str, *arguments: Any) -> int:
        """Call a function and return its result without checking it. One with a version suffix is looked up without it
        too.

        Raises:
            CudaCallError: the library has no such function.
        """
        for symbol in (name, name.removesuffix("_v2")):
            function = getattr(self._handle, symbol, None)
            if function is not None:
                return int(function(*arguments))
        raise CudaCallError(f"{self.names[0]} has no {name}: {self.vendor} is too old", call=name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            CudaCallError: its result is not 0, or the library has no such function.
        """
        if code := self.ask(name, *arguments):
            title, meaning = (self.asleep[code], "") if code in self.asleep else self.texts(code)
            call = name.removesuffix("_v2")
            message = f"{call} failed with {title} ({code})" + (f": {meaning}" if meaning else "")
            raise CudaCallError(message, call=call, code=code, name=title)

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
            self._is_asleep(err)
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

    def hold(self, device_no: int) -> Held:
        """Initialise the library if necessary, and hold the GPU with this ordinal; errors as of :class:`Held`."""
        return Held(self, device_no)

    # Where it is

    def load(self) -> Library:
        """Map the library into this process, which does not initialise it. A copy that is mapped already is used.

        Raises:
            NoDriverError: this host has none.
        """
        troubles: list[OSError] = []
        for name in () if self.is_mapped() else self.files():
            try:
                self._handle = load_file(name)
                break
            except OSError as err:
                troubles.append(err)
        if self._handle is None:
            problem = f"{self.title}'s library cannot be loaded ({troubles[0]}): {self.install}"
            raise NoDriverError(problem, driver=self.title.lower()) from troubles[0]
        return self

    def files(self) -> Sequence[str]:
        """Return the files to load, in this order."""
        return self.names

    def is_mapped(self) -> bool:
        """Return whether the library is mapped into this process."""
        for name in self.mapped_files() if self._handle is None else ():
            import ctypes

            with suppress(OSError):
                self._handle = ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
                break
        return self._handle is not None

    def mapped_files(self) -> Sequence[str]:
        """Return the names under which the library may be mapped into this process, its file first; none if it is not.

        Reading the maps is faster than importing ctypes.
        """
        beginning, told = os.fsencode(f"/{self.names[0].partition('.so')[0]}.so"), False
        for line in lines_of("/proc/self/maps"):
            told = True
            if beginning in line:
                return (os.fsdecode(line.rstrip(b"\n").split(None, 5)[-1]), *self.names)
        return () if told else self.names

    # Whether this process uses it

    def has_opened(self) -> bool | None:
        """Return whether this process has a device file of the library open; None if nothing tells."""
        files = open_files("self") if self.device_files else None
        if files is None:
            return None
        places = (f"/{self.device_files}", os.path.join(os.environ.get("SAFE_GPU_FSROOT") or "/", self.device_files))
        return any(path.startswith(places) for path in files.values())

    def is_in_use(self) -> bool:
        """Return whether the library is mapped, and this process may have initialised it."""
        return self.has_opened() is not False and self.is_mapped()

    def _is_asleep(self, err: CudaCallError) -> bool:
        """Return whether the error means that it is not initialised, and was not in the process that forked this
        one."""
        asleep = err.code in self.asleep
        if asleep and is_forked() and self.opened in (open_files("self") or {}).values():
            self._refuse_fork(err)
        return asleep

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        if self.is_in_use():
            self.refuse_if_forked()
            try:
                return self.all_shown()
            except CudaCallError as err:
                if err.code == _NO_GPU:
                    return ()
                if not self._is_asleep(err):
                    problem = f"{self.title} is in use in this process but fails ({err}): claim GPUs in a new process"
                    raise CudaInitializedError(problem) from err
        self._refuse_if_torch_uses_it()
        return None

    def shown_at(self, ordinal: int) -> str | None:
        try:
            return self.shown(ordinal) if self.is_in_use() else None
        except CudaCallError as err:
            return "" if err.code in (_NO_GPU, _NO_DEVICE) else None

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
        env = os.environ if env is None else env
        patience = self.patience if patience is None else patience
        try:
            answer = call_in_child("safe_gpu.runtimes.library tell", self.title, env=env, timeout=patience)
        except TooLate:
            slow = next(vendor.is_slow for vendor in VENDORS.values() if vendor.library == self.title)
            silent = f"{self.title} did not answer within {patience:g} s in a child process"
            problem = f"{silent}: {slow}; or the driver hangs, see dmesg"
        except (Failed, OSError) as err:
            problem = f"{self.title} could not be asked in a child process: {err}"
        else:
            return tuple(line.removeprefix(_MARK) for line in answer.split("\n") if line.startswith(_MARK))
        raise NoDriverError(problem, driver=self.title.lower())


def tell(title: str) -> int:
    """Print, in a child process, what names the GPUs that the library with this title shows, or an error to stderr;
    return an exit status."""
    from importlib import import_module

    from .causes import likely_cause

    library = getattr(import_module(f".{title.lower()}", __package__), title)
    shown: tuple[str, ...] = ()
    try:
        library.load().initialize()
        shown = library.all_shown()
    except SafeGpuError as err:
        if getattr(err, "code", 0) != _NO_GPU:
            print(f"{err}{likely_cause(err)}", file=sys.stderr)
            return 1
    print(*(_MARK + one for one in shown), sep="\n")
    return 0


class Held:
    """A small allocation on one GPU, by which other processes see it in use.

    It belongs to the process that made it: :meth:`release` in a forked child does nothing.

    Attributes:
        device_no: the ordinal of the GPU.
        uuid: its UUID, or what else names it where the library has none.
    """

    def __init__(self, library: Library, device_no: int) -> None:
        """Initialise the library if necessary, and hold the GPU with this ordinal. On failure nothing is kept.

        Raises:
            CudaCallError: the library refused.
            CudaInitializedError: this process was forked from one in which it was initialised.
            NoDriverError: this host has none.
        """
        library.load().initialize()
        self.device_no, self.uuid = device_no, library.shown(device_no)
        self._library, self._pid = library, os.getpid()
        self._held = library.allocate(device_no)

    def release(self) -> None:
        """Free the allocation. The library stays initialised. A second call does nothing.

        Raises:
            CudaCallError: the library refused.
        """
        held, self._held = self._held, None
        if held is not None and self._pid == os.getpid():
            self._library.free(held)


def load_file(name: str) -> ctypes.CDLL:
    """Load a shared library by its name; for root, from a place that only root can change.

    Raises:
        OSError: there is none, or only one that other users can change.
    """
    import ctypes

    places = _search_path() if is_root() else []
    doubtful = [place for place in places if "$" in place or others_can_change(place, within=True)]
    if not doubtful:
        return ctypes.CDLL(name)
    for path in _candidates(name):
        real = os.path.realpath(path)
        if os.path.isfile(real) and not others_can_change(real):
            with suppress(OSError):  # of another ELF class
                return ctypes.CDLL(real)
    raise OSError(
        f"{name}: not found where root may load it from, since other users can change {doubtful[0]} on LD_LIBRARY_PATH"
    )


def _search_path() -> list[str]:
    """Return the directories of LD_LIBRARY_PATH, as it is and as it was when this process was started."""
    entries = b"\0" + (read_start("/proc/self/environ") or b"")
    began = [os.fsdecode(one.partition(b"\0")[0]) for one in entries.split(b"\0LD_LIBRARY_PATH=")[1:]]
    values = filter(None, (os.environ.get("LD_LIBRARY_PATH"), *began))
    return list(dict.fromkeys(place or "." for value in values for place in value.replace(";", ":").split(":")))


def _candidates(name: str) -> Iterator[str]:
    """Files of that name in the order of dlopen(3): LD_LIBRARY_PATH, the loader's cache, the usual directories."""
    yield from (os.path.join(place, name) for place in _search_path() if not others_can_change(place))
    cache = read_start(_CACHE, _CACHE_LIMIT) or b""  # its table of strings has paths (glibc's dl-cache.h)
    yield from map(os.fsdecode, re.findall(rb"/[^\0]*/" + re.escape(os.fsencode(name)) + rb"(?=\0)", cache))
    yield from (os.path.join(place, name) for place in _DIRECTORIES)
