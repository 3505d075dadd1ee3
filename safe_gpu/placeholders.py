"""Placeholders: the small live thing on a GPU that shows everyone else that it is taken.

A placeholder is any callable that takes ``device_no`` (0-based, as CUDA numbers the GPUs after CUDA_VISIBLE_DEVICES)
and returns the thing that holds the GPU. Two methods are optional: ``prepare()``, called before any lock is taken, for
the slow part that must not touch a GPU (the import of a framework), and ``release(thing)``, called on release. The
functions :func:`prepare`, :func:`allocate`, :func:`release` and :func:`holds_gpu` treat every callable alike, with
these methods or without.

``CudaPlaceholder`` is the default: no dependency, no import, a context that the framework of the same process shares,
truly released. The others are for those who want their framework to have started when the claim returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .errors import PlaceholderError, SafeGpuError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cuda import PrimaryContext

__all__ = [
    "CudaPlaceholder",
    "CupyPlaceholder",
    "JaxPlaceholder",
    "NoPlaceholder",
    "Placeholder",
    "PyCudaPlaceholder",
    "PytorchPlaceholder",
    "TensorflowPlaceholder",
    "allocate",
    "holds_gpu",
    "prepare",
    "pytorch_placeholder",
    "release",
    "tensorflow_placeholder",
]


Placeholder = Callable[[int], Any]
"""What a claim needs of a placeholder; ``prepare()`` and ``release(thing)`` may be there besides."""


# ---------------------------------------------------------------------------------------------------------------------
# What a claim does with any placeholder


def prepare(placeholder: Placeholder) -> None:
    """Do the slow part that needs no GPU: its ``prepare()``, if it has one.

    Raises:
        PlaceholderError: it cannot work here at all (a framework is missing).
    """
    if isinstance(placeholder, type) and issubclass(placeholder, _Base):
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
        raise PlaceholderError(f"{_name(placeholder)} could not be prepared: {_first_line(err)}") from err


def allocate(placeholder: Placeholder, device_no: int) -> Any:
    """Put the placeholder on the GPU that CUDA knows as ``device_no`` and return what holds it.

    Raises:
        PlaceholderError: it failed; the message carries the likely cause, ``__cause__`` the original error.
    """
    try:
        return placeholder(device_no)
    except SafeGpuError:
        raise
    except Exception as err:
        raise _failed(_name(placeholder), device_no, err) from err


def release(placeholder: Placeholder, thing: Any) -> None:
    """Let the GPU go as far as the placeholder can; where it cannot, dropping the last reference has to do.

    Whatever goes wrong is logged and not raised: a GPU is given back all the same.
    """
    method = getattr(placeholder, "release", None)
    if not callable(method):
        return
    try:
        method(thing)
    except Exception as err:
        logger = getattr(placeholder, "logger", None) or _default_logger()
        logger.warning("%s could not release its GPU: %s", _name(placeholder), _first_line(err))


def holds_gpu(placeholder: Placeholder) -> bool:
    """Whether it occupies the GPU at all, so that a claim can look for it there afterwards."""
    return bool(getattr(placeholder, "holds_gpu", True))


def _failed(name: str, device_no: int, err: Exception) -> PlaceholderError:
    from .causes import explain

    message = f"{name} could not hold CUDA device {device_no}: {_first_line(err)}{explain(err)}"
    return PlaceholderError(message, device_no=device_no)


def _first_line(err: BaseException) -> str:
    """The start of an error's text, for frameworks add pages of advice after it; led by its type unless it is ours."""
    line = (str(err).strip().splitlines() or [""])[0]
    if isinstance(err, SafeGpuError):
        return line
    return f"{type(err).__name__}: {line}" if line else type(err).__name__


def _name(placeholder: object) -> str:
    return getattr(placeholder, "__qualname__", None) or type(placeholder).__name__


def _default_logger() -> Any:
    import logging

    return logging.getLogger("safe_gpu")


# ---------------------------------------------------------------------------------------------------------------------
# The placeholders


class _Base:
    """What all of ours share: a logger, the framework's import, and the errors."""

    holds_gpu: bool = True
    _module = ""  # what prepare() imports
    _install = ""  # what brings it

    def __init__(self, logger: Any = None) -> None:
        self._logger = logger

    @property
    def logger(self) -> Any:
        """The logger given, else ``safe_gpu``."""
        return self._logger or _default_logger()

    def prepare(self) -> None:
        """Import what is needed, which wakes no GPU.

        Raises:
            PlaceholderError: it is not installed, or broken.
        """
        if self._module:
            self._import()

    def __call__(self, device_no: int) -> Any:
        """Occupy a little of the GPU.

        Raises:
            PlaceholderError: with ``device_no`` and the likely cause.
        """
        try:
            return self._allocate(device_no)
        except SafeGpuError:
            raise
        except Exception as err:
            raise _failed(_name(self), device_no, err) from err

    def release(self, placeholder: Any) -> None:
        """Let the GPU go as far as that is possible."""

    def _allocate(self, device_no: int) -> Any:
        raise NotImplementedError

    def _import(self) -> Any:
        import importlib

        try:
            return importlib.import_module(self._module)
        except Exception as err:
            package = self._module.partition(".")[0]
            if isinstance(err, ModuleNotFoundError) and (err.name or "").partition(".")[0] == package:
                trouble = f"needs {package}, which is not installed: pip install {self._install}"
            else:
                trouble = f"cannot import {self._module} ({_first_line(err)}): repair that installation"
            raise PlaceholderError(
                f"{_name(self)} {trouble}, or leave placeholder_fn out to hold the GPU through the CUDA driver"
            ) from err


