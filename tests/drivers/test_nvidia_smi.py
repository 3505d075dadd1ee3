"""The nvidia-smi driver against a program that answers as the real one does on good and bad days."""

import os
import signal
from typing import Any

import pytest
from support import api

from safe_gpu import GPUOwner, NoPlaceholder

HIDDEN = 4_000_000
BARE = ["54d0709b-558d-5a59-9c65-0c5fc14a21a4", "a9485f58-0a6e-5a97-b73d-87cdf435c65e"]  # of Jetson


@pytest.fixture
def host(fake_gpus: Any, fake_nvidia_smi: Any) -> Any:
    fake_gpus.set(2)
    fake_gpus.quirks = lambda **values: fake_nvidia_smi(values)
    return fake_gpus


@pytest.fixture
def driver(host: Any) -> api.NvidiaSmiDriver:
    return api.NvidiaSmiDriver()


def test_all_fields(host: Any, driver: api.NvidiaSmiDriver) -> None:
    host.write(
        {"bus": "00000000:C1:00.0", "util": 12, "temp": 66, "fan": 30, "mode": 3, "display": 1},
        {"bus": "00000000:0A:00.0", "mode": 2},
    )
    host.process(host.uuids[0], os.getpid(), 3 << 20)
    for number, kind in enumerate(("", "graphics", "mps")):
        host.process(host.uuids[0], HIDDEN + number, number << 20 or None, static=True, kind=kind)
    snapshot = driver.snapshot()
    first, second = snapshot.gpus
    assert (snapshot.driver, snapshot.driver_version) == ("nvidia-smi", "550.54.15")
    assert (first.index, first.uuid, first.pci_bus_id) == (0, host.uuids[1], "0000:0a:00.0")
    assert (first.compute_mode, second.compute_mode) == (api.ComputeMode.PROHIBITED, api.ComputeMode.EXCLUSIVE_PROCESS)
    assert (second.utilization, second.temperature, second.display_active) == (12, 66, True)
    assert (second.memory_total, second.memory_used) == (80 << 30, 6 << 20)
    own, *others = sorted(second.processes or (), key=lambda process: process.pid)
    assert (own.pid, own.memory_used, bool(own.name)) == (os.getpid(), 3 << 20, True)
    assert [process.memory_used for process in others] == [None, 1 << 20, 2 << 20]
    assert [process.kind for process in others] == [
        api.ProcessKind.COMPUTE,
        api.ProcessKind.GRAPHICS,
        api.ProcessKind.MPS,
    ]
    assert (first.draws, second.draws) == (False, True)
    assert driver.usage(snapshot.gpus) == snapshot.gpus
    assert driver.detailed(snapshot) == driver.linked(snapshot) == snapshot


@pytest.mark.parametrize("value", ["[N/A]", "Unknown Error", "ERR!", "Insufficient Permissions"])
def test_values_that_are_none_or_say_lost(host: Any, driver: api.NvidiaSmiDriver, value: str) -> None:
    fields = ("total", "used", "free", "gpu_util", "compute_mode", "display_active", "current_mig", "driver_version")
    host.quirks(**dict.fromkeys(fields, value))
    snapshot = driver.snapshot()
    gpu = snapshot.gpus[0]
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_free, gpu.utilization) == (None, None, None, None)
    assert (gpu.compute_mode, gpu.display_active, gpu.mig_enabled) == (api.ComputeMode.DEFAULT, False, False)
    assert (gpu.uuid, gpu.processes, gpu.unusable, gpu.lost) == (host.uuids[0], (), None, False)
    assert snapshot.driver_version == ""
    for field, text in (("used", "[GPU is lost]"), ("uuid", "[GPU requires reset]")):
        host.quirks(**{field: text})
        assert [(gpu.uuid, gpu.lost) for gpu in driver.snapshot().gpus] == [(uuid, True) for uuid in host.uuids]


@pytest.mark.parametrize(
    ("values", "illness"),
    [
        ({}, ""),
        ({"recovery": 4}, "the driver recommends the recovery action Drain and Reset"),
        ({"remap": "failed"}, "a row of its memory is broken and could not be remapped"),
        ({"remap": "pending"}, "a row of its memory is broken and is remapped at the next reset"),
        ({"recovery": "NA", "remap": "NA"}, ""),
    ],
)
def test_each_poll_tells_what_speaks_against_a_gpu(host: Any, driver: Any, values: Any, illness: str) -> None:
    host.change(1, **values)
    snapshot = driver.snapshot()
    assert [gpu.illness for gpu in snapshot.gpus[:2]] == ["", illness]
    assert driver.examined(snapshot) == snapshot


def test_where_not_all_answer_by_id_the_host_is_asked(host: Any, driver: api.NvidiaSmiDriver) -> None:
    gpus = driver.snapshot().gpus
    host.quirks(one_id=1)
    assert driver.usage(gpus[::-1]) == gpus[::-1]


