"""What anybody may have written: records in the state directory, the policy file, command lines, environments.

With a real state directory full of anybody's garbage, claims succeed, and commands show plain text, not too much.
"""

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import api
from support.gpus import PACKAGE_ROOT
from support.hostile import (
    CLAIM,
    ENDING,
    ENTRY,
    FAULT,
    JUNK,
    LINES,
    NOW,
    TICKET,
    TRICK,
    assert_plain,
    assert_shown_safely,
    bounded,
    broken_json,
    broken_text,
    examples,
    open_files,
    refusing,
    with_examples,
)

import safe_gpu

LATEST = 1e11

CLASSICS = (
    *JUNK, b"[" * 60_000, b'{"pid": ' + b"9" * 5000 + b"}", b'{"pid": NaN}', b"null", b"7", b'"x"', b"[]",
    b"{}", b"\xef\xbb\xbf{}",
)  # fmt: skip


def assert_bounded(value: Any, texts: int, numbers: float = 2**63) -> None:
    """No text is longer, and no number further from 0, than this; none is infinite."""
    if isinstance(value, str):
        assert len(value) <= texts
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        assert math.isfinite(value)
        assert abs(value) <= numbers
    elif isinstance(value, (list, tuple, frozenset)):
        for one in value:
            assert_bounded(one, texts, numbers)


def with_classics(document: dict[str, Any], *changes: dict[str, Any]) -> Any:
    """A test with an example of each classic, and of the document as it is and with each of these changes."""
    return with_examples(*CLASSICS, *(json.dumps({**document, **change}).encode() for change in ({}, *changes)))


def read(data: bytes) -> api.Entry | None:
    """What an entry says; None for nonsense, which is ignored."""
    with bounded(), contextlib.suppress(ValueError):
        return api.Entry.read("7.00000000000000aa", 1000, (1, 2), data[: 1 << 15])
    return None


def assert_entry(entry: api.Entry) -> None:
    fields = entry._asdict()
    for name in ("file", "gpus", "parts", "more"):
        del fields[name]
    assert_plain([*fields.values()])
    assert_bounded([*fields.values()], 200)
    assert max(len(entry.gpus), len(entry.pieces)) <= 256
    assert all(isinstance(text, str) for text in (entry.token, entry.inside, entry.host, entry.job, entry.command))
    assert_bounded([*entry.gpus.values(), *entry.parts.values()], 0, 2**60)
    for when in (entry.since, entry.until, entry.queued):
        assert when is None or 0 <= when < LATEST


@with_classics(
    ENTRY,
    {"gpus": {TRICK: None}},
    {"gpus": "x" * 60_000},
    {"gpus": {"GPU-1": -1}},
    {"gpus": {str(number): None for number in range(5000)}},
    {"parts": {"GPU-1": math.inf}},
    {"token": TRICK, "host": {"\x1b": "\x1b"}},
    {"since": math.nan, "until": math.inf},
    {"pid": 1e5, "v": True, "start": "\u0661"},
)
@examples(20)
@given(broken_json(ENTRY))
def test_an_entry(data: bytes) -> None:
    entry = read(data)
    if entry is not None:
        assert_entry(entry)
        assert_plain([value for value in api.holder_as_written(entry)._asdict().values() if isinstance(value, str)])


@with_classics(
    TICKET,
    {"nb_gpus": math.inf, "gpus": "GPU-1"},
    {"gpus": [TRICK] * 5000},
    {"hold_for": math.inf, "turn": -math.inf},
    {"turn": math.nan},
    {TRICK: TRICK, "near": ["a"] * 60, "min_memory": "x" * 5000},
)
@examples(20)
@given(broken_json(TICKET))
def test_a_ticket(data: bytes) -> None:
    ticket = read(data)
    if ticket is None or not ticket.nb_gpus:
        return
    assert_entry(ticket)
    with bounded():
        request = api.TicketRequest.of(ticket)
        turn = api.turn_of(ticket)
    assert 1 <= request.nb_gpus <= 1024
    assert request.hold_for is None or 1 <= request.hold_for < math.inf
    assert turn is None or 0 <= turn <= 2**53
    assert len(request.conditions) <= 16
    assert isinstance(request.competes_with(ticket), bool)


