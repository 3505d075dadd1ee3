"""Questions to many hosts at once, each a process of ssh."""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from tempfile import TemporaryFile
from typing import NamedTuple

from .remote_shell import ssh_to

AT_ONCE = 16

SECONDS = 10.0
"""That a host has for its answer, once it is asked."""


class Said(NamedTuple):
    """What a host has answered. ``code`` is ssh's exit code: 255 of its own, else the other side's; None: too late."""

    code: int | None
    out: bytes
    err: bytes


async def ask(host: str, script: str) -> Said:
    """Return what a host says to a line that ``sh`` there runs."""
    with TemporaryFile() as err:  # a pipe would stay open for as long as a ControlMaster that ssh leaves behind
        ssh = await asyncio.create_subprocess_exec(
            *ssh_to(host, script), stdin=DEVNULL, stdout=PIPE, stderr=err, start_new_session=True
        )  # in a session of its own no helper of ssh can ask on this terminal
        out: bytes = b""
        try:
            out, _ = await asyncio.wait_for(ssh.communicate(), SECONDS)
        except asyncio.TimeoutError:
            pass
        finally:
            code = ssh.returncode
            if code is None:
                os.killpg(ssh.pid, signal.SIGKILL)
                await ssh.wait()
        err.seek(0)
        return Said(code, out, err.read())


def ask_all(hosts: Sequence[str], script: str) -> dict[str, Said]:
    """Return what each host says, in their order."""

    async def all_of_them() -> list[Said]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(host: str) -> Said:
            async with slots:
                return await ask(host, script)

        return await asyncio.gather(*map(one, hosts))

    return dict(zip(hosts, asyncio.run(all_of_them()), strict=True))
