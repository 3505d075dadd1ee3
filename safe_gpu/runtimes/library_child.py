"""Questions to CUDA or HIP that a short-lived child process asks, so that this process need not initialise them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ..errors import NoDriverError, SafeGpuError

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
        "import sys; sys.path.insert(0, sys.argv[1]); from safe_gpu.runtimes.library_child import _child; "
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
        from .error_causes import likely_cause

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
    from .cuda_context import PrimaryContext

    context = PrimaryContext.retain(0)
    context.release()
    return (context.uuid,)


def _by_cuda(question: str) -> tuple[str, ...]:
    return _held() if question == "hold" else _visible()


def _by_hip(question: str) -> tuple[str, ...]:
    from . import hip
    from .cuda import CudaCallError

    if question == "hold":
        from .hip_memory import HipMemory

        memory = HipMemory(0)
        memory.release()
        return (memory.shown,)
    try:
        return hip.load().all_shown()
    except CudaCallError as err:
        if err.code == hip.NO_DEVICE:
            return ()
        raise
