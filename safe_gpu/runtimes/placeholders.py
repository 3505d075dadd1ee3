"""Placeholders: a small allocation on a GPU, by which other tools see it in use.

A placeholder is a callable that takes ``device_no`` (0-based, as CUDA numbers the GPUs after CUDA_VISIBLE_DEVICES) and
returns the object that holds the GPU. Two methods are optional. ``prepare()`` is called before any lock is taken. It
does the slow part that must not touch a GPU, such as importing a framework. ``release(thing)`` is called on release.
The functions :func:`prepare`, :func:`allocate`, :func:`release` and :func:`holds_gpu` accept a callable with or without
these methods.

``CudaPlaceholder`` of :mod:`~safe_gpu.runtimes.cuda` is the default. It needs no package, shares its context with the
frameworks of the same process, and frees everything on release. The placeholders here initialise their framework before
the claim returns.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar

from ..errors import MissingPackageError, PlaceholderError, SafeGpuError, package_logger
from ..gpus.devices import ComputeMode, Gpu
from .calls import CudaCallError
from .library import HeldGpu, Library

Placeholder = Callable[[int], Any]
"""What a claim requires of a placeholder. The methods ``prepare()`` and ``release(thing)`` are optional."""


# ---------------------------------------------------------------------------------------------------------------------
# What a claim calls


def prepare(placeholder: Placeholder) -> None:
    """Call the placeholder's ``prepare()``, if it has one.

    Raises:
        MissingPackageError: a framework is missing. PlaceholderError: it is a class rather than an instance, or
            ``prepare()`` failed otherwise.
    """
    if isinstance(placeholder, type) and issubclass(placeholder, Base):
        name = placeholder.__name__
        raise PlaceholderError(f"placeholder_fn is the class {name}, which would hold no GPU: pass {name}() instead")
    method = getattr(placeholder, "prepare", None)
    if not callable(method):
        return
    try:
        method()
    except SafeGpuError:
        raise
    except Exception as err:
        raise PlaceholderError(f"{name_of(placeholder)} could not be prepared: {_first_line(err)}") from err


def allocate(placeholder: Placeholder, device_no: int, hold: Placeholder | None = None) -> Any:
    """Put the placeholder on the GPU that CUDA knows as ``device_no`` and return the object that holds it.

    Args:
        hold: does it, in place of the call of the placeholder.

    Raises:
        PlaceholderError: it failed. The message gives the likely cause; ``__cause__`` is the original error. Errors of
            this package that are no failed call of a library stay what they are.
    """
    if hold is None:
        hold = placeholder
    try:
        return hold(device_no)
    except Exception as err:
        if isinstance(err, SafeGpuError) and not isinstance(err, CudaCallError):
            raise
        from .causes import likely_cause

        title = getattr(getattr(placeholder, "library", None), "title", "CUDA")
        what = f"{name_of(placeholder)} could not hold {title} device {device_no}"
        raise PlaceholderError(f"{what}: {_first_line(err)}{likely_cause(err)}", device_no=device_no) from err


def release(placeholder: Placeholder, thing: Any) -> None:
    """Call the placeholder's ``release()``, if it has one. Otherwise the caller's reference was what held the GPU.

    An error is logged and not raised, because the rest of the claim must still be released.
    """
    method = getattr(placeholder, "release", None)
    if not callable(method):
        return
    try:
        method(thing)
    except Exception as err:
        logger = getattr(placeholder, "logger", None) or package_logger()
        logger.warning("%s could not release its GPU: %s", name_of(placeholder), _first_line(err))


def holds_gpu(placeholder: Placeholder) -> bool:
    """Return whether the placeholder occupies the GPU, so that the driver shows this process there."""
    return bool(getattr(placeholder, "holds_gpu", True))


def fit_to_compute_mode(placeholder: Placeholder, gpus: Iterable[Gpu], *, is_default: bool, logger: Any) -> Placeholder:
    """Return the placeholder for the GPUs of a claim: itself, or no placeholder in its place.

    A GPU in compute mode EXCLUSIVE_PROCESS admits one process, so that a placeholder keeps the claim's own child
    processes out. There the default is no placeholder, which is told once in a process. Where the program has chosen a
    placeholder, that stays, and a warning says what it does.

    Args:
        is_default: whether the program has chosen none.
    """
    exclusive = [gpu.label for gpu in gpus if gpu.compute_mode == ComputeMode.EXCLUSIVE_PROCESS]
    if not exclusive or not holds_gpu(placeholder):
        return placeholder
    labels = ",".join(exclusive)
    if not is_default:
        logger.warning(
            "GPU %s admits one process (compute mode EXCLUSIVE_PROCESS), and with %s that is this process: pass "
            "placeholder_fn=NoPlaceholder() if child processes of this claim use CUDA",
            labels,
            name_of(placeholder),
        )
        return placeholder
    if _NO_PLACEHOLDER not in _told:
        _told.add(_NO_PLACEHOLDER)
        logger.warning(
            "GPU %s admits one process (compute mode EXCLUSIVE_PROCESS): this claim makes no placeholder, which would "
            "keep its own child processes out, and nvidia-smi shows the GPU as free until CUDA starts; if only this "
            "process uses CUDA, pass placeholder_fn=CudaPlaceholder()",
            labels,
        )
    return NoPlaceholder(logger)


_told: set[str] = set()
"""Warnings that this process has given already."""

_NO_PLACEHOLDER = "no placeholder"


def makes_own_context(placeholder: Placeholder) -> bool:
    """Return whether it makes a context of safe_gpu's own: no framework is involved, so that it works on every healthy
    GPU."""
    return bool(getattr(placeholder, "own_context", False))


def is_builtin(placeholder: Placeholder) -> bool:
    """Return whether it is one of this package, which waits for nothing but the driver."""
    return type(placeholder).__module__.startswith(f"{__package__.partition('.')[0]}.")


def _first_line(err: BaseException) -> str:
    """Return the first line of an error's text; frameworks add long advice after it.

    The type of the error comes first, unless the error is of this package.
    """
    line = str(err).strip().partition("\n")[0]
    if isinstance(err, SafeGpuError):
        return line
    if not line:
        return type(err).__name__
    return f"{type(err).__name__}: {line}"


def name_of(placeholder: object) -> str:
    """Return how messages call a placeholder: the name of its function or class."""
    return getattr(placeholder, "__qualname__", None) or type(placeholder).__name__


# ---------------------------------------------------------------------------------------------------------------------
# The placeholders


class Base:
    """Common to the placeholders of this module: the logger, the import of the framework, and the errors."""

    holds_gpu: bool = True
    _module = ""  # the module that prepare() imports
    _install = ""  # the package to install, as an argument of pip, if it is not the first part of that

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger

    @property
    def logger(self) -> Any:
        """The logger given to the constructor, else the logger ``safe_gpu``."""
        return self._logger or package_logger()

    def prepare(self) -> None:
        """Import the framework. This does not initialise CUDA.

        Raises:
            MissingPackageError: it is not installed. PlaceholderError: its import fails.
        """
        if self._module:
            self._import()

    def __call__(self, device_no: int) -> Any:
        """Allocate a little memory on the GPU and return the object that holds it.

        Raises:
            PlaceholderError: with ``device_no`` and the likely cause.
        """
        return allocate(self, device_no, self._allocate)

    def release(self, placeholder: Any) -> None:
        """Free what the framework can free."""

    def _allocate(self, device_no: int) -> Any:
        raise NotImplementedError

    def _import(self) -> Any:
        import importlib

        try:
            return importlib.import_module(self._module)
        except Exception as err:
            package = self._module.partition(".")[0]
            otherwise = "or leave placeholder_fn out to hold the GPU through the CUDA driver"
            if isinstance(err, ModuleNotFoundError) and (err.name or "").partition(".")[0] == package:
                raise MissingPackageError(
                    f"{name_of(self)} needs {package}, which is not installed: pip install {self._install or package}, "
                    f"{otherwise}"
                ) from err
            raise PlaceholderError(
                f"{name_of(self)} cannot import {self._module} ({_first_line(err)}): repair that installation, "
                f"{otherwise}"
            ) from err


class LibraryPlaceholder(Base):
    """A small allocation through a vendor's library, freed on release."""

    own_context = True
    library: ClassVar[Library]

    def prepare(self) -> None:
        """Map the library. This does not initialise it.

        Raises:
            NoDriverError: this host has none.
        """
        self.library.load()

    def _allocate(self, device_no: int) -> HeldGpu:
        return self.library.hold(device_no)

    def release(self, placeholder: HeldGpu) -> None:
        """Free the allocation. What it was allocated in stays if a framework of this process uses it."""
        placeholder.release()


