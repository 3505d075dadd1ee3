"""What tests need that is real, and not everywhere."""

import os
from typing import NoReturn

import pytest

# Set where a missing part is a failure rather than a skip. Read here: fixtures hide SAFE_GPU_* from the tests.
REQUIRED = os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1"

long = pytest.mark.skipif(not REQUIRED, reason="needs SAFE_GPU_REQUIRE_REAL=1, as it takes long")


def unavailable(reason: str) -> NoReturn:
    """Skip, or fail where nothing may be missing."""
    if REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)
