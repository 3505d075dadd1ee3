"""Calls of NVML through nvidia-ml-py, and what their failures mean.

Source: NVML API reference.
"""

from typing import Any

from ..errors import MissingPackageError, NoDriverError
from ..host.foreign_files import printable
from ..runtimes.loading import load_file
from .base import Driver

LIBRARY = "libnvidia-ml.so.1"

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
        NoDriverError: it is not installed.
        MissingPackageError: the module of this name is another one, or too old.
    """
    try:
        import pynvml
    except ImportError as err:
        what = "the Python package nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        raise NoDriverError(what, driver="nvml") from err
    if all(hasattr(pynvml, name) for name in ("NVMLError", "c_nvmlDevice_t", "nvmlPciInfo_t")):
        return pynvml
    raise MissingPackageError(
        f"the module pynvml in {pynvml.__file__} is not that of nvidia-ml-py 12.535 or newer (pip uninstall pynvml "
        "nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py)"
    )


def why_missing() -> str | None:
    """Return what is missing for NVML on this host, its Python module or its library; None when both are there."""
    try:
        _pynvml()
        load_file(LIBRARY)
    except (NoDriverError, MissingPackageError) as err:
        return str(err)
    except OSError as err:
        return f"NVML cannot be loaded ({err})"
    return None


class NvmlCalls:
    """A session of NVML in this process, which lasts until :meth:`end`.

    Raises:
        Fault, SessionOver: from every method.
        NoDriverError, MissingPackageError: there is no module of nvidia-ml-py.
    """

    def __init__(self) -> None:
        self._pynvml = _pynvml()
        try:
            load_file(LIBRARY)  # pynvml then gets this one too, wherever the loader would have looked
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