class CudaPlaceholder(_Base):
    """A primary context and a tiny allocation through the CUDA driver; released for good. The default."""

    def prepare(self) -> None:
        """Map libcuda, which does not wake CUDA.

        Raises:
            NoDriverError: there is no libcuda here.
        """
        from . import cuda

        cuda.load()

    def _allocate(self, device_no: int) -> PrimaryContext:
        from .cuda import CudaCallError, PrimaryContext

        try:
            return PrimaryContext.retain(device_no)
        except CudaCallError as err:
            raise _failed(_name(self), device_no, err) from err

    def release(self, placeholder: PrimaryContext) -> None:
        """Free the allocation and let the context go, unless a framework of this process uses it too."""
        placeholder.release()


class NoPlaceholder(_Base):
    """Nothing on the GPU: the lease alone protects the claim, and people who poll nvidia-smi see the GPU as free.

    For processes that fork workers before these use CUDA: a context in the parent would break CUDA in them.
    """

    holds_gpu = False

    def _allocate(self, device_no: int) -> None:
        return None


class PytorchPlaceholder(_Base):
    """A tensor of one element. PyTorch keeps its context (some hundred MB) until the process ends."""

    _module = "torch"
    _install = "torch"

    def _allocate(self, device_no: int) -> Any:
        return self._import().zeros((1,), device=f"cuda:{device_no}")

    def release(self, placeholder: Any) -> None:
        """Give the tensor's memory back to the driver; the context stays, since PyTorch has no way to end it."""
        with suppress(AttributeError):
            placeholder.set_()  # an empty storage: frees the memory however many references are about
        self._import().cuda.empty_cache()
        self.logger.info("Freed a PyTorch tensor; PyTorch keeps its CUDA context until this process ends")


class TensorflowPlaceholder(_Base):
    """A tensor of one element, with memory growth on: without it TensorFlow takes the whole memory of every GPU."""

    _module = "tensorflow"
    _install = "tensorflow"

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
                        "TensorFlow may take all memory of CUDA device %d, for memory growth cannot be set: %s",
                        device_no,
                        _first_line(err),
                    )
        with tensorflow.device(f"GPU:{device_no}"):
            tensor = tensorflow.constant([1.0])
        # TensorFlow's soft placement falls back to the CPU without a word.
        if "CPU" in str(getattr(tensor, "device", "")):
            raise RuntimeError(f"TensorFlow put the tensor on the CPU ({tensor.device})")
        return tensor

    def release(self, placeholder: Any) -> None:
        """Nothing: TensorFlow neither frees memory nor ends its context before the process ends."""
        self.logger.info("Did nothing, TensorFlow doesn't expose interface for releasing GPUs")


class PyCudaPlaceholder(_Base):
    """A context of its own, current in the calling thread as ``pycuda.autoinit`` would leave it."""

    _module = "pycuda.driver"
    _install = "pycuda"

    def __init__(self, logger: Any = None) -> None:
        super().__init__(logger)
        self._held: list[Any] = []

    def _allocate(self, device_no: int) -> Any:
        import atexit

        driver = self._import()
        driver.init()
        context = driver.Device(device_no).make_context()
        self._held.append(context)
        atexit.register(self._at_exit, os.getpid())  # PyCUDA aborts a process that ends with a context on its stack
        return context

    def release(self, placeholder: Any) -> None:
        """End the context; PyCUDA takes it off its stack, wherever it stands there."""
        self._held = [context for context in self._held if context is not placeholder]
        placeholder.detach()
        self.logger.info("Released a CUDA context")

    def _at_exit(self, pid: int) -> None:
        if pid == os.getpid():  # a forked child leaves its parent's contexts alone
            while self._held:
                self._held.pop().detach()


class CupyPlaceholder(_Base):
    """An array of one byte. CuPy uses the primary context, which stays until the process ends."""

    _module = "cupy"
    _install = "cupy-cuda12x"

    def _allocate(self, device_no: int) -> Any:
        cupy = self._import()
        with cupy.cuda.Device(device_no):
            return cupy.zeros(1, dtype="uint8")

    def release(self, placeholder: Any) -> None:
        """Give the array's memory, and what else CuPy's pool has unused on that GPU, back to the driver."""
        with suppress(AttributeError):
            placeholder.data.mem.free()  # now, however many references are about
        with placeholder.device:
            self._import().get_default_memory_pool().free_all_blocks()
        self.logger.info("Freed a CuPy array; the CUDA context stays until this process ends")


class JaxPlaceholder(_Base):
    """An array of one element. JAX starts up on all visible GPUs, and keeps its contexts until the process ends.

    Unless XLA_PYTHON_CLIENT_PREALLOCATE is set, JAX is started with preallocation off, or it would take 75 % of every
    visible GPU at once; JAX reads the variable when it starts, so that holds for this process from then on. The
    environment is left as it was.
    """

    _module = "jax"
    _install = "'jax[cuda12]'"

    def _allocate(self, device_no: int) -> Any:
        jax = self._import()
        with _unless_set("XLA_PYTHON_CLIENT_PREALLOCATE", "false"):
            devices = jax.local_devices(backend="gpu")
        if device_no >= len(devices):
            raise RuntimeError(f"JAX sees {len(devices)} GPUs")
        return jax.device_put(1.0, devices[device_no]).block_until_ready()

    def release(self, placeholder: Any) -> None:
        """Free the array; memory and context stay with JAX, for there is no way to end them."""
        placeholder.delete()
        self.logger.info("Freed a JAX array; JAX keeps its CUDA context until this process ends")


@contextmanager
def _unless_set(name: str, value: str) -> Iterator[None]:
    """An environment variable for the length of a block, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


pytorch_placeholder = PytorchPlaceholder()
tensorflow_placeholder = TensorflowPlaceholder()
