"""``doctor`` as a whole: it changes nothing, and says first what is wrong."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from safe_gpu import doctor
from safe_gpu.cli.commands import main
from safe_gpu.doctor import Check, CheckedHost
from safe_gpu.wording.text import display_width


def check_document(document: dict[str, Any]) -> None:
    assert list(document) == ["host", "checks"]
    assert document["host"] == socket.gethostname()
    for one in document["checks"]:
        assert list(one) == ["name", "status", "detail", "fix"]
        assert all(isinstance(text, str) for text in one.values())
        assert one["name"]
        assert one["detail"]
        assert one["status"] in ("passed", "warning", "failed", "skipped")


def test_a_host_without_faults_passes_and_stays_as_it_was(state_dir: Path) -> None:
    checks = doctor.run_checks()
    assert [one.name for one in checks] == list(doctor.CHECKS)
    # A container may well be the place where the tests run.
    places = ("visible processes", "Python packages")
    assert {
        one.name: one.detail for one in checks if one.status in ("failed", "warning") and one.name not in places
    } == {}
    assert doctor.exit_code([one for one in checks if one.name not in places]) == 0
    assert not state_dir.exists()
    check_document(json.loads(json.dumps(doctor.to_dict(checks))))


def test_a_check_that_breaks_is_failed_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: CheckedHost) -> Check:
        raise ZeroDivisionError("a strange host")

    monkeypatch.setattr(doctor, "CHECKS", {"first": broken, "batch job": doctor.CHECKS["batch job"]})
    first, second = doctor.run_checks()
    assert first.status == "failed"
    assert "ZeroDivisionError: a strange host" in first.detail
    assert second.status == "passed"
    assert doctor.exit_code([first, second]) == 1
    assert doctor.exit_code([second]) == 0


FOUND = [
    Check("passed", "not running", name="process lists"),
    Check("skipped", "there is none", name="policy file"),
    Check("warning", "host.lock was held by others for 3.0 s", "look for a process " + "x" * 130, "file locks"),
    Check("failed", "it does not answer " * 9, "restart the driver", "GPU driver"),
    Check("warning", "belongs to no living claim", "unset it", "batch job"),
]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_the_report_says_first_what_is_wrong(width: int, color: bool) -> None:
    text = doctor.render_checks(FOUND, color=color, width=width)
    assert ("\x1b[31mfailed\x1b[0m" in text, "\x1b[33mwarning\x1b[0m" in text) == (color, color)
    lines = re.sub(r"\x1b\[[0-9]+m", "", text).splitlines()
    assert [line.split(": ")[0] for line in lines if line[:1].strip()] == [
        "failed   GPU driver", "warning  file locks", "warning  batch job", lines[-1],
    ]  # fmt: skip
    assert sum(line.startswith(" " * 9 + "fix: ") for line in lines) == 3
    assert lines[-1] == "1 passed, 1 skipped, 1 failed, 2 warnings (-v lists all)"
    (long,) = [line for line in lines if display_width(line) > width and line != lines[-1]]
    assert long.strip() == "x" * 130, "what is to be copied is whole"


def test_the_report_of_all_checks() -> None:
    lines = doctor.render_checks(FOUND, color=False, width=80, verbose=True).splitlines()
    assert lines[-4:-2] == ["passed   process lists: not running", "skipped  policy file: there is none"]
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
    assert by_name["access to GPUs"]["status"] == "skipped"
