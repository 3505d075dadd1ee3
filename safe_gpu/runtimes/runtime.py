"""CUDA and HIP as a claim asks for them: in this process, or in a short-lived child.

None of this has run on AMD or Intel hardware. ``tools/first_run_amd.py`` checks there what is taken for granted here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import NoDriverError, SafeGpuError
from ..programs import python_child
from .placeholders import (
    CudaPlaceholder,
    HipPlaceholder,
    LevelZeroPlaceholder,
    NoPlaceholder,
    allocate,
    likely_cause,
    release,
)

if TYPE_CHECKING:
    from ..devices import Gpu


class Runtime:
    """A vendor's library, through which programs use its GPUs, as it is in this process.

    This class is for GPUs that no library knows: simulated ones.

    Nothing but the placeholder initialises the library in this process. A GPU that the library shows is named by a text
    that only :meth:`is_same` compares with a GPU of the driver.

    Attributes:
        title: what messages call the library.
        asks_library: whether there is such a library, and the GPUs of the driver are those that it sees here.
    """

    title = "CUDA"
    asks_library = False

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        """Return the GPUs that the library sees in this process, in the order of its ordinals; None: it is not
        initialised.

        Raises:
            CudaInitializedError: it is initialised, but its GPUs cannot be listed.
        """
        return None

    def shown_at(self, ordinal: int) -> str | None:
        """Return the GPU with this ordinal; "" if there is none, None if the library is not initialised or cannot be
        asked."""
        return None

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """Return whether a GPU that the library shows is this GPU of the driver."""
        return shown == gpu.uuid

    def contexts(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs on which this process has a context that is known to the library."""
        return frozenset()

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        """Return the GPUs that the library shows to a child process with this environment (None: that of this process).

        Raises:
            NoDriverError: it could not be asked.
        """
        raise NoDriverError("these GPUs are simulated", driver="simulated")

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Use a GPU, which this process knows by this ordinal, without initialising the library in this process.

        Raises:
            NoDriverError, PlaceholderError: it does not work; the message says why.
        """
        trial = self.default_placeholder(logger)
        release(trial, allocate(trial, ordinal))

    def default_placeholder(self, logger: Any = None) -> Any:
        """Return the placeholder that holds these GPUs when the caller names none."""
        raise NotImplementedError


# Questions to CUDA or HIP that a short-lived child process asks, so that this process need not initialise them.


PATIENCE = 120.0
"""Seconds to wait for the child. Without persistence mode, the start of CUDA on eight GPUs can take over 20 s."""

_SLOW = {
    "CUDA": "turn persistence mode on (nvidia-persistenced, or `nvidia-smi -pm 1` as root) if the host starts its GPUs "
    "slowly; otherwise the driver hangs, see dmesg",
    "HIP": "the driver hangs, see dmesg",
    "Level Zero": "the driver hangs, see dmesg",
}

# Starts the lines of the answer. Libraries may print other lines.
_MARK = "cuda-sees "


def ask_child(
    question: str, env: Mapping[str, str], timeout: float = PATIENCE, *, library: str = "CUDA"
) -> tuple[str, ...]:
    """Put a question to a library in a child process.

    Args:
        question: "list": which GPUs it shows; "hold": the same for the first GPU, after a try to hold it.
        env: the whole environment of the child.
        timeout: seconds to wait for the child.
        library: the title of a runtime.

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
    driver = library.lower()
    try:
        command, environ = python_child(env, "-I", "-S", "-c", code, root, question, library)
        child = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as err:
        raise NoDriverError(f"a child process to ask {library} could not be started: {err}", driver=driver) from err
    try:
        answer, trouble = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as err:
        problem = f"{library} did not answer within {timeout:g} s in a child process: {_SLOW[library]}"
        raise NoDriverError(problem, driver=driver) from err
    finally:
        # Do not wait for the child: a process that hangs inside the driver cannot be killed.
        if child.poll() is None:
            child.kill()
    if child.returncode:
        reason = (trouble.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise NoDriverError(f"{library} could not be asked in a child process: {reason}", driver=driver)
    return tuple(line.removeprefix(_MARK) for line in answer.splitlines() if line.startswith(_MARK))


def _child(question: str, library: str) -> int:
    """Do the child's part: print what names the GPUs to stdout, or an error to stderr; return an exit status."""
    try:
        shown = (_held if question == "hold" else _listed)(library)
    except SafeGpuError as err:
        print(f"{err}{likely_cause(err)}", file=sys.stderr)
        return 1
    print(*(_MARK + one for one in shown), sep="\n")
    return 0


def _held(library: str) -> tuple[str, ...]:
    from . import cuda, hip, level_zero

    if library == "Level Zero":
        held = level_zero.ZeMemory(0)
        held.release()
        return (held.shown,)
    if library == "HIP":
        memory = hip.HipMemory(0)
        memory.release()
        return (memory.shown,)
    context = cuda.PrimaryContext(0)
    context.release()
    return (context.uuid,)


def _listed(library: str) -> tuple[str, ...]:
    from . import cuda, hip, level_zero

    try:
        if library == "Level Zero":
            return level_zero.load().all_shown()
        if library == "HIP":
            return hip.load().all_shown()
        loaded = cuda.load()
        loaded.initialize()
        return loaded.uuids()
    except cuda.CudaCallError as err:
        if err.code == cuda.NO_DEVICE:
            return ()
        raise


class CudaRuntime(Runtime):
    """CUDA in this process. A GPU is named by its UUID."""

    asks_library = True

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        from . import cuda

        return cuda.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        from . import cuda

        return cuda.uuid_of_ordinal(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        from . import cuda

        return cuda.same_device(shown, gpu.uuid)

    def contexts(self) -> frozenset[str]:
        from . import cuda

        return cuda.active_contexts()

    def visible_in_child(self, env: Mapping[str, str] | None = None) -> tuple[str, ...]:
        return ask_child("list", os.environ if env is None else env, library=self.title)

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Hold a GPU in a child process."""
        from ..devices import HostSnapshot
        from .visible_devices import render_visible

        only = render_visible([gpu], visible_as="uuid", snapshot=HostSnapshot((gpu,)))
        ask_child("hold", {**os.environ, **only}, library=self.title)

    def default_placeholder(self, logger: Any = None) -> CudaPlaceholder:
        return CudaPlaceholder(logger)


class HipRuntime(CudaRuntime):
    """HIP in this process. A GPU is named by UUID and bus id."""

    title = "HIP"

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        from . import hip

        return hip.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        from . import hip

        return hip.shown_at(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        from . import hip

        return hip.is_same_gpu(shown, gpu.uuid, gpu.pci_bus_id)

    def contexts(self) -> frozenset[str]:
        return frozenset()

    def default_placeholder(self, logger: Any = None) -> HipPlaceholder:
        return HipPlaceholder(logger)


class LevelZeroRuntime(CudaRuntime):
    """Level Zero in this process. A GPU is named by its bus id, and ordinals count cards."""

    title = "Level Zero"

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        from . import level_zero

        return level_zero.visible_if_initialized()

    def shown_at(self, ordinal: int) -> str | None:
        from . import level_zero

        return level_zero.shown_at(ordinal)

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        return shown == gpu.pci_bus_id

    def contexts(self) -> frozenset[str]:
        return frozenset()

    def try_gpu(self, gpu: Gpu, ordinal: int, logger: Any) -> None:
        """Hold a card in a child process, under the hierarchy in which its number is the index."""
        from ..devices import HostSnapshot
        from .visible_devices import HIERARCHY, render_visible

        cards = {**os.environ, HIERARCHY: "COMPOSITE"}
        only = render_visible([gpu], visible_as="index", snapshot=HostSnapshot((gpu,)), environ=cards)
        ask_child("hold", {**cards, **only}, library=self.title)

    def default_placeholder(self, logger: Any = None) -> LevelZeroPlaceholder | NoPlaceholder:  # type: ignore[override]
        from . import level_zero

        placeholder = LevelZeroPlaceholder(logger)
        try:
            level_zero.load()
        except NoDriverError as err:
            placeholder.logger.warning(f"No placeholder is put on the GPUs, so others see them as free: {err}")
            return NoPlaceholder(logger)
        return placeholder


CUDA = CudaRuntime()
HIP = HipRuntime()
LEVEL_ZERO = LevelZeroRuntime()