def test_a_driver_that_does_not_work(host: Any, driver: api.NvidiaSmiDriver, tmp_path: Any, monkeypatch: Any) -> None:
    gpus = driver.snapshot().gpus
    for says, shown in (
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "couldn't communicate"),
        ("", "exit status 9"),
        ("Failed to initialize NVML: Unknown Error", "Unknown Error: restart the container"),
    ):
        host.quirks(fail=1, says=says, status=9)
        for question in (driver.snapshot, lambda: driver.usage(gpus)):
            with pytest.raises(api.NoDriverError, match=shown) as caught:
                question()
            assert caught.value.driver == "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(api.NoDriverError, match="PATH"):
        api.NvidiaSmiDriver()


@pytest.mark.parametrize("lost", [(0,), (3,), (1, 2)])
@pytest.mark.parametrize(
    "said",
    ["GPU {bus}: Unknown Error", "GPU{short}: Unknown Error", "{short}: Unknown Error", "gpu {index} : x",
     "GPU{index}: {short}: GPU is lost.  Reboot the system to recover this GPU", "GPU {index}: {bus}: Unknown Error"],
)  # fmt: skip
def test_a_lost_gpu_in_every_version_s_words(host: Any, driver: api.NvidiaSmiDriver, said: str, lost: Any) -> None:
    host.write(*({"lost": int(number in lost)} for number in range(4)))
    host.quirks(lost_line=f"Unable to determine the device handle for {said}")
    snapshot = driver.snapshot()
    assert [(gpu.index, gpu.lost) for gpu in snapshot.gpus] == [(number, number in lost) for number in range(4)]
    assert all(gpu.lost or gpu.uuid == uuid for gpu, uuid in zip(snapshot.gpus, host.uuids, strict=True))
    assert (snapshot.doubt, snapshot.needs_uuids) == ("", True)


def test_a_gpu_that_is_counted_and_not_named(
    host: Any, driver: api.NvidiaSmiDriver, monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any
) -> None:
    host.write({}, {"lost": 1}, {})
    host.quirks(lost_line="GPU is lost. Reboot the system to recover this GPU")
    snapshot = driver.snapshot()
    assert "nvidia-smi counts 3 GPUs and shows 2, so an index may be that of another GPU" in snapshot.doubt
    assert (len(snapshot.gpus), snapshot.needs_uuids) == (2, True)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    with GPUOwner(1, NoPlaceholder(), only=1, affinity=None, timeout=0):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == host.uuids[2]
    assert snapshot.doubt in caplog.text
    for command in (["status"], ["status", "--json"]):
        api.main(command)
        assert snapshot.doubt in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who drains GPUs")
