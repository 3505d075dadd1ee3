"""CUDA and HIP as a claim asks for them: in this process, or in a short-lived child.

None of this has run on AMD hardware. ``tools/first_run_amd.py`` checks there what is taken for granted here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import NoDriverError, SafeGpuError
from .placeholders import Base, failed, name_of

if TYPE_CHECKING:
    from ..devices import Gpu
    from .hip import HipMemory
    from .placeholders import CudaPlaceholder


# What a claim asks of the library through which programs use the GPUs of one vendor. See :class:`Runtime`.


class Runtime:
    """A vendor's library as it is in this process. This class is for GPUs that no library knows: simulated ones.

    Nothing but the placeholder initialises the library in this process. A GPU that the library shows is named by a text
    that only :meth:`is_same` compares with a GPU of the driver.

    Attributes:
        title: what messages call the library.
        real: whether there is such a library, and the GPUs of the driver are those that it sees in this process.
    """

    title = "CUDA"
    real = False

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """The GPUs that the library sees in this process, in the order of its ordinals; None: it is not initialised.

        Raises:
            CudaInitializedError: it is initialised, but its GPUs cannot be listed.
        """
        return None

    def shown_at(self, ordinal: int) -> str | None:
        """The GPU with this ordinal; "" if there is none, None if the library is not initialised or cannot be asked."""
        return None

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """Whether a GPU that the library shows is this GPU of the driver."""
        return shown == gpu.uuid

    def contexts(self) -> frozenset[str]:
        """UUIDs of the GPUs on which this process has a context that is known to the library."""
        return frozenset()

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The GPUs that the library shows to a child process with this environment (None: that of this process).

        Raises:
            NoDriverError: it could not be asked.
        """
        from ..errors import NoDriverError

        raise NoDriverError("these GPUs are simulated", driver="simulated")

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Use a GPU, which this process knows by this ordinal, without initialising the library in this process.

        Raises:
            NoDriverError, PlaceholderError: it does not work; the message says why.
        """
        from .placeholders import allocate, release

        trial = self.default_placeholder(logger)
        release(trial, allocate(trial, ordinal))

    def default_placeholder(self, logger: Any = None) -> Any:
        """The placeholder that holds these GPUs when the caller names none."""
        raise NotImplementedError


# Questions to CUDA or HIP that a short-lived child process asks, so that this process need not initialise them.


PATIENCE = 120.0
"""Seconds to wait for the child. Without persistence mode, the start of CUDA on eight GPUs can take over 20 s."""

_SLOW = {
    "CUDA": "turn persistence mode on (nvidia-persistenced, or `nvidia-smi -pm 1` as root) if the host starts its GPUs "
    "slowly; otherwise the driver hangs, see dmesg",
    "HIP": "the driver hangs, see dmesg",
}

# Starts the lines of the answer. Libraries may print other lines.
_MARK = "cuda-sees "


def visible_in_child(env: Mapping[str, str] | None = None, timeout: float = PATIENCE) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA would see in an environment, in ordinal order.

    Args:
        env: the whole environment of the child; None takes this process's.
        timeout: seconds to wait for the child.

    Raises:
        NoDriverError: the child failed or did not answer in time; the message says why.
    """
    return ask_child("list", os.environ if env is None else env, timeout)


def hold_in_child(uuid: str, timeout: float = PATIENCE) -> None:
    """Make a CUDA context on a GPU in a child, and release it there.

    Raises:
        NoDriverError: the child failed or did not answer in time; the message says why.
    """
    ask_child("hold", {**os.environ, "CUDA_VISIBLE_DEVICES": uuid}, timeout)


