"""Hostile input from everywhere: few examples of each by default, and ``--hypothesis-profile=deep`` for a long run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from support.hostile import open_files

settings.register_profile(
    "deep", max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    """No test leaves a descriptor behind, however its input was refused."""
    before = open_files()
    yield
    assert open_files() <= before + 2, "descriptors were left open"  # two of caches that are filled once
