"""Whatever programs and the kernel say: nvidia-smi, NVML, Grid Engine, sysfs and /proc below SAFE_GPU_FSROOT.

There are our errors, bounded time and memory, and plain text on a screen; what is malformed counts as missing.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import api
from support.hostile import (
    TEXTS,
    TRICK,
    assert_gpus_shown_safely,
    assert_plain,
    assert_shown_safely,
    bounded,
    broken_text,
    examples,
    refusing,
    with_examples,
)
from support.vendor_hosts import KfdHost

HUGE = 0xFFFFFFFF
TEXT_ANSWERS = (
    st.sampled_from([text.replace("\0", "")[:96] for text in TEXTS]) | st.text(max_size=20) | st.just(b"\xff\xfe\x00")
)
NUMBERS = st.sampled_from([0, 1, 2, -1, 63, 4096, 2**31 - 1, HUGE, 2**64 - 1, -(2**63)])
ROWS = st.builds(
    SimpleNamespace,
    pid=st.sampled_from([0, 1, 4711, HUGE]),
    usedGpuMemory=st.sampled_from([0, 1 << 30, None]),
    gpuInstanceId=st.sampled_from([HUGE, 1]),
    computeInstanceId=st.just(HUGE),
)
ANSWERS = {
    **dict.fromkeys(("nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlSystemGetDriverVersion",
                     "nvmlSystemGetProcessName"), TEXT_ANSWERS),
    **dict.fromkeys(("nvmlDeviceGetCount", "nvmlDeviceGetComputeMode", "nvmlDeviceGetDisplayActive",
                     "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId",
                     "nvmlDeviceGetP2PStatus", "nvmlDeviceGetTemperature"), NUMBERS),
    "nvmlDeviceGetMigMode": st.lists(st.sampled_from([0, 1, HUGE]), min_size=2, max_size=2),
    "nvmlDeviceGetMemoryInfo": st.builds(SimpleNamespace, total=NUMBERS, used=NUMBERS, free=NUMBERS),
    "nvmlDeviceGetUtilizationRates": st.builds(SimpleNamespace, gpu=NUMBERS, memory=NUMBERS),
    "nvmlDeviceGetCpuAffinityWithinScope": st.lists(st.sampled_from([0, 1, 2**64 - 1]), max_size=70),
    "nvmlDeviceGetPciInfo": st.builds(SimpleNamespace, busId=st.binary(max_size=32) | st.sampled_from(
        [b"00000000:07:00.0", b"../../../../etc", b"\x1b[2J", b":::", b"a:b:c.d"])),
    "nvmlDeviceGetComputeRunningProcesses_v3": st.lists(ROWS, max_size=4),
}  # fmt: skip
ASKED = [*ANSWERS, "nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID",
         "nvmlDeviceGetMigDeviceHandleByIndex"]  # fmt: skip
CODES = st.sampled_from([1, 2, 3, 4, 6, 7, 9, 12, 13, 15, 16, 18, 25, 28, 999, 77, 2**31 - 1])


class Code(int):
    """A return code of NVML, in place of an answer."""


@st.composite
def answers(draw: Any) -> dict[str, Any]:
    """Some functions with another answer or a return code, and some that are missing (None)."""
    names = draw(st.lists(st.sampled_from(ASKED), max_size=4, unique=True))
    kinds = {name: ANSWERS.get(name, st.nothing()) | CODES.map(Code) | st.none() for name in names}
    return {name: draw(kind) for name, kind in kinds.items()}


def answering(value: Any) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        if isinstance(value, Code):
            raise pynvml.NVMLError(int(value))
        return value

    return function


SLICED = {"nvmlDeviceGetMigMode": [1, 1]}


@with_examples(
    *({name: value} for name, values in {
        "nvmlDeviceGetCount": [HUGE, -1],
        "nvmlDeviceGetUUID": ["", "GPU-00000000-0000-0000-0000-000000000000", "../../" + TRICK],
        "nvmlDeviceGetName": [TRICK * 3, b"\xff\xfe"],
        "nvmlDeviceGetMemoryInfo": [SimpleNamespace(total=-1, used=2**70, free=-(2**70))],
        "nvmlSystemGetProcessName": [TRICK * 300],
    }.items() for value in values),
    {**SLICED, "nvmlDeviceGetMaxMigDeviceCount": HUGE},
    {**SLICED, "nvmlDeviceGetMigDeviceHandleByIndex": Code(6)},
)  # fmt: skip
@examples(10)
@given(answers())
def test_what_it_answers(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, answered: dict[str, Any]) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.process(fake_gpus.uuids[0], 99_999_999, static=True)
    with monkeypatch.context() as patch, bounded(), refusing() as refused:
        for name, value in answered.items():
            if value is None:
                patch.delattr(pynvml, name)
            else:
                patch.setattr(pynvml, name, answering(value))
        driver = api.NvmlDriver()
        snapshot = driver.detailed(driver.linked(driver.snapshot()))
        driver.usage(snapshot.gpus[:4])
        for gpu in snapshot.gpus[:4]:
            assert driver.cpu_affinity(gpu.uuid, "node") is None or gpu
        driver.close()
        assert_gpus_shown_safely(snapshot)
        assert all(gpu.uuid.strip() for gpu in snapshot.gpus)
    assert refused.error is None or isinstance(refused.error, (api.NoDriverError, api.MissingPackageError))


REPORT = Path(__file__).with_name("nvidia_smi.xml").read_text()
WORDS = (
    '<gpu id="00000000:07:00.0">', "<mig_devices>", "<mig_device>", "<processes>", "</processes>", "<process_info>",
    "<fb_memory_usage>", "<uuid>", "<pid>", "<!--", "<![CDATA[", "&amp;", "&#27;", "No devices were found",
    "Unable to determine the device handle for GPU 0000:07:00.0: GPU is lost.  Reboot the system to recover this GPU",
    "Unable to determine the device handle for GPU",
)  # fmt: skip
DIGITS = "9" * 5000


# What is wrong in a report.
REPORTS = {
    "<pid>1</pid>": [f"<pid>{DIGITS}</pid>", "<pid>4294967296</pid>", "<pid>\u0661\u00b2</pid>",
                     "<pid>&#27;[2Jevil</pid>" + "x" * 100_000],
    "3000 MiB": [f"{DIGITS} MiB"],
    "NVIDIA A100-SXM4-80GB": [TRICK * 1000],
    "python &amp; co": ["&#27;[2J&#x202e;" * 5000],
    "GPU-00000001": ["GPU-00000000", "GPU-" + "0" * 5000],
    "00000000:0F:00.0": ["00000000:07:00.0", "0:0:" + "f" * 5000, "../..:\x000F:00.0"],
    "<processes>": ["<processes>" + "<process_info>" * 100_000],
    "<mig_device>": ["<mig_device>" * 100_000],
    "</nvidia_smi_log>\n": ["</nvidia_smi_log>\n" + "<process_info>" * 100_000],
}  # fmt: skip


@with_examples(
    *((text, 0) for text in (REPORT, "", "<mig_devices>" * 100_000, '<gpu id="00000000:07:00.0">' * 20_000)),
    *((f"No devices were found{more}", 6) for more in ("", TRICK)),
    (f"Failed: {TRICK * 20_000}", 9),
    *((REPORT.replace(old, new, 1), 0) for old, values in REPORTS.items() for new in values),
)
@examples(12)
@given(broken_text(REPORT, WORDS), st.sampled_from([0, 1, 6, 255, -9]))
def test_what_it_prints(monkeypatch: pytest.MonkeyPatch, report: str, code: int) -> None:
    with monkeypatch.context() as patch, bounded(), refusing() as refused:
        patch.setattr(api.nvidia_smi, "find_program", lambda *names: "nvidia-smi")
        output = api.programs.Output(code, report, "")
        patch.setattr(api.nvidia_smi, "output_of", lambda *command, **bounds: output)
        driver = api.nvidia_smi.NvidiaSmiDriver()
        snapshot = driver.detailed(driver.linked(driver.snapshot()))
        driver.usage(snapshot.gpus)
        assert_gpus_shown_safely(snapshot)
    assert refused.error is None or isinstance(refused.error, api.NoDriverError)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file on PATH that is taken for nvidia-smi."""
    path = tmp_path / "nvidia-smi"
    path.write_text("")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    return path


