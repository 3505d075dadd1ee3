"""Stops a process before and after each of its system calls: ptrace(2) through ctypes, as newcomers have no strace."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

# Requests of ptrace(2)
_TRACEME = 0
_CONT = 7
_DETACH = 17
_SYSCALL = 24
_SETOPTIONS = 0x4200
_GET_SYSCALL_INFO = 0x420E
# Stops at system calls are marked; threads and exec(2) are followed; all die with the tracer. Forks are not followed: a
# child is another process with a fate of its own.
_OPTIONS = 0x01 | 0x08 | 0x10 | 0x100000
_ENTRY, _EXIT = 1, 2
_AT_CALL = signal.SIGTRAP | 0x80
_ALL = 0x40000000  # __WALL: threads too

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Info(ctypes.Structure):
    """struct ptrace_syscall_info: the same on all machines."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("place", ctypes.c_uint64 * 2),
        ("number", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 10),
    )


class Stop(NamedTuple):
    """A thread that stands before or after a system call.

    ``thread`` counts from 0, the main one, and ``number`` from 1, the calls of this thread.
    """

    thread: int
    number: int
    call: str
    before: bool


def begin() -> None:
    """In the process that is to be traced by its parent: its calls count from now on."""
    os.setpgid(0, 0)  # waitpid(2) then tells of its threads and of nobody else
    if _libc.ptrace(_TRACEME, 0, None, None):
        os._exit(90)
    os.kill(os.getpid(), signal.SIGSTOP)
    os.getsid(0)  # shows the tracer what the end looks like


def end() -> None:
    """In the traced process: it runs on without stops."""
    os.getsid(0)  # nothing else asks for that


def refusal() -> str:
    """Why no process can be traced here; "" if it can be."""
    if not sys.platform.startswith("linux") or not hasattr(_libc, "tgkill"):
        return "ptrace(2) is used as on Linux, with glibc 2.30"
    child = os.fork()
    if child == 0:
        begin()
        end()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSTOPPED(status):
        return "this process may not trace its children (seccomp, or kernel.yama.ptrace_scope=3)"
    try:
        calls = list(Traced(child, started=True).stops())
    except OSError as err:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"PTRACE_GET_SYSCALL_INFO, of Linux 5.3, is not to be had ({err.strerror})"
    os.waitpid(child, 0)
    if calls:
        return "the stops of a traced process cannot be told apart here"
    return ""


