"""Whether this process was forked from one in which CUDA was initialised, so that it cannot use CUDA itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

_PF_FORKNOEXEC = 0x40  # a flag of a task in the kernel (linux/sched.h): forked, and no program executed since

# How long a child of this process may take to call cuInit, in seconds. It sees no GPU, so CUDA starts fast in it.
_PATIENCE = 10.0


def forked_from_cuda(refuses: Callable[[], bool], initialized_in: int | None) -> bool:
    """Whether this process was forked from one in which CUDA was initialised.

    Args:
        refuses: calls cuInit, and returns whether it answered that CUDA is not initialised. Called in a child process.
        initialized_in: the pid of the process in which safe_gpu called cuInit, if it did.

    If safe_gpu did not initialise CUDA in the parent, an inherited descriptor of /dev/nvidia-uvm, which CUDA opens and
    NVML does not, tells it. There is none on WSL2 and Jetson, and a child may have closed it. So a forked process
    with libcuda mapped forks once more and calls cuInit there: after such a fork it answers NOT_INITIALIZED.
    """
    if initialized_in is not None and initialized_in != os.getpid():
        return True
    if _inherited_uvm():
        return True
    return _is_forked() and _refuses_in_fork(refuses)


def _inherited_uvm() -> bool:
    try:
        return any(_opens(number, "/dev/nvidia-uvm") for number in os.listdir("/proc/self/fd"))
    except OSError:
        return False


def _opens(number: str, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") == path
    except OSError:
        return False


def _is_forked() -> bool:
    """Whether this process was forked and has not executed a program since."""
    try:
        with open("/proc/self/stat", "rb", buffering=0) as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & _PF_FORKNOEXEC)
    except (OSError, ValueError, IndexError):
        return False


def _refuses_in_fork(refuses: Callable[[], bool]) -> bool:
    """Whether cuInit fails in a forked child of this process as it does if CUDA was initialised before the fork."""
    import signal
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads; this child only calls cuInit
        pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            code = 1 if refuses() else 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 1
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)  # it hangs on a lock that another thread held at the fork, or inside the driver
    os.waitpid(pid, os.WNOHANG)
    return False