class NoPlaceholder(Base):
    """Nothing on the GPU. Only the entry and the door protect the claim; nvidia-smi shows the GPU as free.

    For processes that fork workers which use CUDA: a CUDA context in the parent would break CUDA in the workers.
    """

    holds_gpu = False

    def _allocate(self, device_no: int) -> None:
        return None


class PytorchPlaceholder(Base):
    """A tensor of one element. PyTorch keeps its context (some hundred MB) until the process ends."""

    _module = "torch"

    def _allocate(self, device_no: int) -> Any:
        torch = self._import()
        share = os.environ.get("SAFE_GPU_SHARE_FRACTION")  # set by this claim, if it shares its GPUs
        if share:
            torch.cuda.set_per_process_memory_fraction(float(share), device_no)
        return torch.zeros((1,), device=f"cuda:{device_no}")

    def release(self, placeholder: Any) -> None:
        """Return the tensor's memory to the driver. The context stays, because PyTorch cannot destroy it."""
        with suppress(AttributeError):
            placeholder.set_()  # an empty storage, which frees the memory even if other references remain
        self._import().cuda.empty_cache()
        self.logger.info("Freed a PyTorch tensor; PyTorch keeps its CUDA context until this process ends")


class TensorflowPlaceholder(Base):
    """A tensor of one element, with memory growth on. Without it TensorFlow takes all memory of every visible GPU."""

    _module = "tensorflow"

    def _allocate(self, device_no: int) -> Any:
        tensorflow = self._import()
        gpus = tensorflow.config.list_physical_devices("GPU")
        if device_no >= len(gpus):
            raise RuntimeError(f"TensorFlow sees {len(gpus)} GPUs")
        for number, gpu in enumerate(gpus):
            try:
                tensorflow.config.experimental.set_memory_growth(gpu, True)
            except (RuntimeError, ValueError) as err:  # TensorFlow has started already, or has logical devices set up
                if number == device_no:
                    self.logger.warning(
                        "TensorFlow may take all memory of CUDA device %d, because memory growth cannot be set: %s",
                        device_no,
                        _first_line(err),
                    )
        with tensorflow.device(f"GPU:{device_no}"):
            tensor = tensorflow.constant([1.0])
        # TensorFlow's soft placement falls back to the CPU without an error.
        if "CPU" in str(getattr(tensor, "device", "")):
            raise RuntimeError(f"TensorFlow put the tensor on the CPU ({tensor.device})")
        return tensor

    def release(self, placeholder: Any) -> None:
        """Do nothing: TensorFlow keeps its memory and its context until the process exits."""
        self.logger.info("Did nothing, TensorFlow doesn't expose interface for releasing GPUs")


