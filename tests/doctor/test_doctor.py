"""``doctor`` finds each fault, which is made for real where that can be done, and names the way out."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from safe_gpu import doctor, procfs
from safe_gpu.cli.commands import main
from safe_gpu.coordination import legacy
from safe_gpu.coordination.leases import lease_name, try_lease
from safe_gpu.coordination.locks import HostLock
from safe_gpu.doctor import gpus as listing
from safe_gpu.doctor import process as checks_of_process
from safe_gpu.doctor import state
from safe_gpu.doctor.check import CheckedHost, Finding
from safe_gpu.drivers.presets import preset
from safe_gpu.text import display_width

ROOT = Path(doctor.__file__).parents[2]
UUIDS = [gpu.uuid for gpu in preset("dgx-a100").gpus()]
FUNCTIONS = dict(doctor.CHECKS)


def check_document(document: dict[str, Any]) -> None:
    assert list(document) == ["host", "checks"]
    assert document["host"] == socket.gethostname()
    for one in document["checks"]:
        assert list(one) == ["name", "status", "detail", "fix"]
        assert all(isinstance(text, str) for text in one.values())
        assert one["name"]
        assert one["detail"]
        assert one["status"] in ("passed", "warning", "failed", "skipped")


def finding(name: str, host: CheckedHost | None = None) -> Finding:
    """What one check finds; what is wrong has a fix of one line, what is not has none."""
    found = FUNCTIONS[name](host or CheckedHost())
    assert bool(found.fix) == (found.status in ("warning", "failed"))
    assert "\n" not in found.fix
    return found


def says(name: str, status: str, detail: str = "", host: CheckedHost | None = None, fix: str = "") -> None:
    """That a check finds this, with these words in its text and in its fix."""
    found = finding(name, host)
    assert (found.status, detail in found.detail, fix in found.fix) == (status, True, True), found


def environment(**variables: str) -> CheckedHost:
    return CheckedHost(environ=variables)


@pytest.fixture(autouse=True)
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of this process would find the real libraries, not those of ``fake_gpus.use_nvml_here()``."""
    monkeypatch.setattr(listing, "_shown_in_child", lambda environ: "not in this test")


@pytest.fixture
def claimed(state_dir: Path):
    """A state directory in use, with the lease of GPU 0 held by this process."""
    with HostLock(time.monotonic() + 30) as host:
        lease = try_lease(host, lease_name(UUIDS[0]))
    assert lease is not None
    yield lease
    lease.release()


HOLD = """
from safe_gpu.runtimes.placeholders import NoPlaceholder
import safe_gpu, os, time
safe_gpu.claim_gpus(1, NoPlaceholder(), affinity=None, only=0)
say("held"); listen()
"""