class Traced:
    """A child that has called :func:`begin`.

    Attributes:
        status: its wait status once it has ended, else None.
    """

    def __init__(self, pid: int, *, started: bool = False) -> None:
        self.pid = pid
        self.status: int | None = None
        self._threads = {pid: 0}
        self._numbers = {pid: 0}
        self._calls = {pid: ""}
        self._standing: dict[int, int] = {}  # thread that stands -> the signal that it gets when it goes on
        self._new: set[int] = set()
        self._mark: int | None = None  # the call of begin and end
        self._over = False
        if not started:
            _, status = os.waitpid(pid, _ALL | os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                self.status = status
                return
        _ptrace(_SETOPTIONS, pid, data=_OPTIONS)
        self._standing[pid] = 0

    def stops(self) -> Iterator[Stop]:
        """Each call of it, before and after; ends with the process, or with its call of :func:`end`."""
        while self.status is None:
            self._go_on(_SYSCALL)
            thread, status = os.waitpid(-self.pid, _ALL)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                self._ended(thread, status)
                continue
            stop = self._stop(thread, status)
            if self._over:
                self._free_others()
                self._go_on(_DETACH)
                return
            if stop is not None:
                yield stop

    def send(self, number: int) -> None:
        """Send a signal, which the main thread meets when it goes on; also while another one stands."""
        (thread,) = self._standing
        if thread == self.pid:
            self._standing[thread] = number
        else:
            os.kill(self.pid, number)  # the kernel gives it to one that does not stand

    def leave(self, number: int) -> None:
        """Send it a signal, and trace its threads no longer."""
        self.send(number)
        self._free_others()
        self._go_on(_DETACH)

    def kill(self) -> None:
        """SIGKILL, and wait until nothing of it is left. What stands before a call does not make it any more."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.join()

    def join(self) -> int:
        """Its wait status, when it has ended; signals and exec(2) do not hold it up."""
        while self.status is None:
            self._go_on(_CONT)
            thread, status = os.waitpid(-self.pid, _ALL)
            if os.WIFSTOPPED(status):
                self._standing[thread] = _signal_of(status)
            else:
                self._ended(thread, status)
        return self.status

    def _stop(self, thread: int, status: int) -> Stop | None:
        """What a thread that has just stopped stands at; None where that is no call."""
        number = os.WSTOPSIG(status)
        if thread not in self._threads:
            self._threads[thread] = len(self._threads)
            self._numbers[thread] = 0
            self._new.add(thread)
        self._standing[thread] = 0
        if number != _AT_CALL:
            if number == signal.SIGSTOP and thread in self._new:  # each new thread begins with it
                self._new.discard(thread)
            elif number != signal.SIGTRAP:
                self._standing[thread] = number
            return None
        info = _Info()
        _ptrace(_GET_SYSCALL_INFO, thread, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == _ENTRY:
            if self._mark is None:
                self._mark = info.number
                return None
            self._over = info.number == self._mark
            self._numbers[thread] += 1
            self._calls[thread] = call_name(info.number)
        elif info.op != _EXIT or not self._numbers[thread]:
            return None
        return Stop(self._threads[thread], self._numbers[thread], self._calls.get(thread, "?"), info.op == _ENTRY)

    def _free_others(self) -> None:
        """Trace the other threads no longer. They have to stop for that, and may be asleep in a call."""
        for name in os.listdir(f"/proc/{self.pid}/task"):  # new ones too
            thread = int(name)
            if thread in self._standing or _libc.tgkill(self.pid, thread, signal.SIGURG):
                continue
            _, status = os.waitpid(thread, _ALL)
            if os.WIFSTOPPED(status):
                self._standing[thread] = _signal_of(status)

    def _ended(self, thread: int, status: int) -> None:
        """Note that a thread has ended; if it is the main one, the process has."""
        self._standing.pop(thread, None)
        if thread == self.pid:
            self.status = status

    def _go_on(self, how: int) -> None:
        """Let those that stand go on, by this request, with their signals."""
        for thread, number in self._standing.items():
            with suppress(ProcessLookupError):  # killed meanwhile
                _ptrace(how, thread, data=number)
        self._standing.clear()


def _signal_of(status: int) -> int:
    """The signal that a thread is about to get which has stopped, and gets when it goes on; 0 for none."""
    number = os.WSTOPSIG(status)
    is_event = status >> 16 != 0 or number in (signal.SIGTRAP, _AT_CALL)
    if is_event:
        return 0
    return number


def _ptrace(what: int, thread: int, address: int = 0, data: int = 0) -> None:
    """Call ptrace(2).

    Raises:
        ProcessLookupError: the thread is gone, or does not stand.
        OSError: for other reasons.
    """
    if _libc.ptrace(what, thread, address, data) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


_NAMES = dict(
    pair.split("=")
    for pair in """
0=read 1=write 2=open 3=close 4=stat 5=fstat 6=lstat 7=poll 8=lseek 9=mmap 10=mprotect 11=munmap 12=brk 13=rt_sigaction
14=rt_sigprocmask 15=rt_sigreturn 16=ioctl 17=pread64 18=pwrite64 21=access 22=pipe 24=sched_yield 25=mremap 28=madvise
32=dup 33=dup2 35=nanosleep 39=getpid 41=socket 42=connect 44=sendto 45=recvfrom 49=bind 56=clone 57=fork 59=execve
60=exit 61=wait4 62=kill 63=uname 72=fcntl 73=flock 77=ftruncate 78=getdents 79=getcwd 82=rename 83=mkdir 84=rmdir
87=unlink 88=symlink 89=readlink 90=chmod 91=fchmod 96=gettimeofday 97=getrlimit 102=getuid 107=geteuid 110=getppid
115=getgroups 124=getsid 157=prctl 186=gettid 202=futex 203=sched_setaffinity 204=sched_getaffinity 217=getdents64
218=set_tid_address 228=clock_gettime 230=clock_nanosleep 231=exit_group 234=tgkill 239=get_mempolicy 257=openat
258=mkdirat 262=newfstatat 263=unlinkat 265=linkat 267=readlinkat 268=fchmodat 269=faccessat 270=pselect6
273=set_robust_list 302=prlimit64 316=renameat2 318=getrandom 332=statx 334=rseq 435=clone3 436=close_range
439=faccessat2 452=fchmodat2
""".split()
)
"""Of x86-64."""


def call_name(number: int) -> str:
    """The name of a system call; its number if that is not known, as on other machines than x86-64."""
    if os.uname().machine == "x86_64" and str(number) in _NAMES:
        return _NAMES[str(number)]
    return f"call {number}"