def test_which_names_are_drained(host: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A UUID, with or without a prefix; an index only where it cannot mislead."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("SAFE_GPU_POLICY", str(tmp_path / "config.ini"))
    host.write({"uuid": BARE[0], "bus": "N/A"}, {"lost": 1}, {})
    api.main(["drain", "2"])
    host.quirks(lost_line="GPU is lost.")
    assert api.main(["drain", "1"]) != 0
    api.main(["drain", BARE[0]])
    assert [*api.drained_gpus()] == [host.uuids[2], BARE[0]]


def section(bus: str, uuid: str) -> str:
    """A free GPU, as the name of a process may forge it."""
    return (
        f'x</process_name></process_info></processes></gpu><gpu id="{bus}"><product_name>Fake</product_name>'
        f"<uuid>{uuid}</uuid><fb_memory_usage><total>81920 MiB</total><used>0 MiB</used></fb_memory_usage>"
        "<compute_mode>Default</compute_mode><processes><process_info><pid>1"
    )


@pytest.mark.parametrize(
    ("bus", "of", "change"),
    [("00000000:07:00.0", 0, {}), ("00000000:01:00.0", 0, {}), ("N/A", 0, {}), ("00000000:07:00.0", 1, {}),
     ("00000000:01:00.0", None, {}), ("00000000:01:00.0", 0, {"attached_gpus": "3"}),
     ("00000000:07:00.0", 0, {"version_lacks": "attached_gpus"})],
)  # fmt: skip
def test_a_process_named_like_a_gpu_makes_busy(host: Any, driver: Any, bus: str, of: int | None, change: Any) -> None:
    """One user computes on GPU 0, and another's process on GPU 1 claims in its name that GPU 0 is free."""
    host.process(host.uuids[0], HIDDEN, 5 << 30, static=True)
    host.process(host.uuids[1], HIDDEN + 1, 1 << 20, static=True, kind="graphics")
    host.quirks(process_name=section(bus, "GPU-other" if of is None else host.uuids[of]), **change)
    snapshot = driver.snapshot()
    states = {one.gpu.uuid: one.state for one in api.judge(snapshot, api.Selection())}
    assert {states.get(uuid, "gone") for uuid in host.uuids} <= {"busy", "gone", "unusable"}
    assert "free" not in states.values()
    assert "nvidia-smi shows more GPUs than it counts, or one twice" in snapshot.doubt
    assert not [one for one in driver.usage(snapshot.gpus) if one.processes == ()]


@pytest.mark.parametrize(
    "quirks",
    [
        {"before": "WARNING: infoROM is corrupted at gpu 0000:0F:00.0\\nHinweis", "after": "\\nWARNING: one, two"},
        {"broken": 1},  # elements close in the wrong order
        {"version_lacks": "compute_mode,free,current_mig,display_active,driver_version,type,gpu_instance_id"},
        *({"process_name": name} for name in ("</process_name><uuid>GPU-x</uuid>", "<!-- <![CDATA[ ]]", "\x00&bogus;")),
        {"process_name": "Unable to determine the device handle for GPU 0000:00:00.0: GPU is lost"},
    ],
)
def test_what_changes_nothing(host: Any, driver: api.NvidiaSmiDriver, quirks: dict[str, object]) -> None:
    for uuid in host.uuids:
        host.process(uuid, HIDDEN, 5 << 20, static=True)
    host.quirks(**quirks)
    snapshot = driver.snapshot()
    assert [(gpu.uuid, gpu.lost, gpu.memory_total) for gpu in snapshot.gpus] == [
        (uuid, False, 80 << 30) for uuid in host.uuids
    ]
    for gpu in snapshot.gpus:
        assert [(one.pid, one.kind, one.memory_used) for one in gpu.processes or ()] == [(HIDDEN, "compute", 5 << 20)]
    assert snapshot.doubt == ""
    host.quirks(process_name="a</process_name><uuid>b &lt; 1", product_name="Graphics Device, 8 GB")
    gpu = driver.snapshot().gpus[0]
    assert gpu.name == "Graphics Device, 8 GB"
    assert [one.name for one in gpu.processes or ()] == ["a</process_name><uuid>b < 1"], "it is whole"


@pytest.mark.parametrize(("wishes", "inherited"), [({"exclude": BARE[0]}, {}), ({}, {"CUDA_VISIBLE_DEVICES": BARE[1]})])
def test_uuids_without_a_prefix_are_names(host: Any, monkeypatch: Any, wishes: Any, inherited: dict[str, str]) -> None:
    host.write({"uuid": BARE[0], "bus": "N/A"}, {"uuid": BARE[1], "bus": "N/A"})
    for name, value in {"SAFE_GPU_DRIVER": "nvidia-smi", **inherited}.items():
        monkeypatch.setenv(name, value)
    for visible_as in ("index", "uuid"):
        with GPUOwner(1, NoPlaceholder(), visible_as=visible_as, affinity=None, timeout=0, **wishes) as owner:
            assert [gpu.uuid for gpu in owner.gpus] == [BARE[1]]
            assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


def test_no_process_list(host: Any, driver: Any) -> None:
    host.process(host.uuids[1], HIDDEN, static=True)
    for quirks, said, supported, of_idle in (
        ({"processes": "N/A"}, "N/A", False, None),
        ({"version_lacks": "processes"}, "does not list", True, None),
        ({"pid": "[Not Supported]"}, "[Not Supported]", False, ()),
        ({"pid": "[Unknown Error]"}, "[Unknown Error]", True, ()),
        ({"version_lacks": "pid"}, "one of them has no number", True, ()),
    ):
        host.quirks(**quirks)
        gpus = driver.snapshot().gpus
        for gpu in (gpus[1], *driver.usage(gpus[1:])):
            assert (gpu.processes, gpu.processes_supported) == (None, supported)
            assert said in gpu.process_error
        assert gpus[0].processes == of_idle


def test_a_query_that_hangs_or_is_interrupted_leaves_no_process(host: Any) -> None:
    def is_gone() -> bool:
        return not os.path.exists(f"/proc/{(host.directory / 'hung').read_text()}")

    def interrupt(_number: int, _frame: object) -> None:
        if (host.directory / "hung").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    host.quirks(hang=1)
    with pytest.raises(api.NoDriverError, match="did not answer within 4 s"):
        api.NvidiaSmiDriver(timeout=4.0).snapshot()
    assert is_gone()
    (host.directory / "hung").unlink()
    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            api.NvidiaSmiDriver().snapshot()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert is_gone()


def test_mig_needs_nvml(host: Any, driver: api.NvidiaSmiDriver) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b", "imem": 20 << 30}, {"mig": 0})
    host.process("MIG-b", HIDDEN, 5 << 20, static=True)
    parent, other = snapshot = driver.snapshot().gpus
    assert (parent.mig_enabled, parent.memory_total, parent.memory_used) == (True, 80 << 30, 5 << 20)
    assert other.unusable is None
    assert driver.usage(snapshot) == snapshot
    host_now = api.HostSnapshot(snapshot)
    for request, limit in (({"nb_gpus": 2}, None), ({"only": "MIG-a"}, None), ({"nb_gpus": 1}, "MIG-a")):
        with pytest.raises(api.UnsatisfiableRequestError, match=r"GPU 0: .* NVML only: pip install nvidia-ml"):
            api.check_possible(host_now, api.parse_request(**request), api.parse_cuda(limit, host_now))
