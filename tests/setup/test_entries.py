"""What becomes of each thing that may stand in the place of a directory or file of root's."""

import os
import stat

import pytest

from safe_gpu.cli import setup as host_files
from safe_gpu.coordination.files.shared_directory import PARTS
from safe_gpu.coordination.setup.entries import KEEP, MAKE, SKIP, TAKE, directory_entry, file_entry

ANNA = 4711


def status(mode: int, uid: int = 0, links: int = 1) -> os.stat_result:
    return os.stat_result((mode, 1, 1, links, uid, uid, 0, 0, 0, 0))


DIRECTORY, FILE = stat.S_IFDIR, stat.S_IFREG


@pytest.mark.parametrize(
    ("found", "empty", "action"),
    [
        (None, True, MAKE),
        (status(DIRECTORY | 0o1777), False, KEEP),
        (status(DIRECTORY | 0o1777), True, KEEP),
        (status(DIRECTORY | 0o755), True, TAKE),
        (status(DIRECTORY | 0o755), False, SKIP),
        (status(DIRECTORY | 0o1777, ANNA), False, TAKE),
        (status(DIRECTORY | 0o700, ANNA), True, TAKE),
        (status(DIRECTORY | 0o700, ANNA), False, SKIP),
        (status(DIRECTORY | 0o777, ANNA), False, SKIP),
    ],
)
def test_directories(found: os.stat_result | None, empty: bool, action: str) -> None:
    entry = directory_entry("leases", found, empty=empty)
    assert (entry.name, entry.action) == ("leases", action)
    assert bool(entry.why) == (action in (TAKE, SKIP))


@pytest.mark.parametrize(
    ("found", "action", "why"),
    [
        (None, MAKE, ""),
        (status(FILE | 0o666), KEEP, ""),
        (status(FILE | 0o666, ANNA), TAKE, "of 4711"),
        (status(FILE | 0o666, ANNA, 2), SKIP, "has 2 names (hard links), and belongs to 4711"),
        (status(FILE | 0o666, 0, 2), SKIP, "has 2 names (hard links), and belongs to root"),
        (status(FILE | 0o600, ANNA), SKIP, "has mode 0600, and belongs to 4711"),
        (status(FILE | 0o644), SKIP, "has mode 0644, and belongs to root"),
        (status(FILE | 0o6666, ANNA), SKIP, "has mode 6666, and belongs to 4711"),
        (status(stat.S_IFLNK | 0o777, ANNA), SKIP, "is a link, and belongs to 4711"),
        (status(stat.S_IFIFO | 0o666, ANNA), SKIP, "is no regular file, and belongs to 4711"),
        (status(DIRECTORY | 0o1777, ANNA), SKIP, "is no regular file, and belongs to 4711"),
    ],
)
def test_files(found: os.stat_result | None, action: str, why: str) -> None:
    assert file_entry("host.lock", found) == ("host.lock", action, why)


LEASES = ["GPU-1.lock", "GPU-1.inner.lock"]


def test_the_rule_names_every_directory_and_file() -> None:
    lines = host_files.rule_text("/var/lib/safe-gpu", LEASES).splitlines()
    assert lines[:4] == [
        f"d /var/lib/safe-gpu{part} 1777 root root -" for part in ("", *(f"/{name}" for name in PARTS))
    ]
    files = ["host.lock", *(f"leases/{name}" for name in LEASES)]
    assert lines[4:] == [f"f /var/lib/safe-gpu/{name} 0666 root root -" for name in files]


@pytest.mark.parametrize("place", ["/var/lib/safe-gpu", "/srv/100%/a.b"])
def test_a_rule_is_setup_s_own_for_whichever_gpus(place: str) -> None:
    own = host_files.rule_text(place, LEASES)
    assert host_files.is_own_rule(own, place)
    assert host_files.is_own_rule(host_files.rule_text(place, ()), place)
    assert not host_files.is_own_rule(own, f"{place}2")
    for line in (
        f"x {place}",
        "# by hand",
        f"d {place} 0755 root root -",
        f"f {place}/leases/a b.lock 0666 root root -",
    ):
        assert not host_files.is_own_rule(f"{own}{line}\n", place)


def test_percent_signs_are_doubled() -> None:
    """tmpfiles.d(5) takes a single one for a specifier."""
    assert "d /srv/100%% 1777" in host_files.rule_text("/srv/100%", ())
