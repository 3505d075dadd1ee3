"""Hostile input from everywhere: few examples of each by default, and ``--hypothesis-profile=deep`` for a long run."""

import json
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from support import api
from support.hostile import assert_plain, assert_shown_safely, bounded

settings.register_profile(
    "deep", max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command in this process, and judge how it ends and what it shows."""

    def command(arguments: str, *codes: int, own: bool = False, plain: bool = True, most: int = 60_000) -> None:
        capsys.readouterr()
        with bounded():
            code = api.main(arguments.split())
        out, err = capsys.readouterr()
        assert code in (codes or (0,)), (arguments, code, err[:500])
        for text in (out, err):
            assert_shown_safely(text, most, own=own)
        if out and plain and "--json" in arguments:
            assert_plain(json.loads(out, parse_constant=pytest.fail))

    return command