class PyCudaPlaceholder(Base):
    """A separate context, current in the calling thread, as after ``import pycuda.autoinit``."""

    _module = "pycuda.driver"

    def __init__(self, logger: Any = None) -> None:
        super().__init__(logger)
        self._held: list[Any] = []

    def _allocate(self, device_no: int) -> Any:
        import atexit

        driver = self._import()
        driver.init()
        context = driver.Device(device_no).make_context()
        self._held.append(context)
        atexit.register(self._at_exit, os.getpid())  # PyCUDA aborts a process that exits with a context on its stack
        return context

    def release(self, placeholder: Any) -> None:
        """Detach the context; PyCUDA removes it from any position in its context stack."""
        self._held = [context for context in self._held if context is not placeholder]
        placeholder.detach()
        self.logger.info("Released a CUDA context")

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():  # a forked child must not detach its parent's contexts
            while self._held:
                self._held.pop().detach()


class CupyPlaceholder(Base):
    """An array of one byte. CuPy uses the primary context, which stays until the process ends."""

    _module = "cupy"
    _install = "cupy-cuda12x"

    def _allocate(self, device_no: int) -> Any:
        cupy = self._import()
        with cupy.cuda.Device(device_no):
            return cupy.zeros(1, dtype="uint8")

    def release(self, placeholder: Any) -> None:
        """Return the array's memory and all unused blocks of CuPy's pool on that GPU to the driver."""
        with suppress(AttributeError):
            placeholder.data.mem.free()  # frees the memory even if other references remain
        with placeholder.device:
            self._import().get_default_memory_pool().free_all_blocks()
        self.logger.info("Freed a CuPy array; the CUDA context stays until this process ends")


_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


class JaxPlaceholder(Base):
    """An array of one element. JAX initialises all visible GPUs, and keeps its contexts until the process exits.

    By default JAX allocates 75% of the memory of every visible GPU when it starts. Unless the user has set
    XLA_PYTHON_CLIENT_PREALLOCATE, this placeholder sets it to false while JAX starts and then removes it again. JAX
    reads the variable only once, so preallocation stays off in this process.
    """

    _module = "jax"
    _install = "'jax[cuda12]'"

    def _allocate(self, device_no: int) -> Any:
        jax = self._import()
        chosen = _PREALLOCATE in os.environ
        os.environ.setdefault(_PREALLOCATE, "false")
        try:
            devices = jax.local_devices(backend="gpu")
        finally:
            if not chosen:
                os.environ.pop(_PREALLOCATE, None)
        if device_no >= len(devices):
            raise RuntimeError(f"JAX sees {len(devices)} GPUs")
        return jax.device_put(1.0, devices[device_no]).block_until_ready()

    def release(self, placeholder: Any) -> None:
        """Delete the array. JAX keeps its memory pool and context, because it cannot free them."""
        placeholder.delete()
        self.logger.info("Freed a JAX array; JAX keeps its CUDA context until this process ends")


pytorch_placeholder: PytorchPlaceholder = PytorchPlaceholder()
tensorflow_placeholder: TensorflowPlaceholder = TensorflowPlaceholder()
