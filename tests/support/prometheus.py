"""Real programs of Prometheus on loopback. Where SAFE_GPU_REQUIRE_REAL is set a missing one fails the test."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.real import unavailable


def program(name: str) -> str:
    return shutil.which(name) or unavailable(f"{name} is not installed")


def parser() -> Any:
    """Prometheus's own parser of the text format, in Python."""
    try:
        return importlib.import_module("prometheus_client.parser")
    except ImportError:
        unavailable("prometheus-client is not installed")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def fetched(url: str) -> str:
    """What is served there, as soon as somebody serves it. A request that is refused as wrong fails at once."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return str(answer.read().decode())
        except OSError as err:
            if isinstance(err, urllib.error.HTTPError) and err.code < 500:
                raise AssertionError(f"{url}: {err.read().decode()}") from err
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.05)


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[None]:
    process = subprocess.Popen(list(map(str, arguments)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(60)


def exporter(directory: Path, port: int) -> tuple[object, ...]:
    """The command of a node_exporter that serves the files in a directory, and nothing else."""
    return (
        program("prometheus-node-exporter"),
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={directory}",
        f"--web.listen-address=127.0.0.1:{port}",
    )
