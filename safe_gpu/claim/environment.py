"""The environment variables that a claim sets, and what they were before."""

from __future__ import annotations

import os
from collections.abc import Mapping


class ClaimVariables:
    """Variables of this process that a claim has set."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, str | None]] = {}  # name -> value, and value before

    def set(self, variables: Mapping[str, str]) -> None:
        """Set these variables."""
        for name, value in variables.items():
            self._set[name] = value, os.environ.get(name)
            os.environ[name] = value

    def restore(self) -> None:
        """Make them what they were; a value that the program has set since stays."""
        for name, (value, before) in self._set.items():
            if os.environ.get(name) == value:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before
        self._set = {}
