"""Calls of NVML through nvidia-ml-py, and what their failures mean.

Source: NVML API reference.
"""

import re
import sys
import warnings
from typing import Any

from ..errors import MissingDriverPackageError, NoDriverError
from ..host.foreign_files import printable
from ..runtimes.loading import load_file
from ..topology.files import Files
from .base import Driver

LIBRARY = "libnvidia-ml.so.1"

_INSTALL = "pip install nvidia-ml-py"

_REPLACE = "pip uninstall -y pynvml nvidia-ml-py3 && pip install --force-reinstall nvidia-ml-py"

# Of the functions and types that are used, those that older modules lack: nvidia-ml-py3 7.352, and pynvml up to 11.4.
_NEEDED = ("NVMLError", "nvmlInit", "nvmlMemory_v2", "nvmlDeviceGetComputeRunningProcesses_v3")

_FIRST_JETSON_WITH_NVML = 36  # Jetson Linux R36 is JetPack 6; see https://github.com/Syllo/nvtop/issues/225

_LONGEST = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE and NVML_DEVICE_NAME_V2_BUFFER_SIZE

# nvmlReturn_t
NO_PERMISSION = 4
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
UNKNOWN = 999

NO_SUCH_DEVICE = frozenset({2, 6})
"""Invalid argument, not found."""

ABSENT = frozenset({3, 13, 25, 26})
"""No answer here, now or ever: not supported, function not found, argument version, deprecated."""

GPU_LOST = frozenset({15, 16, 28})
"""Lost, needs a reset, GPU not found."""

_SESSION_OVER = frozenset({1, 9, 18})  # uninitialised, driver not loaded, versions differ


class NvmlError(Exception):
    """One call of NVML that failed; ``code`` is its nvmlReturn_t."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message or f"NVML error {code}")
        self.code = code


class SessionOver(NvmlError):
    """NVML as a whole is gone, at least for this session."""


class Fault(NvmlError):
    """A question that was not answered."""


def _pynvml() -> Any:
    """Return the module of nvidia-ml-py.

    Raises:
        MissingDriverPackageError: it is not installed, or the module of this name is another one, or too old.
    """
    try:
        pynvml = _import_pynvml()
    except ImportError as err:
        what = f"the Python package nvidia-ml-py is not installed ({_INSTALL})"
        raise MissingDriverPackageError(what, driver="nvml", install=_INSTALL) from err
    missing = [name for name in _NEEDED if not hasattr(pynvml, name)]
    if missing:
        raise MissingDriverPackageError(
            f"the module pynvml in {_place_of(pynvml)} has no {missing[0]}, so it is not that of nvidia-ml-py 12.535 "
            f"or newer ({_REPLACE})",
            driver="nvml",
            install=_REPLACE,
        )
    return pynvml


def _import_pynvml() -> Any:
    """Import the module of this name without its warnings.

    With the package pynvml 13, which only forwards to nvidia-ml-py, the import warns. That would be shown to users of
    this package, and where warnings are errors (``python -W error``) the import would fail.
    """
    if "pynvml" in sys.modules:
        import pynvml

        return pynvml
    with warnings.catch_warnings():  # of all threads, so only the first time
        warnings.simplefilter("ignore")
        import pynvml

        return pynvml


def _place_of(module: Any) -> str:
    """Return the file of a module, or the directory if it is one without ``__init__.py``."""
    file: str | None = module.__file__
    if file is not None:
        return file
    return next(iter(module.__path__), "no file")


def missing() -> NoDriverError | None:
    """Return the error on what is missing for NVML on this host, its Python module or its library; None when both are
    there."""
    try:
        _pynvml()
        _load_library()
    except NoDriverError as err:
        return err
    except OSError as err:
        return NoDriverError(f"NVML cannot be loaded ({err})", driver="nvml")
    return None


def why_missing() -> str | None:
    """Return the text of the error of :func:`missing`; None when there is none."""
    error = missing()
    if error is None:
        return None
    return str(error)


def _load_library() -> None:
    """Load NVML. pynvml then gets this library too, wherever the loader would have looked.

    Raises:
        NoDriverError: this is a Jetson whose software has no NVML.
        OSError: it cannot be loaded.
    """
    try:
        load_file(LIBRARY)
    except OSError as err:
        release = _jetson_release()
        if release is not None and release < _FIRST_JETSON_WITH_NVML:
            raise NoDriverError(
                f"this Jetson has no NVML: upgrade Jetson Linux R{release} to JetPack 6 or newer", driver="nvml"
            ) from err
        raise


def _jetson_release() -> int | None:
    """Return the major release of Jetson Linux (L4T); None on other hosts.

    The file begins with ``# R35 (release), REVISION: 4.1, ...``.
    """
    found = re.match(r"# R([0-9]{1,4}) ", Files().text("etc/nv_tegra_release") or "")
    if found is None:
        return None
    return int(found[1])


class NvmlCalls:
    """A session of NVML in this process, which lasts until :meth:`end`.

    Raises:
        Fault, SessionOver: from every method.
        MissingDriverPackageError: as of :func:`why_missing`. NoDriverError: this is a Jetson without NVML.
    """

    def __init__(self) -> None:
        self._pynvml = _pynvml()
        try:
            _load_library()
        except OSError as err:
            raise Fault(LIBRARY_NOT_FOUND) from err
        self.ask("nvmlInit")

    def end(self) -> None:
        """End the session."""
        self.ask("nvmlShutdown")

    def constant(self, name: str) -> Any:
        """Return what pynvml has under a name; None in versions that do not have it."""
        return getattr(self._pynvml, name, None)

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml by name. Text comes out printable, and no longer than NVML's own buffers."""
        function = self.constant(name)
        if function is None:
            raise Fault(FUNCTION_NOT_FOUND)
        Driver.latest_call = name
        try:
            answer = function(*args)
            if isinstance(answer, bytes):
                answer = answer.decode()
        except self._pynvml.NVMLError as err:
            code = int(err.value)
            if code in _SESSION_OVER:
                raise SessionOver(code, str(err)) from err
            raise Fault(code, str(err)) from err
        except UnicodeDecodeError as err:
            raise Fault(UNKNOWN) from err
        if isinstance(answer, str):
            return printable(answer[:_LONGEST])
        return answer

    def ask_or(self, default: Any, name: str, *args: Any) -> Any:
        """Return the same for a question that may go unanswered, unless the GPU or the session is gone altogether."""
        try:
            return self.ask(name, *args)
        except Fault as fault:
            if fault.code in GPU_LOST:
                raise
            return default
