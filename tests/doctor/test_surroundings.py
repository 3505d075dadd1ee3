"""``doctor`` on what the host does to the state directory: cleaners, containers, jobs with a private /tmp."""

import os
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
    ("mounts", "words"),
    [
        (
            "40 27 254:0 /tmp/systemd-private-0a1b-foo.service-XyZ/tmp /tmp rw - ext4 /dev/vda rw\n",
            "private to foo.serv",
        ),
        ("40 27 0:50 /systemd-private-0a1b-slurmd.service-a/tmp /tmp rw - tmpfs tmpfs rw\n", "slurmd.service"),
        ("40 27 254:0 /var/spool/slurm/4242/.4242 /tmp rw - xfs /dev/vda rw\n", "job 4242 "),
        ("40 27 254:0 /local/77/.77/_tmp /tmp rw - xfs /dev/vda rw\n", "job 77 "),
        ("40 27 254:0 /tmp-inst/alice /tmp rw - ext4 /dev/vda rw\n", "pam_namespace"),
        (r"40 27 254:0 /a\040b/77/.77/_tmp /tmp rw - xfs /dev/vda rw" + "\n", "job 77 "),
    ],
)
def test_signs_of_a_private_directory(tmp_path: Path, mounts: str, words: str) -> None:
    host = rooted(tmp_path, {"proc/self/mountinfo": PLAIN + mounts})
    says("shared state directory", "warning", words, host, "SAFE_GPU_DIR")
    says(
        "shared state directory",
        "passed",
        host=rooted(tmp_path, {"proc/self/mountinfo": PLAIN + mounts.replace(" /tmp rw", " /elsewhere rw")}),
    )


OVERLAY = "41 1 0:60 / / rw - overlay overlay rw\n"
HOSTS = "42 41 254:0 /var/lib/containerd/x/hosts /etc/hosts rw - ext4 /dev/vda rw\n"
INITIAL = {"pid": 4026531836, "uts": 4026531838, "ipc": 4026531839}


@pytest.mark.parametrize(
    ("mounts", "marker", "namespaces", "status"),
    [
        (OVERLAY, ".dockerenv", {"pid": 7}, "warning"),  # docker
        (OVERLAY, ".dockerenv", {"uts": 7}, "warning"),  # docker --pid=host
        (OVERLAY, "run/.containerenv", {"pid": 7}, "warning"),  # podman
        (OVERLAY + HOSTS, "", {"pid": 7}, "warning"),  # nerdctl, Kubernetes
        (OVERLAY + "42 41 0:49 /null /proc/keys rw - tmpfs tmpfs rw\n", "", {"pid": 7}, "warning"),  # runc by itself
        ("41 1 254:0 /var/lib/vfs/7 / rw - ext4 /dev/vda rw\n", ".dockerenv", {"pid": 7}, "warning"),
        ("41 1 0:60 / / rw - zfs pool/docker/7 rw\n", ".dockerenv", {"pid": 7}, "warning"),
        (OVERLAY, ".singularity.d/x", {}, "warning"),  # apptainer --no-mount tmp
        (OVERLAY + "43 41 254:0 /tmp /tmp rw - ext4 /dev/vda rw\n", ".singularity.d/x", {}, "passed"),
        (
            OVERLAY + "43 41 254:0 /tmp/safe-gpu /tmp/safe-gpu rw - ext4 /dev/vda rw\n",
            ".dockerenv",
            {"pid": 7},
            "passed",
        ),
        (OVERLAY, "", {}, "passed"),  # a node without a disk
        (OVERLAY, "", {"pid": 7}, "passed"),  # a job in namespaces of its own there
        (OVERLAY + "42 41 0:5 / /proc/sys ro - proc proc rw\n", "", {"uts": 7}, "passed"),  # a service of systemd there
        (OVERLAY, ".dockerenv", {}, "passed"),  # a virtual machine made from an image
        (PLAIN, ".dockerenv", {"pid": 7}, "passed"),  # and namespaces in there
    ],
)
def test_a_container_without_the_state_directory(
    tmp_path: Path, mounts: str, marker: str, namespaces: dict[str, int], status: str
) -> None:
    host = rooted(tmp_path, {"proc/self/mountinfo": mounts, **({marker: ""} if marker else {})})
    for name, inode in {**INITIAL, **namespaces, "mnt": 9}.items():
        for process in ("self", "1"):
            (tmp_path / "proc" / process / "ns").mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc" / process / "ns" / name).symlink_to(f"{name}:[{inode}]")
    found = finding("shared state directory", host)
    assert found.status == status
    assert ("-v /tmp/safe-gpu:/tmp/safe-gpu" in found.fix) == (status == "warning")


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
    ],
)
def test_the_same_name_outside(tmp_path: Path, inside: str, outside: str, status: str) -> None:
    files = {"proc/self/mountinfo": PLAIN + inside, "proc/1/mountinfo": PLAIN + outside}
    assert finding("shared state directory", rooted(tmp_path, files)).status == status


def test_a_container_in_the_host_s_namespaces(tmp_path: Path) -> None:
    """docker run --pid=host --uts=host --ipc=host: pid 1 has another root directory."""
    host = rooted(tmp_path, {"proc/self/mountinfo": OVERLAY, "proc/1/mountinfo": PLAIN})
    says("shared state directory", "warning", host=host, fix="-v /tmp/safe-gpu:/tmp/safe-gpu")


def test_a_directory_of_one_jobs_user_is_private(tmp_path: Path) -> None:
    host = rooted(tmp_path, {"proc/self/mountinfo": PLAIN + "40 27 0:9 / /tmp rw - tmpfs tmpfs rw\n", "tmp/x": ""})
    says("shared state directory", "passed", host=host)
    (tmp_path / "tmp").chmod(0o700)
    if os.geteuid() == 0:
        os.chown(tmp_path / "tmp", 12345, 12345)
    says("shared state directory", "warning", "only ", host)


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
