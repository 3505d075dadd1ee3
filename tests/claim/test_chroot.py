"""Claims in a plain chroot (sbuild, mock, a rescue system): no mount is listed for its root directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gpus import PACKAGE_ROOT

# All of this machine but /tmp, in a directory that is no mount.
ENTER = """
for path in /*; do
  if [ -L "$path" ]; then cp -P "$path" "$0$path"
  elif [ -d "$path" ] && [ "$path" != /tmp ]; then mkdir -p "$0$path" && mount --rbind "$path" "$0$path"
  fi
done
mkdir -p -m 1777 "$0/tmp"
exec chroot "$0" "$@"
"""
TELL = """awk '$5 == "/"' /proc/self/mountinfo; echo "$CUDA_VISIBLE_DEVICES"; cd "$SAFE_GPU_DIR/claims"; ls | wc -l"""


def test_a_claim_in_a_plain_chroot(open_tmp: Path) -> None:
    enter = ["unshare", "--mount", "sh", "-euc", ENTER, str(open_tmp)]
    if os.geteuid() or subprocess.run([*enter, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("needs root, to make a chroot")
    run = [sys.executable, "-m", "safe_gpu", "run", "-q", "--affinity", "node", "-n", "2", "--", "sh", "-c", TELL]
    environment = {**os.environ, "SAFE_GPU_DIR": "/tmp/state", "PYTHONPATH": str(PACKAGE_ROOT)}
    del environment["SAFE_GPU_TEST_ETC"]  # it is not below this root
    done = subprocess.run([*enter, *run], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["0,1", "1"], "")
