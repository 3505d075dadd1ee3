"""The rule of tmpfiles.d that setup writes."""

from safe_gpu.cli.admin import rule_text
from safe_gpu.coordination.directory import PARTS


def test_the_rule_names_every_directory_and_file() -> None:
    assert rule_text("/var/lib/safe-gpu").splitlines() == [
        *(f"d /var/lib/safe-gpu{part} 1777 root root -" for part in ("", *(f"/{name}" for name in PARTS))),
        "f /var/lib/safe-gpu/host.lock 0666 root root -",
    ]


def test_percent_signs_are_doubled() -> None:
    """tmpfiles.d(5) takes a single one for a specifier."""
    assert "d /srv/100%% 1777" in rule_text("/srv/100%")