@with_classics(FAULT, {"error": TRICK}, {"when": math.nan}, {"when": 1e300})
@examples(15)
@given(broken_json(FAULT))
def test_a_note_of_a_fault(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        api.write_fault(place, "GPU-1", api.GpuFault(NOW, "makes the directory"))
        Path(place, "faults", f"GPU-1.{os.geteuid()}").write_bytes(data)
        with bounded():
            fault = api.read_faults(place, ["GPU-1"]).get("GPU-1")
    if fault is not None:
        assert_plain(fault.error)
        assert 0 < fault.lasts <= api.LAST_CHOICE
        assert_bounded(tuple(fault), 400)


LOOKS = {"span": 120.5, "used": [30.25, 60], "missed": [0, 60], "idle": [60, 0], "memory": [1 << 30, 0]}
LOOKED = {"v": 1, "claim": [4470, NOW], "looks": LOOKS}
KEPT = {"v": 1, "claims": [{"claim": [4470, NOW], "gpus": ["GPU-a", "GPU-b"], "told": 60, "looks": LOOKS}]}
CLAIMS = (CLAIM, {"labels": [TRICK], "gpus": [TRICK]}, {"labels": ["9" * 5000]}, {"claim": 5}, {"claim": [[[]], {}]})
ENDS = (ENDING, {"claim": [1e5, NOW], "ended": NOW}, {"claim": [4470, 5], "ended": [math.nan, math.inf]})


@with_classics(*CLAIMS)
@with_classics(*ENDS)
@example(b'{"v": 1' * 9000)
@examples(30)
@given(broken_json(CLAIM) | broken_json(ENDING) | broken_json(LOOKED))
def test_a_line_of_the_history(data: bytes) -> None:
    with bounded():
        found = [one for one in [api.status_history.parse_line(data)] if one is not None]
        claims = api.status_history.merged(found)
    for end in found:
        if isinstance(end, api.status_history.ClaimEnd):
            assert_bounded(tuple(end), 0)
            assert 0 < end.since <= end.seen <= end.ended < LATEST
        if isinstance(end, api.ClaimLooks):
            assert_bounded([end.pid, end.since, end.span, *chain(*end.uses)], 0)
            assert all(0 <= use.used <= use.looked <= end.span < LATEST for use in end.uses)
    for claim in claims:
        values = [value for key, value in claim._asdict().items() if key != "running"]
        assert_plain(values)
        assert_bounded(values, 200)
        assert 0 < claim.since < LATEST


POLICY = """# limits of this host
[default]
max_gpus = 4
max_hold = 2d
default_hold = 8h

[user anna]
max_gpus = unlimited

[group 100]
max_wait = 1h30m
idle_report_after = 30m
"""
DIGITS = "9" * 5000


@with_examples(
    POLICY, "[default]\n" * 6000, "[user " + "x" * 60_000 + "]\nmax_gpus = 1",
    *(POLICY.replace(old, new) for old, new in (
        ("4", DIGITS), ("2d", DIGITS), ("2d", "9" * 400 + "d"), ("2d", "1d" * 9000), ("anna", TRICK), ("100", DIGITS),
        ("max_gpus", TRICK),
    )),
)  # fmt: skip
@examples(15)
@given(broken_text(POLICY, ("[", "[user ", "]", "=", "[default]", "max_gpus", "\ufeff")))
def test_a_policy(text: str) -> None:
    with bounded(), refusing() as refused:
        parsed = api.config.parse(text, "/etc/safe-gpu/policy.ini")
        for uid in (0, 1000):
            limits = api.config.limits_of_user(parsed, uid)
            assert limits.max_gpus is None or 0 <= limits.max_gpus < 10**5
        api.config.limits_of_user(parsed, os.geteuid())
    if refused.error is not None:
        assert isinstance(refused.error, api.PolicyError)
        assert refused.error.line in range(1, len(text.splitlines()) + 1)


@pytest.mark.parametrize("argument", [TRICK, "\udcff" * 9, "x" * 100_000, "\u0301" * 30_000, ""])
def test_command_lines_of_others(argument: str, tmp_path: Path) -> None:
    program = tmp_path / TRICK.replace("/", "")[:30]
    os.symlink(sys.executable, program)
    process = subprocess.Popen([program, "-c", "input()", argument], stdin=subprocess.PIPE)
    with process, bounded():
        command = api.procfs.command_of(process.pid) or ""
        process.communicate(b"\n", timeout=60)
    assert_plain(command)
    assert len(command) <= 200
    assert_shown_safely(command)


SHOWN = (b"CUDA_VISIBLE_DEVICES", b"SAFE_GPU_BOUND", b"SAFE_GPU_EXPECT", b"CUDA_DEVICE_ORDER", b"\xff")
BYTES = st.binary(max_size=80).map(lambda value: value.replace(b"\0", b",")) | st.sampled_from(
    [b"", b"0", b"-1", DIGITS.encode(), TRICK.encode(), b"0," * 20_000, b"GPU-\xff", b"[[[[", b"x" * 100_000]
)


@examples(4)
@given(st.dictionaries(st.sampled_from(SHOWN), BYTES, max_size=3))
@example({b"CUDA_VISIBLE_DEVICES": TRICK.encode()})
@example({b"CUDA_VISIBLE_DEVICES": b"0," * 60_000, b"SAFE_GPU_BOUND": DIGITS.encode()})
def test_environments_of_others(dgx: object, environment: dict[bytes, bytes]) -> None:
    with subprocess.Popen(["/bin/cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        for gpu in (None, 0):
            with bounded(), refusing():
                report = safe_gpu.placement(process.pid, ordinal=gpu)
                assert_shown_safely(str(report), own=True)
                assert_plain(report.as_dict())


# Variables of our own: of this package, of schedulers, launchers and vendors, with any bytes in them

PATHS = ("SAFE_GPU_DIR", "SAFE_GPU_SIMULATED_DIR", "SAFE_GPU_POLICY")
SCREEN = {"COLUMNS", "TERM", "NO_COLOR", "TZ", "HOSTNAME"}


def named_in(*rooms: str) -> set[str]:
    """The names of variables, and of a few other things, that these rooms have in quotes."""
    texts = (path.read_text() for room in rooms for path in Path(safe_gpu.__file__).parent.joinpath(room).rglob("*.py"))
    return {name for text in texts for name in re.findall(r'"(_?[A-Z][A-Z]+_?[A-Za-z_]+)"', text)}


JOBS = sorted({*named_in("schedulers", "affinity"), "SGE_HGR_gpu", "NHOSTS", "NSLOTS"})
NAMES = sorted({*JOBS, *api.VARIABLES, *named_in("runtimes"), *SCREEN}.difference({*PATHS, "PATH"}))

# What an environment can hold: no NUL, and bytes that are not UTF-8 as lone surrogates of their own.
VALUES = st.one_of(
    LINES.map(lambda text: text.replace("\0", "").encode("utf-8", "replace").decode()),
    st.sampled_from(
        ["\udcff\udc80", "0,1", "0", "-1", "1.5", "1e308", "9" * 400, "inf", "2(x3),1", "1(x999999999)",
         "4711[5].server", "4711.server", "ƒ3ETxsR9H", "[", "undefined", "GPU-", "MIG-GPU-/1/0", "0,0", DIGITS + ",1",
         ",", "2-12:00:00", "1d" * 99, "20GiB", "1e9999GiB", "auto", "node", "simulated:", "simulated:laptop",
         "/dev/null", "/nonexistent/active_jobs/x.1"]
    ),
)  # fmt: skip
ENVIRONMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
EXITS = (0, 69, 70, 73, 75, 78)


def assert_logged_safely(caplog: pytest.LogCaptureFixture) -> None:
    """Whether a terminal can show what was logged since the last call; Python shows warnings on stderr."""
    for message in caplog.messages:
        assert_shown_safely(message, own=True)
    caplog.clear()


@with_examples(
    *({"PBS_JOBID": number} for number in (DIGITS, f"4711[{DIGITS}]")),
    {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "9" * 18, "SLURM_STEP_GPUS": TRICK},
    {"SLURM_JOB_ID": "1", "SLURM_NODEID": "9" * 18, "SLURM_STEP_TASKS_PER_NODE": "1(x1)," * 20_000},
    {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1", "CUDA_VISIBLE_DEVICES": "," * 100_000},
    *({"_CONDOR_JOB_AD": path, "_CONDOR_AssignedGPUs": "," * 100_000} for path in ("/dev/zero", "/proc/self/environ")),
)
@examples(25)
@given(st.dictionaries(st.sampled_from(JOBS), VALUES, max_size=6))
def test_jobs_and_ranks(environ: dict[str, str]) -> None:
    with bounded():
        job = api.current(environ)
        assert_plain([job.job_label or ""])
        assert len(job.job_label or "") <= 100
        assert api.gpu_count.declared_gpus(environ, ask=False) is None or environ
        with refusing() as refused:
            assert 0 < api.gpu_count.number_for_job(environ, ask=False) < 10**18
    assert refused.error is None or isinstance(refused.error, api.UnsatisfiableRequestError)
    assert len(str(refused.error or "")) < 25_000


@pytest.mark.parametrize("visible", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SAFE_GPU_TIMEOUT"])
def test_a_claim_in_such_an_environment(visible: str, monkeypatch: Any, dgx: Any, run: Any, caplog: Any) -> None:
    """It ends well or with an error of ours, and leaves no lease, whatever the variables say."""

    @with_examples(
        *(({}, value) for value in (DIGITS, "1e308")),
        *((environ, "0") for environ in (
            {"SAFE_GPU_FOR": "1e308"}, {"SAFE_GPU_UNEXPLAINED_MEMORY": DIGITS},
            {"SAFE_GPU_UNEXPLAINED_MEMORY": "1e9999GiB"}, {"SAFE_GPU_SCOPE": TRICK}, {"SAFE_GPU_SCOPE": "\udcff"},
            {"SAFE_GPU_FSROOT": f"/{TRICK}"}, {"SAFE_GPU_FSROOT": "\udcff"}, {"COLUMNS": "9" * 9}, {"COLUMNS": "1"},
            {"SAFE_GPU_BOUND": TRICK, "SAFE_GPU_EXPECT": "\udcff", "SAFE_GPU_RAY_WORKER": "x"},
            {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "9" * 18}, {"PBS_JOBID": "1", "PBS_WALLTIME": "9" * 18},
            {"SGE_JOB_SPOOL_DIR": f"/x/active_jobs/{DIGITS}.1"}, {"SAFE_GPU_DRIVER": f"simulated:{TRICK}"},
        )),
    )  # fmt: skip
    @examples(4)
    @given(ENVIRONMENTS, VALUES)
    def attack(environ: dict[str, str], value: str) -> None:
        with monkeypatch.context() as patched:
            for name, text in {**environ, visible: value}.items():
                if name != "SAFE_GPU_DRIVER" or text.startswith("simulated:"):
                    patched.setenv(name, text)
            set_before = dict(os.environ)
            with bounded(), refusing():
                safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
            assert_logged_safely(caplog)
            assert {name: os.environ.get(name) for name in set_before} == set_before
            for command in ("status", "status --json", "policy", "wait --timeout 0"):
                run(command, *EXITS, own=True)
        assert dgx.claimed() == []

    attack()


ELSEWHERE = (
    "", "relative", "./state", "~", "\udcff", TRICK, "/dev/null", "/dev/null/state", "/dev/full", "/proc/self",
    "/proc/self/fd/0", "/sys/kernel", "/" + "x" * 300, "/dev/null/" + "y/" * 30_000,
)  # fmt: skip


@pytest.mark.parametrize("variable", PATHS)
def test_paths_that_name_anything(
    variable: str, open_tmp: Path, monkeypatch: pytest.MonkeyPatch, dgx: Any, run: Any, caplog: Any
) -> None:
    """What lies there is not harmed, nothing is left outside, and a claim ends well or with an error of ours."""
    base = open_tmp / "base"
    base.mkdir()
    (empty := open_tmp / "empty").mkdir()
    (base / "file").write_text("kept")
    (base / "link").symlink_to(base / "file")
    (base / "loop").symlink_to(base / "loop")
    os.mkfifo(base / "pipe")
    monkeypatch.chdir(empty)
    below = VALUES.map(lambda text: f"{base}/{text.replace('..', '__')}")
    there = st.sampled_from([f"{base}{end}" for end in ("", "/file", "/link", "/loop", "/pipe", "/file/x", "//./x/..")])

    @with_examples(*(f"{base}/{name}" for name in ("x/" * 2000, "x" * 70_000, TRICK)))
    @examples(5)
    @given(there | below | st.sampled_from(ELSEWHERE))
    def attack(path: str) -> None:
        with monkeypatch.context() as patched:
            patched.setenv(variable, path)
            with bounded(), refusing():
                safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
            assert_logged_safely(caplog)
            for command in ("status", "status --json", "policy", "history", "doctor"):
                # Doctor shows a path with each of its findings.
                run(command, 1, *EXITS, own=True, plain=False, most=200_000)
        assert (base / "file").read_text() == "kept"
        assert os.listdir(empty) == []

    attack()
    assert dgx.claimed() == []


PROGRAM = """
import sys
from safe_gpu.cli import main
for command in ("status", "status --json", "doctor", "policy", "history", "affinity"):
    assert main(command.split()) in (0, 1, 70, 73, 78), command
main(["run", "--", "true"])
"""


@pytest.mark.parametrize("codec", ["utf-8", "ascii", "latin-1"])
def test_bytes_that_are_no_text_in_a_terminal_of_any_codec(codec: str, tmp_path: Path) -> None:
    state = os.fsencode(tmp_path) + b"/caf\xe9\xff\x1b[2J\xe2\x80\xae"
    os.mkdir(state)
    environ = {
        b"SAFE_GPU_DIR": state,
        b"SAFE_GPU_SCOPE": b"\xff\x1b[2J",
        b"PBS_JOBID": b"1.\xff",
        b"SAFE_GPU_\xff": b"\xff",
    }
    python = {b"PYTHONPATH": os.fsencode(PACKAGE_ROOT), b"PYTHONIOENCODING": codec.encode()}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environb, **environ, **python}, capture_output=True, timeout=100)
    out, err = done.stdout.decode(codec), done.stderr.decode(codec)
    assert "Traceback" not in err, err
    assert done.returncode in (0, 1, 70, 73, 78), err
    assert_shown_safely(out)
    assert_shown_safely(err)


# All of them in a real state directory

HELD = 4
"""GPUs of eight that a neighbour holds."""

COMMANDS = (
    "status", "status --json", "status --prometheus", "history", "history --json", "history --by job",
    "history --report month", "wait -n 1 --timeout 0", "policy", "affinity --json",
)  # fmt: skip

AA = "a" * 16
FILE_NAMES = st.sampled_from(
    ["x", ".x", f".{AA}", f"01.{AA}", f"{'9' * 18}.{AA}", f"{'9' * 40}.{AA}", f"-1.{AA}", f"\u0661.{AA}",
     TRICK.replace("/", "").replace("\x00", ""), "\udcff\udcfe", "n" * 255, "2026-13.jsonl", "x.fault"]
)  # fmt: skip
Files = dict[str, bytes]


@st.composite
def garbage(draw: Any, uuids: list[str]) -> tuple[Files, Files]:
    """Contents of files by their path in the state directory, and of such that are kept locked."""
    dead, living = {}, {}
    for number, uuid in enumerate(uuids):
        of_gpu = {**ENTRY, "gpus": {uuid: None}}
        if draw(st.integers(0, 2)) == 0:
            (living if number < HELD else dead)[f"claims/{number}.{AA}"] = draw(broken_json(of_gpu, most=2))
        if draw(st.integers(0, 5)) == 0:
            dead[f"faults/{uuid}.0"] = draw(broken_json(FAULT, most=2))
        if draw(st.integers(0, 5)) == 0:
            dead[f"history/{uuid}.idle"] = draw(st.sampled_from(JUNK))
    for number in range(draw(st.integers(0, 3))):
        (living if draw(st.booleans()) else dead)[f"queue/{number + 1}.{AA}"] = draw(broken_json(TICKET, most=2))
    month = api.month_of(NOW)
    for name in api.file_names(month)[: draw(st.integers(0, 2))]:
        some = broken_json(CLAIM, most=2) | broken_json(ENDING, most=2) | broken_json(LOOKED, most=2)
        lines = draw(st.lists(some, max_size=3))
        dead[f"history/{name}"] = b"\n".join(lines)
    if draw(st.booleans()):
        dead["history/looks"] = draw(broken_json(KEPT, most=2))
    for _ in range(draw(st.integers(0, 2))):
        where = draw(st.sampled_from(["", "claims/", "queue/", "history/"]))
        dead[where + draw(FILE_NAMES)] = draw(st.sampled_from(JUNK))
    dead["host.lock"] = draw(st.sampled_from(JUNK[:3]))
    return dead, living


def judge(run: Any, state_dir: Path, dgx: Any, dead: Files, living: Files) -> None:
    shutil.rmtree(state_dir, ignore_errors=True)
    dgx.hold(*range(HELD), uid=4711)
    (state_dir / "history").mkdir(mode=0o1777, exist_ok=True)
    before, environment = open_files(), dict(os.environ)
    with contextlib.ExitStack() as living_entries:
        for name, data in {**dead, **living}.items():
            path = os.fsencode(state_dir) + b"/" + name.encode("utf-8", "surrogateescape")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
            os.chmod(path, 0o644 if name.startswith(("claims/", "queue/", "history/looks")) else 0o666)
            if name in living:
                api.lock(living_entries.enter_context(open(path, "r+b")).fileno())
        for arguments in COMMANDS:
            run(arguments)
        run("wait -n 8 --timeout 0", 75)
        run("doctor --json", 0, 1)
        with bounded(), safe_gpu.GPUOwner(8 - HELD, safe_gpu.NoPlaceholder(), affinity=None, timeout=0) as owner:
            assert owner.devices_taken == list(range(HELD, 8)), "garbage of others does not stand in the way"
            run("status")
            run("history")  # with the ends of the dead
        with contextlib.suppress(safe_gpu.NotEnoughGpusError):
            safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
            pytest.fail("GPUs that a neighbour holds were taken")
    assert dict(os.environ) == environment
    assert open_files() <= before + 1
    dgx.let_go()
    with safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        pass


def test_garbage_in_every_file(run: Any, state_dir: Path, dgx: Any) -> None:
    uuids, history = dgx.uuids, f"history/{api.month_of(NOW)}.jsonl"

    def changed(document: dict[str, Any], **values: Any) -> bytes:
        return json.dumps({**document, **values}).encode()

    @examples(4)
    @given(garbage(uuids))
    @with_examples(
        [{}, {}],
        [{f"claims/{number}.{AA}": changed(ENTRY, gpus={TRICK: None}) for number in range(8)}, {}],
        [{}, {f"claims/9.{AA}": changed(ENTRY, gpus={TRICK: TRICK})}],
        [{}, {f"claims/9.{AA}": changed(ENTRY, host=TRICK, job=TRICK, command=TRICK)}],
        [{}, {f"claims/9.{AA}": changed(ENTRY, gpus={uuids[0]: None}, since=1, until=9e10)}],
        [{}, {f"queue/9.{AA}": changed(TICKET, gpus=[TRICK], command=TRICK)}],
        [{}, {f"queue/9.{AA}": changed(TICKET, near=TRICK, **{TRICK: TRICK})}],
        [{history: changed(CLAIM, labels=[TRICK], gpus=[TRICK])}, {}],
        [{"history/looks": changed(KEPT, claims=[{**KEPT["claims"][0], "gpus": [TRICK, TRICK]}])}, {}],
        [{f"faults/{uuids[7]}.0": changed(FAULT, error=TRICK * 99)}, {}],
    )
    def attack(files: tuple[Files, Files]) -> None:
        judge(run, state_dir, dgx, *files)

    attack()
