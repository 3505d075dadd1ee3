"""``safe-gpu run --host`` without sshds: an ssh that runs its script here, as the host that it is to reach."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.processes import program

# Where "breaks-HOST" is there, the connection breaks before the claim; "late" tells what waits there then.
SSH = """
while [ "$1" != -- ]; do shift; done
export SAFE_GPU_DIR={0}/state-$2 SAFE_GPU_DRIVER=simulated:$(cat {0}/driver-$2) PATH={1}:/usr/bin:/bin
pending=$(echo "$3" | grep -o '/tmp/safe-gpu-run-[0-9a-f]*' | head -1)
[ -z "$pending" ] || echo $pending >> {0}/made
case "$3" in *--pending*) if [ -e {0}/breaks-$2 ]; then mkdir $pending; echo $pending > {0}/late; exit 255; fi;; esac
eval "$3"
"""


@pytest.fixture
def there(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of two hosts, "a" with eight GPUs and "b" with one."""
    program(tmp_path / "bin" / "ssh", SSH.format(tmp_path, command.path.parent))
    (tmp_path / "driver-a").write_text("dgx-a100")
    (tmp_path / "driver-b").write_text("laptop")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "tried"),
    [
        ((), 0, "a\n"),
        (("--model", "4070"), 0, "b\n"),  # 78 on the other one
        (("-n", 2, "--model", "4070"), 78, ""),
        (("-n", 9), 78, ""),
    ],
)
def test_the_first_that_claims(command: Any, there: Path, words: tuple[object, ...], code: int, tried: str) -> None:
    script = f'echo "${{SAFE_GPU_DIR##*-}}" >> {there}/ran; exit $0'
    for own in (0, 75, 255) if code == 0 else (0,):
        (there / "ran").write_text("")
        done = command.run("run", "--host", "b,a", *words, "--", "sh", "-c", script, own)
        assert (done.returncode, (there / "ran").read_text()) == (code or own, tried), done.stderr
    assert not any(map(os.path.exists, (there / "made").read_text().split())), "a directory was left behind"


def test_what_comes_late_on_a_broken_connection_runs_nothing(command: Any, there: Path, ground: Any) -> None:
    """The first host is asked to give up, and only then the next one is tried."""
    (there / "breaks-a").touch()
    done = command.run("run", "--host", "a,b", "--", "sh", "-c", 'echo "${SAFE_GPU_DIR##*-}"')
    assert (done.returncode, done.stdout) == (0, "b\n"), done.stderr
    pending = (there / "late").read_text().strip()
    late = command.run("run", "--pending", pending, "--", "echo", "ran")
    assert (late.returncode, late.stdout) == (2, "")
    assert "run --host has ended its ssh" in late.stderr
    assert ground.claimed() == []
    os.mkdir(pending)
    assert command.run("run", "--pending", pending, "--", "echo", "ran").stdout == "ran\n"
    assert not os.path.exists(pending)
