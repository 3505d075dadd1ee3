"""What the tests of several runtimes share."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cuda_host import Host


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> Host:
    return Host(tmp_path, build_library("cuda.c", "libcuda.so.1"))