def in_namespace(setup: str, check: str, *flags: str, user: int = 0, **variables: str) -> Finding:
    """What a check finds in a mount (or process) namespace of its own, after some shell commands there."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to make namespaces")
    code = (
        "import json, os, sys\n"
        "from safe_gpu import doctor\n"
        "host = doctor.CheckedHost()\n"
        "host.snapshot  # while this interpreter can still be read\n"
        f"os.setresuid({user}, {user}, {user})\n"
        f"found = dict(doctor.CHECKS)[{check!r}](host)\n"
        "print(json.dumps([found.status, found.detail, found.fix]))"
    )
    command = ["unshare", *(flags or ["-m"]), "sh", "-c", f'{setup} && exec "$@"', "sh", sys.executable, "-c", code]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, capture_output=True, text=True, timeout=60
    )
    if run.returncode and ("unshare" in run.stderr or "mount:" in run.stderr):
        pytest.skip(f"no namespaces here: {run.stderr.strip()}")
    assert run.returncode == 0, run.stderr
    return Finding(*json.loads(run.stdout))


# All of them


def test_a_host_without_faults_passes_and_stays_as_it_was(state_dir: Path) -> None:
    checks = doctor.run_checks()
    assert [one.name for one in checks] == list(FUNCTIONS)
    # A container may well be the place where the tests run.
    places = (
        "shared state directory",
        "visible processes",
        "removal of old files",
        "Python packages",
        "address space limit",
        "MPS",
        "shared installation",
    )
    assert {
        one.name: one.detail for one in checks if one.status in ("failed", "warning") and one.name not in places
    } == {}
    assert doctor.exit_code([one for one in checks if one.name not in places]) == 0
    assert not state_dir.exists()
    check_document(json.loads(json.dumps(doctor.to_dict(checks))))


def test_a_check_that_breaks_is_failed_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: CheckedHost) -> Finding:
        raise ZeroDivisionError("a strange host")

    monkeypatch.setattr(doctor, "CHECKS", (("first", broken), ("platform", FUNCTIONS["platform"])))
    first, second = doctor.run_checks()
    assert first.status == "failed"
    assert "ZeroDivisionError: a strange host" in first.detail
    assert second.status == "passed"
    assert doctor.exit_code([first, second]) == 1
    assert doctor.exit_code([second]) == 0


def test_a_fact_is_asked_for_once_and_the_driver_is_closed(monkeypatch: pytest.MonkeyPatch, state_dir: Path) -> None:
    from safe_gpu.drivers.simulated import SimulatedDriver

    calls: list[str] = []
    for name in ("snapshot", "close"):
        real = getattr(SimulatedDriver, name)
        monkeypatch.setattr(
            SimulatedDriver, name, lambda self, name=name, real=real: (calls.append(name), real(self))[1]
        )
    doctor.run_checks()
    assert calls == ["snapshot", "close"]


FOUND = [
    doctor.Check("platform", "passed", "Linux"),
    doctor.Check("policy file", "skipped", "there is none"),
    doctor.Check("file locks", "warning", "host.lock was held by others for 3.0 s", "look for a process " + "x" * 130),
    doctor.Check("GPU driver", "failed", "it does not answer " * 9, "restart the driver"),
    doctor.Check("clock", "warning", "a claim began in the future", "set the clock"),
]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_the_report_says_first_what_is_wrong(width: int, color: bool) -> None:
    text = doctor.render_checks(FOUND, color=color, width=width)
    assert ("\x1b[31mfailed\x1b[0m" in text, "\x1b[33mwarning\x1b[0m" in text) == (color, color)
    lines = re.sub(r"\x1b\[[0-9]+m", "", text).splitlines()
    assert [line.split(": ")[0] for line in lines if line[:1].strip()] == [
        "failed   GPU driver", "warning  file locks", "warning  clock", lines[-1],
    ]  # fmt: skip
    assert sum(line.startswith(" " * 9 + "fix: ") for line in lines) == 3
    assert lines[-1] == "1 passed, 1 skipped, 1 failed, 2 warnings (-v lists all)"
    (long,) = [line for line in lines if display_width(line) > width and line != lines[-1]]
    assert long.strip() == "x" * 130, "what is to be copied is whole"


def test_the_report_of_all_checks() -> None:
    lines = doctor.render_checks(FOUND, color=False, width=80, verbose=True).splitlines()
    assert lines[-4:-2] == ["passed   platform: Linux", "skipped  policy file: there is none"]
    assert lines[-1] == "1 passed, 1 skipped, 1 failed, 2 warnings"
    assert doctor.render_checks(FOUND[:1], color=False, width=80) == "1 passed (-v lists all)"


def test_from_the_command_line(state_dir: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["doctor"])
    assert "GPU driver" not in capsys.readouterr().out
    main(["doctor", "-v"])
    assert "passed   GPU driver: simulated:dgx-a100 " in capsys.readouterr().out
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("PATH", str(state_dir))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("failed   GPU driver: ")
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    check_document(document)
    by_name = {one["name"]: one for one in document["checks"]}
    assert by_name["GPU driver"]["status"] == "failed"
    assert by_name["compute mode"]["status"] == "skipped"
    assert by_name["platform"]["status"] == "passed"


# The state directory


def test_a_missing_directory_will_be_made_where_it_can_be(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "does not exist yet" in finding("state directory").detail
    assert finding("file locks").status == "skipped"
    monkeypatch.setenv("SAFE_GPU_DIR", str(state_dir / "deep" / "down"))
    found = finding("state directory")
    assert (found.status, f"mkdir -p {state_dir / 'deep'}" in found.fix) == ("failed", True)
    assert not state_dir.exists()


USUAL = "passed" if os.geteuid() == 0 else "warning"
"""What doctor says of a state directory that the user who runs the tests has made."""


def test_a_directory_in_use_passes(claimed, state_dir: Path) -> None:
    assert finding("state directory").status == USUAL
    for name in ("file locks", "free disk space", "file system"):
        says(name, "passed")
    assert "mode 1777" in finding("state directory").detail or USUAL == "warning"
    assert not [path for path in state_dir.rglob("*") if "doctor" in path.name]


LEASES = [f"leases/{lease_name(uuid)}" for uuid in UUIDS]


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("chmod 755 .", "warning", "0755"),
        ("chmod 777 .", "warning", "0777"),
        ("mv $PWD $PWD.moved && ln -s $PWD.moved $PWD", "failed", "symbolic link"),
        ("rm -r $PWD && touch $PWD", "failed", "not a directory"),
        ("chmod 755 leases", "warning", "leases has mode 0755"),
        (f"chmod 600 {LEASES[0]}", "warning", "0600"),
        (f"ln -s /etc/passwd {LEASES[1]}", "failed", "is a symbolic link"),
        (f"mkdir {LEASES[1]}", "failed", "not a regular file"),
        (f"ln host.lock {LEASES[1]}", "failed", "a hard link to host.lock"),
        ("chmod 700 ..", "warning", "other users cannot enter it"),
    ],
)
def test_faults_of_the_directory(claimed, state_dir: Path, fault: str, status: str, words: str) -> None:
    says("state directory", USUAL)
    subprocess.run(fault, shell=True, check=True, cwd=state_dir, timeout=60)
    says("state directory", status, words)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give the directory away and back")
@pytest.mark.parametrize("part", ["", "leases", "queue"])
def test_an_ordinary_user_who_owns_the_directory_is_a_risk(claimed, state_dir: Path, open_tmp: Path, part: str) -> None:
    """The fix is carried out, with other names of the files in /etc."""
    parts = [state_dir, state_dir / "leases", state_dir / "queue"]
    (state_dir / "queue").mkdir(exist_ok=True)
    (state_dir / "queue").chmod(0o1777)
    os.chown(state_dir / part, 54321, 54321)
    found = finding("state directory")
    assert found.status == "warning"
    assert f"{state_dir / part} belongs to {procfs.user_name(54321)}, who can remove other" in found.detail
    rule = open_tmp / "rule.conf"
    fix = found.fix.removeprefix("as root: ").removesuffix(", which makes them root's at boot")
    subprocess.run(fix.replace("/etc/tmpfiles.d/safe-gpu.conf", str(rule)), shell=True, check=True, timeout=60)
    assert finding("state directory").status == "passed"
    if shutil.which("systemd-tmpfiles") is not None:
        for path in reversed(parts):
            shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["systemd-tmpfiles", "--create", rule], check=True, timeout=60)
    for path in parts:
        assert path.stat().st_uid == 0
        assert path.stat().st_mode & 0o7777 == 0o1777


def test_what_is_closed_to_an_ordinary_user_is_failed(claimed, state_dir: Path, as_user) -> None:
    def work(say, listen) -> None:
        say(finding("state directory").status)
        listen()
        say(finding("state directory").status)
        say(finding("file locks").status)

    user = as_user(work, uid=12345)
    assert user.hear() == "passed"
    state_dir.chmod(0o755)
    user.tell()
    assert user.hear() == "failed"
    assert user.hear() == "failed"


def test_network_file_systems(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "file_system_type", lambda fd: "nfs4")
    says("file system", "failed", "nfs4", fix="SAFE_GPU_DIR")


def test_no_room_and_read_only(open_tmp: Path) -> None:
    options = {"SAFE_GPU_DIR": str(open_tmp / "small" / "state")}
    (open_tmp / "small").mkdir()
    for mount, check, words in (
        ("mount -t tmpfs -o size=1m,nr_inodes=8 none .", "free disk space", "inodes"),
        ("mount -t tmpfs -o size=1m none . && head -c 1048576 /dev/zero > $PWD/x", "free disk space", "0 KiB"),
        ("mount -t tmpfs -o ro none .", "file system", "read-only"),
    ):
        found = in_namespace(f"cd {open_tmp}/small && {mount}", check, **options)
        assert (found.status, words in found.detail) == ("failed", True), found


def test_a_host_lock_that_is_never_given_back(claimed, state_dir: Path, child, eventually, monkeypatch: Any) -> None:
    code = "import os\nfrom safe_gpu.coordination.locks import HostLock\n"
    holder = child(code + "with HostLock(None):\n    say('locked'); listen()", says="locked")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: procfs.is_stopped(holder.pid))
    monkeypatch.setattr(state, "_PATIENCE", 0.05)
    says("file locks", "failed", f"process {holder.pid}", fix=f"kill -CONT {holder.pid}")
    holder.kill()
    assert finding("file locks").status == "passed"


def test_locks_that_are_slow_or_do_not_exclude(claimed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_LONG_HOLD", -1.0)
    says("file locks", "warning", "held by others for")
    monkeypatch.setattr(state, "lock_file", lambda fd: True)
    says("file locks", "failed", "do not exclude each other")


def test_a_lease_that_was_removed_under_its_claim(claimed, state_dir: Path) -> None:
    says("lease files", "passed")
    (state_dir / LEASES[0]).unlink()
    says("lease files", "warning", f"the lease of {UUIDS[0]} that process {os.getpid()}")
    claimed.release()
    says("lease files", "passed")


# Rules of the system, under a root of our own


def rooted(tmp_path: Path, files: dict[str, str], path: str = "/tmp/safe-gpu") -> CheckedHost:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    host = CheckedHost(root=str(tmp_path))
    host.path = path
    return host


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
    fix = "x /tmp/safe-gpu" if status == "warning" and "tmpreaper" not in words else ""
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


# Processes


def test_a_process_namespace_of_its_own() -> None:
    found = in_namespace("true", "visible processes", "-p", "-f", "--mount-proc")
    assert (found.status, "--pid=host" in found.fix) == ("warning", True)


def test_hidden_processes_of_others() -> None:
    mount = "mount -t proc -o hidepid=2 none /proc"
    found = in_namespace(mount, "visible processes", user=12345)
    assert (found.status, "hidepid=" in found.detail) == ("warning", True)
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert in_namespace(mount, "visible processes").status == "passed", "nothing is hidden from root"


def test_driver_pids_that_do_not_resolve(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[1], os.getpid())
    if os.readlink("/proc/self/ns/pid") == "pid:[4026531836]":
        assert finding("visible processes").status == "passed"
    fake_gpus.process(fake_gpus.uuids[1], 1 << 29, static=True)
    says("visible processes", "warning", "1 of 2 processes")


def test_suspended_holders_and_waiters(state_dir: Path, child, eventually) -> None:
    holder = child(HOLD, says="held")
    waiter = child(HOLD.replace("only=0", "only=0, timeout=None"))
    eventually(lambda: any(path.read_text() for path in (state_dir / "queue").glob("*.ticket")))
    assert finding("holders and waiters").status == "passed"
    for process in (holder, waiter):
        os.kill(process.pid, signal.SIGSTOP)
        eventually(lambda process=process: procfs.is_stopped(process.pid))
    # /proc/locks may miss one while other processes lock and unlock files.
    said = ("holds GPU 0", *(f"process {process.pid} (" for process in (holder, waiter)))
    eventually(lambda: all(text in finding("holders and waiters").detail for text in said))
    eventually(lambda: f"kill -CONT {holder.pid} {waiter.pid}" in finding("holders and waiters").fix)
    assert finding("holders and waiters").status == "warning"


def test_all_gpus_of_a_stopped_holder(state_dir: Path, child, eventually) -> None:
    holder = child(HOLD.replace("gpus(1", "gpus(2").replace("only=0", "only='0,5'"), says="held")
    os.kill(holder.pid, signal.SIGSTOP)
    eventually(lambda: "which holds GPUs 0,5" in finding("holders and waiters").detail)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who sees the processes of all")
def test_a_claim_in_another_state_directory(
    state_dir: Path, open_tmp: Path, child, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("state directories of claims", "passed")
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(open_tmp / "simulated"))  # one host for both
    holder = child(HOLD, says="held", env={"SAFE_GPU_DIR": str(open_tmp / "other")})
    words = f"GPU 0 in {open_tmp / 'other'} (process {holder.pid} of "
    says("state directories of claims", "warning", words, fix="/etc/safe-gpu/config.ini")
    claim = CheckedHost().status.gpus[0].claim
    assert claim is not None
    assert (claim.pid, claim.note) == (holder.pid, f"its lease is in {open_tmp / 'other'}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who installs for all")
def test_a_package_that_others_cannot_read(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = open_tmp / "safe_gpu" / "doctor"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    monkeypatch.setattr(checks_of_process, "__file__", str(package / "process.py"))
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    monkeypatch.setattr("filelock.__file__", str(package.parent / "__init__.py"))
    says("shared installation", "passed")
    package.parent.chmod(0o700)  # umask 077
    says("shared installation", "warning", f"{package.parent} has mode 0700", fix="umask 022")
    package.parent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(open_tmp / "pyenv" / "python"))
    (open_tmp / "pyenv").mkdir(mode=0o750)
    (open_tmp / "pyenv" / "python").touch(mode=0o755)
    says("shared installation", "warning", f"{open_tmp / 'pyenv'} has mode 0750")


def test_whose_the_files_are(state_dir: Path, child) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give files away")
    child(HOLD, says="held")
    os.chown(state_dir / "host.lock", 54321, 0)
    says("state directory", "passed", "belongs to root, host.lock to 54321")


def test_a_claim_from_the_future(state_dir: Path, child) -> None:
    child(HOLD, says="held")
    assert finding("clock").status == "passed"
    record = state_dir / "leases" / lease_name(UUIDS[0])
    record.write_text(json.dumps({**json.loads(record.read_text()), "since": time.time() + 7200}))
    says("clock", "warning", "in the future")


# The older package and others


@pytest.fixture
def old_lock(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = open_tmp / "safe_gpu" / "lock"
    monkeypatch.setattr(legacy, "LOCK_FILE", str(path))
    return path


def test_the_older_package(old_lock: Path, child) -> None:
    assert "not been used" in finding("safe-gpu 1.x and 2.0").detail
    old_lock.parent.mkdir()
    old_lock.touch()
    assert "claims take its lock too" in finding("safe-gpu 1.x and 2.0").detail
    theirs = child(
        f"import fcntl\nf = open({str(old_lock)!r}, 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\nsay('locked'); listen()"
    )
    assert theirs.hear() == "locked"
    assert f"process {theirs.pid}" in finding("safe-gpu 1.x and 2.0").detail
    assert finding("safe-gpu 1.x and 2.0", environment(SAFE_GPU_LEGACY_LOCK="never")).status == "warning"


def test_the_older_package_closed_to_us(old_lock: Path, as_user) -> None:
    old_lock.parent.mkdir()
    old_lock.touch(0o644)
    old_lock.chmod(0o644)

    def work(say, listen) -> None:
        say(finding("safe-gpu 1.x and 2.0").status)
        listen()
        found = finding("safe-gpu 1.x and 2.0")
        say(f"{found.status} {found.fix}")

    user = as_user(work, uid=12345)
    assert user.hear() == "warning"
    old_lock.chmod(0o666)
    old_lock.parent.chmod(0o700)
    user.tell()
    assert user.hear().startswith("warning have its users upgrade")


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        ({"pynvml": "11.5.3"}, "warning", "pip uninstall pynvml"),
        ({"pynvml": "12.0.0"}, "passed", ""),
        ({"nvidia_ml_py3": "7.352.0"}, "warning", "pip uninstall nvidia-ml-py3"),
        ({"safe_gpu": "2.0.0"}, "warning", "pip uninstall safe-gpu"),
    ],
)
def test_packages_in_each_others_way(tmp_path: Path, monkeypatch: Any, installed: Any, status: str, words: str) -> None:
    before = finding("Python packages")
    if before.status != "passed":
        pytest.skip(f"this environment has the trouble already: {before.detail}")
    for name, version in installed.items():
        directory = tmp_path / f"{name}-{version}.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    says("Python packages", status, fix=words)


def test_a_filelock_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import filelock

    monkeypatch.delattr(filelock, "lock_descriptor")
    says("Python packages", "failed", fix="filelock>=3.30")


# GPUs


def test_a_good_host_of_gpus(fake_gpus) -> None:
    fake_gpus.use_nvml_here()
    host = CheckedHost()
    for name in ("GPU driver", "driver speed", "access to GPUs", "process lists", "compute mode", "MIG"):
        assert finding(name, host).status == "passed", name
    assert finding("GPU driver", host).detail == "nvml 550.54.15: 8 GPUs, NVIDIA A100-SXM4-80GB"


@pytest.mark.parametrize(
    ("change", "check", "status", "words"),
    [
        ({"lost": 1}, "access to GPUs", "warning", "GPU 2"),
        ({"handle_error": 4}, "access to GPUs", "warning", "GPU 2"),
        ({"mode": 2}, "compute mode", "warning", "GPU 2: compute mode PROHIBITED"),
        ({"mode": 3}, "compute mode", "warning", "GPU 2: compute mode EXCLUSIVE_PROCESS"),
        ({"mig": 1}, "MIG", "warning", "GPU 2: MIG mode is on and there is no instance"),
        ({"mig": 1, "instances": "MIG-a,MIG-b"}, "MIG", "passed", "on for GPU 2: 2 instances"),
        ({"compute_error": 999}, "process lists", "warning", "GPU 2"),
    ],
)
def test_faults_of_gpus(fake_gpus, change: dict[str, object], check: str, status: str, words: str) -> None:
    fake_gpus.change(2, **change)
    fake_gpus.use_nvml_here()
    says(check, status, words)


def test_no_gpus_and_no_driver(fake_gpus) -> None:
    fake_gpus.write()
    fake_gpus.use_nvml_here()
    assert "shows no GPU" in finding("GPU driver").detail
    fake_gpus.options(init_error=9)
    host = CheckedHost()
    assert finding("GPU driver", host).status == "failed"
    for name in ("driver speed", "CUDA", "access to GPUs", "process lists", "compute mode", "MIG", "CPU mask"):
        assert finding(name, host).status == "skipped", name


def test_a_simulated_driver_beside_real_gpus(tmp_path: Path) -> None:
    says("GPU driver", "passed", host=rooted(tmp_path, {}))
    says("GPU driver", "warning", host=rooted(tmp_path, {"dev/nvidia0": ""}), fix="SAFE_GPU_DRIVER")


def test_a_slow_driver() -> None:
    host = CheckedHost()
    assert host.snapshot is not None
    host.poll_seconds = 3.2
    says("driver speed", "warning", "3.20 s", host, "persistence")


ASK = """
import sys
from safe_gpu import doctor
found = dict(doctor.CHECKS)[sys.argv[1]](doctor.CheckedHost())
print(found.status, found.detail, found.fix, sep="|")
"""


def test_cuda_in_a_child(fake_gpus) -> None:
    def ask(**variables: str) -> str:
        return fake_gpus.python(ASK, "CUDA", **variables)

    assert ask(CUDA_VISIBLE_DEVICES="1") == "passed|CUDA can be initialised and sees 8 GPUs|\n"
    fake_gpus.options(cuda_init_error=802)
    assert re.match(r"failed\|CUDA could not be asked.*802", ask())


# Whether the driver lists processes, which is tried with a context


def lists(fake_gpus, **variables: str) -> tuple[str, str, str]:
    status, detail, fix = fake_gpus.python(ASK, "process lists", **variables).strip("\n").split("|")
    return status, detail, fix


def test_a_driver_that_lists_processes(fake_gpus) -> None:
    assert lists(fake_gpus) == ("passed", "the driver lists the processes of every GPU", "")
    assert not list(fake_gpus.directory.glob("procs/*/[0-9]*")), "the context was for a moment"


@pytest.mark.parametrize("options", [{"hidden": 1}, {"lag_ms": 10**6}])
def test_a_driver_that_lists_nobody(fake_gpus, options: dict[str, int]) -> None:
    fake_gpus.options(**options)
    status, detail, fix = lists(fake_gpus)
    assert status == "failed"
    assert "does not list the process of a CUDA context" in detail
    assert "--pid=host" in fix


def test_a_driver_that_lists_numbers_of_the_host(fake_gpus) -> None:
    fake_gpus.options(listed_as=os.getpid())
    assert lists(fake_gpus)[0] == "passed"


def test_where_no_gpu_is_free_it_is_not_tried(fake_gpus) -> None:
    for uuid in fake_gpus.uuids:
        fake_gpus.process(uuid, os.getpid())
    status, detail, _ = lists(fake_gpus)
    assert status == "passed"
    assert "not tried with a context: 1 GPU asked for, 0 free" in detail


def test_memory_of_nobody(fake_gpus) -> None:
    fake_gpus.change(2, used=600 << 20)
    status, detail, fix = lists(fake_gpus)
    assert (status, detail.startswith("GPU 2: 600 MiB of memory in use by no process")) == ("warning", True)
    assert "SAFE_GPU_UNEXPLAINED_MEMORY" in fix
    assert lists(fake_gpus, SAFE_GPU_UNEXPLAINED_MEMORY="1GiB")[0] == "passed"


def test_lists_that_nobody_asks_for(fake_gpus) -> None:
    fake_gpus.change(2, compute_error=3)
    status, detail, fix = lists(fake_gpus)
    assert (status, "GPU 2" in detail, "SAFE_GPU_PROCESS_LIST=optional" in fix) == ("failed", True, True)
    status, detail, _ = lists(fake_gpus, SAFE_GPU_PROCESS_LIST="optional")
    assert (status, "by lease and memory alone" in detail) == ("warning", True)


def test_mps_daemons_and_clients(fake_gpus, eventually) -> None:
    fake_gpus.use_nvml_here()
    assert finding("MPS").status == "passed"
    client = fake_gpus.process(fake_gpus.uuids[3], os.getpid(), kind="mps")
    assert "clients on GPU 3" in finding("MPS").detail
    client.unlink()
    daemon = subprocess.Popen(["/usr/bin/nvidia-cuda-mps-control", "60"], executable=shutil.which("sleep"))
    # exec(2) closes the pipe that Popen waits for before the new command line can be read.
    eventually(lambda: b"mps-control" in Path(f"/proc/{daemon.pid}/cmdline").read_bytes())
    try:
        says("MPS", "warning", f"process {daemon.pid}")
    finally:
        daemon.kill()
        daemon.wait()


# The environment


VARIABLES, VISIBLE, ORDER = "SAFE_GPU variables", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


@pytest.mark.parametrize(
    ("check", "variables", "status", "words"),
    [
        (VARIABLES, {}, "passed", "none"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "15m", "SAFE_GPU_NB_GPUS": "2", "SAFE_GPU_FENCE": "ignore"}, "passed", "15m"),
        (VARIABLES, {"safe_gpu_dir": "/x"}, "warning", "safe_gpu_dir"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "soon"}, "failed", "soon"),
        (VARIABLES, {"SAFE_GPU_UNEXPLAINED_MEMORY": "much"}, "failed", "much"),
        (VARIABLES, {"SAFE_GPU_NB_GPUS": "0"}, "failed", "'0'"),
        (VARIABLES, {"SAFE_GPU_FENCE": "yes"}, "failed", "ignore"),
        (VARIABLES, {"SAFE_GPU_DIR": "state"}, "failed", "relative"),
        (VARIABLES, {"SAFE_GPU_FSROOT": "/nowhere"}, "failed", "/nowhere"),
        (VARIABLES, {"SAFE_GPU_FSROOT": "/tmp"}, "warning", "another host"),
        (VISIBLE, {}, "passed", "not set"),
        (VISIBLE, {VISIBLE: "0,1,2,3,4,5,6,7"}, "passed", "all GPUs"),
        (VISIBLE, {VISIBLE: "0"}, "warning", "limits claims to 1 of 8"),
        (VISIBLE, {VISIBLE: "0", "SAFE_GPU_FENCE": "ignore"}, "passed", "is ignored"),
        (VISIBLE, {VISIBLE: "0", "SLURM_JOB_ID": "7"}, "passed", "as the job's share"),
        (VISIBLE, {VISIBLE: ""}, "failed", "CUDA shows no GPU"),
        (VISIBLE, {VISIBLE: "1,1"}, "failed", "CUDA shows no GPU"),
        (VISIBLE, {VISIBLE: "1,99,2"}, "warning", "stops reading at '99'"),
        (ORDER, {}, "passed", "not set"),
        (ORDER, {ORDER: "PCI_BUS_ID"}, "passed", "PCI_BUS_ID"),
        (ORDER, {ORDER: "PCI"}, "warning", "unknown to CUDA"),
        ("batch job", {}, "passed", "not in a batch job"),
        ("batch job", {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "passed", "rank 1 of 4"),
        ("batch job", {"JOB_ID": "12", "SGE_TASK_ID": "3", "SGE_ROOT": "/x"}, "passed", "sge:12.3"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, "passed", "2 GPUs asked for"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "3"}, "passed", ""),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, "warning", "0,1"),
        ("OpenMP variables", {"OMP_PROC_BIND": "false", "KMP_AFFINITY": "disabled"}, "passed", "no variable"),
        ("OpenMP variables", {"OMP_PROC_BIND": "close"}, "warning", "close"),
        ("OpenMP variables", {"GOMP_CPU_AFFINITY": "0-3"}, "warning", "0-3"),
        ("OpenMP variables", {"KMP_AFFINITY": "granularity=fine,compact"}, "warning", "compact"),
    ],
)
def test_variables(check: str, variables: dict[str, str], status: str, words: str) -> None:
    says(check, status, words, environment(**variables))


def test_a_typo_is_corrected() -> None:
    says(VARIABLES, "warning", host=environment(SAFE_GPU_TIMEOT="1"), fix="did you mean SAFE_GPU_TIMEOUT?")


def test_the_two_lists_of_slurm_on_an_amd_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    lists = dict.fromkeys(("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "4,5")
    says(VISIBLE, "passed", "limits claims to 2 of 8", environment(**lists, SLURM_JOB_ID="7"))


def test_numbers_that_mean_other_gpus_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:workstation-mixed")
    says(VISIBLE, "warning", "ambiguous", environment(CUDA_VISIBLE_DEVICES="1"), "PCI_BUS_ID")


def test_scopes_that_live_and_scopes_that_leaked(state_dir: Path, child) -> None:
    assert finding("SAFE_GPU_SCOPE", environment()).status == "passed"
    outer = child(HOLD.replace("only=0", "only=0, delegate=True").replace('"held"', "os.environ['SAFE_GPU_SCOPE']"))
    token = outer.hear()
    says("SAFE_GPU_SCOPE", "passed", f"claim of process {outer.pid}, GPU 0", environment(SAFE_GPU_SCOPE=token))
    outer.kill()
    says("SAFE_GPU_SCOPE", "warning", host=environment(SAFE_GPU_SCOPE=token), fix="unset SAFE_GPU_SCOPE")


def test_a_limited_address_space(child) -> None:
    code = (
        "import resource\nfrom safe_gpu import doctor\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "found = dict(doctor.CHECKS)['address space limit'](doctor.CheckedHost())\n"
        "say(found.status, found.detail)"
    )
    said = child(code).hear()
    assert said.startswith("warning limited to 8.0 GiB")


def test_a_narrow_mask(fake_gpus) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    near = ",".join(map(str, cpus))
    fake_gpus.write({"node_cpus": near}, {"node_cpus": str(cpus[-1])})
    code = f"import os; os.sched_setaffinity(0, {{int(c) for c in os.environ['MASK'].split(',')}})\n{ASK}"

    def ask(mask: str) -> str:
        return fake_gpus.python(code, "CPU mask", MASK=mask)

    assert ask(near).startswith("passed")
    assert "this process may use only some" in ask(str(cpus[-1]))
    assert ask(str(cpus[0])).startswith("warning|GPU 1: this process may use no CPU")


# The policy and the history


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


@as_root
@pytest.mark.parametrize(
    ("prepare", "status", "words", "fix"),
    [
        ("printf '[default]\nmax_gpus = 4\n[user anna]\nmax_gpus = 1' > $P", "passed", "2 sections", ""),
        ("printf '[default]\nmax_gpus = many' > $P", "failed", ":2: max_gpus = many is not a number", "line 2"),
        ("echo '[default]' > $P; chmod 666 $P", "warning", "mode 0666): it is ignored", "as root"),
        ("echo '[default]' > $P; chown 54321 $P", "warning", "not to root", "as root"),
        ("ln -s /etc/passwd $P", "warning", "is a link", "as root"),
        ("true", "warning", "does not exist", "unset SAFE_GPU_POLICY"),
    ],
)
def test_a_policy(tmp_path: Path, prepare: str, status: str, words: str, fix: str) -> None:
    path = str(tmp_path / "policy.ini")
    subprocess.run(f"umask 022; {prepare}", shell=True, check=True, env={**os.environ, "P": path}, timeout=60)
    says("policy file", status, words, environment(SAFE_GPU_POLICY=path), fix)


def test_a_host_without_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("safe_gpu.settings.HOST_FILES", (str(tmp_path / "config.ini"),))
    says("policy file", "skipped", host=environment())


@pytest.mark.parametrize(
    ("prepare", "status", "words", "fix"),
    [
        ("true", "passed", "nothing has been recorded", ""),
        ("mkdir -m 1777 history", "passed", "mode 1777", ""),
        ("mkdir -m 1755 history", "warning", "not recorded", "chmod 1777"),
        ("mkdir -m 777 history", "warning", "remove", "chmod 1777"),
        ("ln -s /tmp history", "warning", "may not be recorded", "rm "),
    ],
)
def test_the_history(state_dir: Path, prepare: str, status: str, words: str, fix: str) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    subprocess.run(prepare, shell=True, check=True, cwd=state_dir, timeout=60)
    says("history", status, words, fix=fix)