@pytest.mark.parametrize(
    "script",
    ["yes '<gpu id=\"00000000:07:00.0\"><processes>'", "exec cat /dev/zero", "yes >&2", "echo '<gpu'; exec sleep 600",
     "(sleep 600; yes) & echo '<nvidia_smi_log>'", "trap '' TERM; while :; do sleep 600; done"],
)  # fmt: skip
def test_a_program_that_prints_without_end_or_hangs(script: str, program: Path, eventually: Any) -> None:
    program.write_text(f"#!/bin/sh\n{script}\n")
    driver = api.nvidia_smi.NvidiaSmiDriver(timeout=1.0)
    with bounded(seconds=20.0, mebibytes=128), refusing() as refused:
        driver.snapshot()
    assert isinstance(refused.error, api.NoDriverError)
    eventually(lambda: not runs(program))


def runs(program: Path) -> bool:
    """Whether any process runs this script, which is an argument of its shell."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(program).encode() in path.read_bytes():
                return True
    return False


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"#!/nonexistent\n", b"\x00" * 100, b"#!" + b"x" * 5000])
def test_a_file_that_is_no_program(content: bytes, program: Path) -> None:
    program.write_bytes(content)
    with refusing() as refused:
        api.nvidia_smi.NvidiaSmiDriver(timeout=5.0).snapshot()
    assert isinstance(refused.error, api.NoDriverError)
    assert "cannot be started" in str(refused.error)


# Trees of sysfs and /proc

Tree = dict[str, str]
CPU, NODE, PCI = "sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci/devices"

CPUS: Tree = {
    f"{CPU}/online": "0-3",
    f"{NODE}/online": "0-1",
    **{f"{CPU}/cpu{n}/topology/core_cpus_list": f"{n & ~1}-{n | 1}" for n in range(4)},
    **{f"{CPU}/cpu{n}/topology/physical_package_id": str(n // 2) for n in range(4)},
    **{f"{CPU}/cpu{n}/cache/index0/level": "3" for n in range(4)},
    **{f"{CPU}/cpu{n}/cache/index0/shared_cpu_list": f"{n & ~1}-{n | 1}" for n in range(4)},
    **{f"{NODE}/node{n}/cpulist": f"{2 * n}-{2 * n + 1}" for n in range(2)},
    **{f"{NODE}/node{n}/distance": "10 20" if n == 0 else "20 10" for n in range(2)},
    f"{PCI}/0000:07:00.0/vendor": "0x10de",
    f"{PCI}/0000:07:00.0/class": "0x030200",
    f"{PCI}/0000:07:00.0/numa_node": "0",
    f"{PCI}/0000:07:00.0/local_cpulist": "0-1",
    "proc/driver/nvidia/gpus/0000:07:00.0/information": "GPU UUID: \t GPU-00000000-0000-0000-0000-000000000000",
}


def kfd_tree(root: Path) -> Tree:
    """Two GPUs, one in two partitions, and a process with memory and a queue, as files."""
    host = KfdHost(root)
    host.gpu(0x07, 4001, 0x1111)
    host.bank(host.gpu(0x0B, 4002, 0x2222), 64 << 30)
    host.gpu(0x0B, 4003, 0x2222, partition=1)
    host.process(1, queues=(4001,), vram_4001=1 << 30)
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*") if file.is_file()}


@st.composite
def broken_tree(draw: Any, tree: Tree) -> Tree:
    """The tree with some files changed or gone; "" with a name that ends in "/" makes a directory in its place."""
    tree = dict(tree)
    for name in draw(st.lists(st.sampled_from(sorted(tree)), max_size=6)):
        change = draw(st.sampled_from(["value", "value", "value", "drop", "directory", "all"]))
        text = tree.pop(name, "")
        if change == "directory":
            tree[f"{name}/"] = ""
        elif change != "drop":
            same = [one for one in tree if change == "all" and one.endswith(name[-9:])]
            tree.update(dict.fromkeys([name, *same], draw(broken_text(text, most=2))))
    return tree


def plant(root: Path, tree: Tree) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name, text in tree.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            path.write_bytes(text.encode("utf-8", "surrogatepass"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path / "root"))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
    return tmp_path / "root"


def changed(tree: Tree, **values: str) -> Tree:
    """The tree with these values in every file whose name ends like this."""
    return {name: next((text for end, text in values.items() if name.endswith(end)), old) for name, old in tree.items()}


def test_a_tree_of_amd_gpus(root: Path, tmp_path: Path) -> None:
    tree = kfd_tree(tmp_path / "valid")

    @with_examples(
        *(changed(tree, **{name: value}) for name, value in (
            ("gpu_id", DIGITS), ("gpu_id", "-1"), ("vram_4001", TRICK * 999), ("vram_4001", "-1"),
            ("properties", f"simd_count {DIGITS}\nlocation_id {'9' * 20}\n"),
            ("properties", ("simd_count 4\n" + "x" * 64 + " 1\n") * 3000),
        )),
        changed(tree, vram_4001="9" * 20, mem_info_vram_used="9" * 20),
        *({**tree, name: value} for name, value in (
            ("sys/module/amdgpu/version", TRICK * 999), (f"{PCI}/0000:07:00.0/product_name", TRICK),
            (f"{PCI}/0000:07:00.0/product_name", "x" * 70_000),
            (f"sys/class/kfd/kfd/proc/{'9' * 10}/vram_4001", "1"), ("sys/class/kfd/kfd/proc/\x1b[2J/vram_4001", "1"),
        )),
        tree,
        {},
    )  # fmt: skip
    @examples(6)
    @given(broken_tree(tree))
    def attack(files: Tree) -> None:
        plant(root, files)
        with bounded(), refusing() as refused:
            for device in api.devices(api.Files(str(root))) or ():
                assert device.uuid.startswith(("GPU-", "AMD-"))
                assert device.broken or (device.bus_id and device.gpu_id)
            driver = api.KfdDriver()
            snapshot = driver.detailed(driver.linked(driver.snapshot()))
            driver.usage(snapshot.gpus)
            assert_gpus_shown_safely(snapshot)
            assert all(len(gpu.name) < 100 for gpu in snapshot.gpus)
        assert refused.error is None or isinstance(refused.error, api.NoDriverError)

    attack()


def test_a_tree_of_cpus(root: Path) -> None:
    @with_examples(
        *((files, "node") for files in (
            CPUS, {}, {**CPUS, f"{NODE}/node{'9' * 40}/cpulist": "0"},
            {**CPUS, f"{CPU}/cpu{'9' * 40}/topology/core_id": "0"},
            *(changed(CPUS, cpulist=text) for text in (
                "0-4294967295", ",".join(map(str, range(70_000))), "0-65535," * 20_000, DIGITS,
            )),
        )),
        *((changed(CPUS, distance=text), "socket") for text in ("10 " * 100_000, DIGITS)),
        (changed(CPUS, level=DIGITS), "core-complex"),
        (changed(CPUS, numa_node="-1", local_cpulist=TRICK), "exclusive"),
        (changed(CPUS, information="GPU UUID: GPU-" + "a" * 100_000), "exclusive"),
    )  # fmt: skip
    @examples(6)
    @given(broken_tree(CPUS), st.sampled_from(["node", "socket", "exclusive", "core-complex", "unique_interleaved"]))
    def attack(files: Tree, mode: str) -> None:
        plant(root, files)
        with bounded(), refusing() as refused:
            host = api.read_topology(root)
            for gpu in host.gpus:
                assert_plain([gpu.uuid, gpu.pci_bus_id])
                assert len(gpu.uuid) < 200
            shares = api.planner.plan(host, mode=mode)
            assert all(share <= host.cpus for share in shares)
        assert refused.error is None or isinstance(refused.error, api.GPUAffinityError)

    attack()


def test_no_fifo_in_a_tree_blocks(root: Path, tmp_path: Path) -> None:
    """A saved tree may be anybody's."""
    plant(root, {**CPUS, **kfd_tree(tmp_path / "valid")})
    for name in [file for file in root.rglob("*") if file.is_file()]:
        name.unlink()
        os.mkfifo(name)
    with bounded(), refusing():
        api.read_topology(root)
    with bounded(), refusing():
        api.KfdDriver().snapshot()


