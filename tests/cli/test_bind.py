"""``safe-gpu bind`` for ranks that a script starts, and the two names of its option, which ``run`` has too."""

from typing import Any

import pytest

from safe_gpu.cli.commands import parse


@pytest.mark.parametrize("verb", ["run", "bind"])
def test_either_name_of_the_option_means_the_same(verb: str, ask: Any) -> None:
    for mode in ("none", "socket", "unique_contiguous"):
        for name in ("--affinity", "--mode"):
            assert parse([verb, name, mode, "--", "true"]).affinity == mode
    shown = ask("help", verb).stdout
    assert ("--affinity M" in shown, "--mode M" in shown) == (True, False)
