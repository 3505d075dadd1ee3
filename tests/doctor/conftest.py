"""The state directory in which ``doctor`` looks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from safe_gpu.coordination import setup
from safe_gpu.coordination.directory import Directory
from safe_gpu.coordination.entry import make_entry, remove_entry, said_by_this_process

Claim = Callable[..., None]


@pytest.fixture
def used(state_dir: Path) -> Path:
    """A state directory that is used."""
    setup.make(str(state_dir))
    return state_dir


@pytest.fixture
def claimed(used: Path) -> Iterator[Claim]:
    """Called with the UUID of a GPU, and more that the entry says, it claims that GPU for this process."""
    made = []

    def claim(uuid: str, **said: object) -> None:
        directory = Directory(str(used), "claims")
        entry = {**said_by_this_process(None), "gpus": {uuid: None}, **said}
        made.append((directory, *make_entry(directory, len(made), entry, by_children=True)))

    yield claim
    for directory, name, held in made:
        remove_entry(directory, name, held)
        directory.close()