# Grid Engine's files and its qstat

HOSTFILE = "gpu1.site.org 4 all.q@gpu1 <NULL>\ngpu2 2 all.q@gpu2 UNDEFINED\n"
QSTAT = Path(__file__).with_name("qstat.xml").read_text()
XML = (
    "<JB_hard_resource_list>", "</JB_hard_resource_list>", "<element>", "<!DOCTYPE x>", "&lol;", "<unknown_jobs>",
    "<AN_text>",
)  # fmt: skip


@with_examples(
    *((answer, HOSTFILE, "") for answer in (
        QSTAT, QSTAT.replace("2.000000", "nan"), QSTAT.replace("2.000000", "1e999"),
        QSTAT.replace("<qstat_l_requests>", "<x>" * 50_000), "<JB_hard_resource_list>" * 100_000,
    )),
    *((QSTAT, f"{os.uname().nodename} {number} q\n", "") for number in (DIGITS, "9" * 400, "\u0663")),
    (QSTAT, "", f"host_slots={DIGITS}"),
)  # fmt: skip
@examples(12)
@given(broken_text(QSTAT, XML), broken_text(HOSTFILE), broken_text("host_slots=4\n"))
def test_what_grid_engine_says(tmp_path_factory: Any, answer: str, hostfile: str, config: str) -> None:
    spool = tmp_path_factory.mktemp("spool")
    for name, text in (("hosts", hostfile), ("config", config)):
        (spool / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    answer = answer.encode("utf-8", "replace").decode()
    environ = {"PE_HOSTFILE": str(spool / "hosts"), "SGE_JOB_SPOOL_DIR": str(spool)}
    with bounded():
        slots = api.gpu_count.slots(environ)
        try:
            request = api.gpu_count.hard_request(answer, ["gpu"])
        except api.gpu_count.QstatError as err:
            assert_shown_safely(str(err), 1000)
            return
        number = None if request is None else api.gpu_count.here(request, slots)
    assert number is None or 0 <= number < 10**18


def test_a_qstat_that_prints_without_end(tmp_path: Path) -> None:
    program = tmp_path / "qstat"
    program.write_text("#!/bin/sh\nexec cat /dev/zero\n")
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_ID": "4711", "SGE_TASK_ID": "undefined"}
    with bounded(20.0, 128), pytest.raises(api.gpu_count.QstatError) as caught:
        api.gpu_count.ask_qstat(environ, "4711", patience=1.0)
    assert_shown_safely(str(caught.value), 1000)