def ask_child(
    question: str, env: Mapping[str, str], timeout: float = PATIENCE, *, library: str = "CUDA"
) -> tuple[str, ...]:
    """Put a question to a library in a child process.

    Args:
        question: "list": which GPUs it shows; "hold": the same for the first GPU, after a try to hold it.
        env: the whole environment of the child.
        timeout: seconds to wait for the child.
        library: "CUDA" or "HIP".

    Raises:
        NoDriverError: the child failed or did not answer in time; the message says why.
    """
    import subprocess

    # -I makes the child ignore PYTHON* variables and the current directory, so it needs the path of the package.
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from safe_gpu.runtimes.runtime import _child; "
        "sys.exit(_child(*sys.argv[2:]))"
    )
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, root, question, library],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as err:
        raise NoDriverError(
            f"a child process to ask {library} could not be started: {err}", driver=library.lower()
        ) from err
    try:
        answer, trouble = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as err:
        raise NoDriverError(
            f"{library} did not answer within {timeout:g} s in a child process: {_SLOW[library]}",
            driver=library.lower(),
        ) from err
    finally:
        # Do not wait for the child: a process that hangs inside the driver cannot be killed.
        if child.poll() is None:
            child.kill()
    if child.returncode:
        reason = (trouble.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise NoDriverError(f"{library} could not be asked in a child process: {reason}", driver=library.lower())
    return tuple(line.removeprefix(_MARK) for line in answer.splitlines() if line.startswith(_MARK))


def _child(question: str, library: str) -> int:
    """The child's part: print UUIDs to stdout, or an error to stderr; return an exit status."""
    try:
        ask = {"CUDA": _by_cuda, "HIP": _by_hip}[library]
        uuids = ask(question)
    except SafeGpuError as err:
        from .placeholders import likely_cause

        print(f"{err}{likely_cause(err)}", file=sys.stderr)
        return 1
    print(*(_MARK + uuid for uuid in uuids), sep="\n")
    return 0


def _visible() -> tuple[str, ...]:
    from .cuda import NO_DEVICE, CudaCallError, load

    try:
        library = load()
        library.initialize()
        return library.uuids()
    except CudaCallError as err:
        if err.code == NO_DEVICE:
            return ()
        raise


def _held() -> tuple[str, ...]:
    from .cuda import PrimaryContext

    context = PrimaryContext.retain(0)
    context.release()
    return (context.uuid,)


def _by_cuda(question: str) -> tuple[str, ...]:
    return _held() if question == "hold" else _visible()


def _by_hip(question: str) -> tuple[str, ...]:
    from . import hip
    from .cuda import CudaCallError

    if question == "hold":
        from .hip import HipMemory

        memory = HipMemory(0)
        memory.release()
        return (memory.shown,)
    try:
        return hip.load().all_shown()
    except CudaCallError as err:
        if err.code == hip.NO_DEVICE:
            return ()
        raise


# The CUDA driver library as a :class:`~safe_gpu.runtimes.runtime.Runtime`.


class CudaRuntime(Runtime):
    """CUDA in this process. A GPU is named by its UUID."""

    real = True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """See :func:`~safe_gpu.runtimes.cuda.visible_if_initialized`."""
        from . import cuda

        return cuda.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        """See :func:`~safe_gpu.runtimes.cuda.uuid_of_ordinal`."""
        from . import cuda

        return cuda.uuid_of_ordinal(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """See :func:`~safe_gpu.runtimes.cuda.same_device`."""
        from . import cuda

        return cuda.same_device(shown, gpu.uuid)

    def contexts(self) -> frozenset[str]:
        """UUIDs of the GPUs on which this process has a primary context."""
        from .cuda import active_contexts

        return frozenset(active_contexts())

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """See :func:`~safe_gpu.runtimes.runtime.visible_in_child`."""

        return visible_in_child(env)

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """See :func:`~safe_gpu.runtimes.runtime.hold_in_child`."""

        hold_in_child(gpu.uuid)

    def default_placeholder(self, logger: Any = None) -> CudaPlaceholder:
        """A minimal allocation through the CUDA driver."""
        from .placeholders import CudaPlaceholder

        return CudaPlaceholder(logger)


CUDA = CudaRuntime()


# The HIP runtime as a :class:`~safe_gpu.runtimes.runtime.Runtime`, and its default placeholder.


class HipRuntime(Runtime):
    """HIP in this process. A GPU is named by UUID and bus id."""

    title = "HIP"
    real = True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """See :func:`~safe_gpu.runtimes.hip.visible_if_initialized`."""
        from . import hip

        return hip.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        """See :func:`~safe_gpu.runtimes.hip.shown_at`."""
        from . import hip

        return hip.shown_at(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """See :func:`~safe_gpu.runtimes.hip.is_same_gpu`."""
        from . import hip

        return hip.is_same_gpu(shown, gpu.uuid, gpu.pci_bus_id)

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """The GPUs that HIP shows to a child process with this environment."""

        return ask_child("list", os.environ if env is None else env, library="HIP")

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Allocate memory on a GPU in a child process."""
        from ..devices import HostSnapshot
        from .visible_devices import render_visible

        only = render_visible([gpu], visible_as="uuid", snapshot=HostSnapshot((gpu,)))
        ask_child("hold", {**os.environ, **only}, library="HIP")

    def default_placeholder(self, logger: Any = None) -> HipPlaceholder:
        """A minimal allocation through HIP."""
        return HipPlaceholder(logger)


HIP = HipRuntime()


class HipPlaceholder(Base):
    """The default on AMD GPUs: a small allocation through HIP, freed on release.

    HIP stays initialised in this process, so that the kernel may list it on the GPU until it ends.
    """

    def prepare(self) -> None:
        """Map libamdhip64. This does not initialise HIP.

        Raises:
            NoDriverError: this host has none.
        """
        from . import hip

        hip.load()

    def _allocate(self, device_no: int) -> HipMemory:
        from . import hip
        from .hip import HipMemory

        try:
            return HipMemory(device_no)
        except hip.HipCallError as err:
            raise failed(name_of(self), device_no, err, library="HIP") from err

    def release(self, placeholder: HipMemory) -> None:
        """Free the allocation."""
        placeholder.release()
