"""``doctor`` on what the host does to the state directory: cleaners, jobs with a private /tmp."""

from pathlib import Path

import pytest
from support.findings import finding, in_namespace, rooted, says

SYSTEMD = {"run/systemd/system/x": "", "usr/lib/tmpfiles.d/tmp.conf": "# comment\nq /tmp 1777 root root 10d\n"}


@pytest.mark.parametrize(
    ("files", "status", "words"),
    [
        ({}, "passed", "does not run here"),
        (SYSTEMD, "warning", "/tmp after 10d"),
        ({**SYSTEMD, "etc/tmpfiles.d/tmp.conf": "D /tmp 1777 root root -\n"}, "passed", "no rule"),
        (
            {**SYSTEMD, "etc/tmpfiles.d/safe-gpu.conf": "x /tmp/safe-gpu\n"},
            "passed",
            "safe-gpu.conf exempts /tmp/safe-gpu",
        ),
        ({**SYSTEMD, "etc/tmpfiles.d/z.conf": "x /tmp/safe-*\n"}, "passed", "exempts"),
        ({**SYSTEMD, "etc/tmpfiles.d/z.conf": "d /tmp/safe-gpu 1777 root root -\n"}, "passed", "no rule"),
        ({**SYSTEMD, "etc/tmpfiles.d/z.conf": "x /tmp/o\nq! /tmp/safe-gpu 1777 root root 0\n"}, "warning", "after 0"),
        ({**SYSTEMD, "etc/tmpfiles.d/a.conf": "d /tmp/safe-gpu 1777 root root -\n"}, "passed", "no rule"),
        ({"etc/cron.daily/tmpreaper": ""}, "warning", "tmpreaper"),
    ],
)
def test_who_cleans_the_directory(tmp_path: Path, files: dict[str, str], status: str, words: str) -> None:
    fix = "as root: safe-gpu setup" if status == "warning" and "tmpreaper" not in words else ""
    says("removal of old files", status, words, rooted(tmp_path, files), fix)
    says("removal of old files", "passed", host=rooted(tmp_path, files, "/srv/safe-gpu"))


@pytest.mark.parametrize(
    ("value", "words"), [("0\n", "may open files of other users"), ("2\n", "group- or world"), (None, "has no")]
)
def test_protected_regular_is_explained(tmp_path: Path, value: str | None, words: str) -> None:
    files = {} if value is None else {"proc/sys/fs/protected_regular": value}
    assert words in finding("fs.protected_regular", rooted(tmp_path, files)).detail


PLAIN = "27 1 254:0 / / rw - ext4 /dev/vda rw\n"


@pytest.mark.parametrize(
    ("inside", "outside", "status"),
    [
        ("", "", "passed"),
        ("40 27 0:50 / /tmp rw - tmpfs none rw\n", "", "warning"),
        ("40 27 0:50 / /tmp rw - tmpfs none rw\n", "40 27 0:50 / /tmp rw - tmpfs none rw\n", "passed"),
        ("40 27 0:51 / /tmp rw - tmpfs none rw\n", "40 27 0:50 / /tmp rw - tmpfs none rw\n", "warning"),
        ("40 27 254:0 /tmp /tmp rw - ext4 /dev/vda rw\n", "", "passed"),
        ("40 27 254:0 /data /tmp rw - ext4 /dev/vda rw\n", "", "warning"),
        ("40 27 254:0 /tmp/safe-gpu /tmp/safe-gpu rw - ext4 /dev/vda rw\n", "", "passed"),
        ("40 27 0:50 / /tmp/safe rw - tmpfs none rw\n", "", "passed"),
        ("40 27 254:0 /tmp/systemd-private-0a1b-foo.service-XyZ/tmp /tmp rw - ext4 /dev/vda rw\n", "", "warning"),
        ("40 27 254:0 /var/spool/slurm/4242/.4242 /tmp rw - xfs /dev/vda rw\n", "", "warning"),
        ("41 1 0:60 / / rw - overlay overlay rw\n", "", "warning"),
    ],
)
def test_the_same_name_outside(tmp_path: Path, inside: str, outside: str, status: str) -> None:
    files = {"proc/self/mountinfo": PLAIN + inside, "proc/1/mountinfo": PLAIN + outside}
    assert finding("shared state directory", rooted(tmp_path, files)).status == status


def test_a_directory_that_cannot_be_compared(tmp_path: Path) -> None:
    says("shared state directory", "passed", "may not compare", rooted(tmp_path, {"proc/self/mountinfo": PLAIN}))


def test_a_private_mount_for_real(open_tmp: Path) -> None:
    (open_tmp / "state").mkdir()
    options = {"SAFE_GPU_DIR": str(open_tmp / "state")}
    if in_namespace("true", "shared state directory", "--", **options).status != "passed":
        pytest.skip("the tests themselves run where /tmp is private")
    (open_tmp / "other").mkdir()
    for mount in (f"mount -t tmpfs none {open_tmp}", f"mount --bind {open_tmp}/other {open_tmp}/state"):
        found = in_namespace(mount, "shared state directory", **options)
        assert (found.status, "private to this mount namespace" in found.detail) == ("warning", True), mount
    shared = in_namespace(f"mount --bind {open_tmp} {open_tmp}", "shared state directory", **options)
    assert shared.status == "passed", "the same directory by another mount is no other directory"
