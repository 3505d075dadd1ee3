"""The administrator's page, literally: its commands in a throwaway copy of this host, with claims by two users.

``SAFE_GPU_TEST_THROWAWAY=1`` says that this host itself is one. pip installs from a package index there.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.real import REQUIRED

from .conftest import ROOT, all_blocks

THROWAWAY = os.environ.get("SAFE_GPU_TEST_THROWAWAY", "")
BEFORE = """
set -eux
if [ "$2" ]; then
  mkdir /src
  cp -r safe_gpu tools pyproject.toml README.md LICENSE /src
  bash -eux /src/safe_gpu/page.sh
  find /etc /usr /var /opt /run -name '*safe[-_]gpu*' -printf 'left: %p\\n'
  exit
fi
mount -t tmpfs none "$1" || exit 77
mkdir "$1/upper" "$1/work" "$1/host"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/host" || exit 77
mount -t proc proc "$1/host/proc"
mount --rbind /dev "$1/host/dev"
mount -t tmpfs -o mode=1777 none "$1/host/tmp"
mkdir "$1/host/src"
cp -r safe_gpu tools pyproject.toml README.md LICENSE "$1/host/src"
chroot "$1/host" bash -eux /src/safe_gpu/page.sh
cd "$1/upper"
find . -name '*safe[-_]gpu*' -not -path './src*' -not -path './root/*' -not -type c -printf 'left: %p\\n'
"""
CLAIMS = """
job='echo $$ > /tmp/daemon.pid; echo daemon got $CUDA_VISIBLE_DEVICES; exec sleep 600'
runuser -u daemon -- safe-gpu run -- sh -c "$job" > /tmp/daemon.log &
holder=$!
until grep got /tmp/daemon.log; do sleep 0.05; done
runuser -u nobody -- safe-gpu run -- sh -c 'echo nobody got $CUDA_VISIBLE_DEVICES'
runuser -u nobody -- safe-gpu status | grep daemon
runuser -u nobody -- safe-gpu run -n 5 -- true || echo refused with $?
runuser -u nobody -- safe-gpu run -n 4 -- true
"""
# A user removes and closes all that can be reached. In a network of its own a claim has nothing but files.
ATTACK = """
safe-gpu setup
stat -c '%U %a %n' /var/lib/safe-gpu /var/lib/safe-gpu/* /var/lib/safe-gpu/claims/* | sort > /tmp/before
for what in 'chmod 600' 'rm -rf' rmdir; do
  runuser -u games -- find /var/lib/safe-gpu /etc/safe-gpu /etc/tmpfiles.d -depth -exec $what {} + || true
done
stat -c '%U %a %n' /var/lib/safe-gpu /var/lib/safe-gpu/* /var/lib/safe-gpu/claims/* | sort | diff /tmp/before -
unshare -n runuser -u nobody -- safe-gpu run --only 0 --timeout 0 -- true || echo GPU 0 refused with $?
safe-gpu setup --remove || echo removal refused with $?
"""
LEFT = """
safe-gpu setup --remove
rm -r /var/lib/safe-gpu/history/*.jsonl /etc/safe-gpu/config.ini
find /var/lib/safe-gpu /etc/safe-gpu /etc/tmpfiles.d/safe-gpu.conf -printf 'remains: %p\\n' || true
"""


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (REQUIRED or THROWAWAY), reason="needs SAFE_GPU_REQUIRE_REAL=1, as root: pip downloads packages"
)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare")
def test_the_page_on_a_host_of_its_own(tmp_path: Path) -> None:
    blocks = [one.text for one in all_blocks() if one.page == "safe_gpu/ADMIN.md" and one.about == "an administrator"]
    install, setup, *settings, upgrade, rollback, removal = blocks
    reopened = "safe-gpu resume\nsafe-gpu resume --reservation 'a new driver'\n"
    steps = [install, setup, setup, *settings, reopened, CLAIMS, ATTACK, upgrade, "kill -0 $holder\n"]
    steps += [rollback, "kill $(cat /tmp/daemon.pid) || true\nwait\n", LEFT, removal]
    script = "cd /src\ntrap 'kill $(jobs -p) || true' EXIT\n"
    script += "reboot() { safe-gpu resume; }\nnvidia-smi() { true; }\ngroupadd course\n"
    script += (
        "export SAFE_GPU_DRIVER=simulated:dgx-a100 SAFE_GPU_TEST_SIMULATED=1\nunset SAFE_GPU_DIR SAFE_GPU_TEST_ETC\n"
    )
    # Names in the kernel are those of a path, and another such test may run on the machine meanwhile.
    script += (
        f"export SAFE_GPU_SIMULATED_DIR=/src/gpus{tmp_path.name}{os.getpid()}; mkdir -m 1777 $SAFE_GPU_SIMULATED_DIR\n"
    )
    source = tmp_path / "source"
    shutil.copytree(ROOT / "safe_gpu", source / "safe_gpu", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "tools").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "tools/man_page.py"):
        shutil.copy(ROOT / name, source / name)
    (source / "safe_gpu" / "page.sh").write_text(script + "".join(steps))
    (tmp_path / "copy").mkdir()
    command = ["bash", "-c", BEFORE, "bash", str(tmp_path / "copy"), THROWAWAY]
    if not THROWAWAY:
        command = ["unshare", "-m", *command]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(command, cwd=source, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=900)
    said = (tmp_path / "log").read_text()
    if done.returncode == 77 or said.startswith("unshare:"):
        pytest.skip("nothing can be mounted here, or the kernel gives no overlay file system")
    if "No matching distribution" in said:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, said
    assert "daemon got 0" in said
    assert "nobody got 1" in said
    assert "refused with 78" in said
    assert "nothing is left to do: the state directory /var/lib/safe-gpu is root's" in said
    assert "GPU 0 refused with 75" in said
    assert "removal refused with 75" in said
    assert "GPU 3: drained by root: a fan is broken" in said
    remains = [line for line in said.splitlines() if line.startswith("remains: ")]
    assert remains == [f"remains: /var/lib/safe-gpu{part}" for part in ("", "/history")] + ["remains: /etc/safe-gpu"]
    assert [line for line in said.splitlines() if line.startswith("left: ")] == [], "removed without a trace"
