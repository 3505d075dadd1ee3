"""The rule of tmpfiles.d that setup writes."""

import pytest

from safe_gpu.cli import setup as host_files
from safe_gpu.coordination.directory import PARTS

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
