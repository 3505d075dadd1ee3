"""The grammar of the variables that choose AMD GPUs."""

import pytest

from safe_gpu.gpus.devices import Gpu, HostSnapshot, VisibleLimit
from safe_gpu.runtimes.visible_devices import hide_all, read_rocm, read_visible_once, render_visible, visible_variables

A, B, C, D = "GPU-aa00000000000001", "GPU-aa00000000000002", "GPU-bb00000000000003", "AMD-0000:05:00.0-3"
HOST = HostSnapshot(tuple(Gpu(index, uuid, vendor="amd") for index, uuid in enumerate((A, B, C, D))))


def seen(rocr: str | None = None, hip: str | None = None, cuda: str | None = None) -> tuple[str, ...] | None:
    given = {"ROCR_VISIBLE_DEVICES": rocr, "HIP_VISIBLE_DEVICES": hip, "CUDA_VISIBLE_DEVICES": cuda}
    return uuids(read_rocm({name: value for name, value in given.items() if value is not None}, HOST))


def uuids(visible_limit: VisibleLimit | None) -> tuple[str, ...] | None:
    return None if visible_limit is None else visible_limit.uuids


BY_ROCR = [
    ((A,), ["0", "0,4,1", "0,,2", "0,", A]),
    ((B,), ["0x1,010", "+1", "1,x,2", "1,1,2"]),  # 010 is 8 in C
    ((C,), ["02", "gpu-BB", "2," + C]),  # the last is the same one again
    ((C, A), ["2,0"]),
    ((B, D), [" 1 ,3\t"]),
    ((B, C), ["1," + C]),
    ((A, C), [A.lower() + "," + C.upper()]),
    ((A, B, C, D), ["0,1,2,3,0"]),
    ((), ["-1", "", "4", "1 2", "08", "GPU-", "GPU-aa00000000000001f", "GPU-cc,0"]),
    ((), ["GPU-aa", D]),  # two GPUs; none, since it has no UUID
]
BY_HIP = [
    ((A,), ["0", "0, 1", A]),
    ((B,), ["1,4,0"]),
    ((C, A), ["2,0"]),
    ((B, C), ["1,1,2"]),  # no effect
    ((), ["01", " 1", "-1", "4", "GPU-dd,0"]),
]


@pytest.mark.parametrize(("shown", "values"), BY_ROCR)
def test_rocr(shown: tuple[str, ...], values: list[str]) -> None:
    for value in values:
        assert seen(rocr=value) == shown, value


@pytest.mark.parametrize(("shown", "values"), BY_HIP)
def test_hip(shown: tuple[str, ...], values: list[str]) -> None:
    for value in values:
        assert seen(hip=value) == seen(hip=value, cuda="3") == shown, value
        assert seen(cuda=value) == seen(hip="", cuda=value) == shown, value


def test_hip_counts_what_rocr_left() -> None:
    assert seen(rocr="3,1", hip="1") == (B,)
    assert seen(rocr="3,1", cuda="0") == (D,)
    assert seen(rocr="3,1", hip="2") == ()
    assert seen(rocr="3,1", hip="", cuda="") == (D, B)
    assert seen(rocr="", hip="0") == ()


def test_nothing_is_set() -> None:
    assert seen() is None
    assert seen(hip="") is None
    assert seen(cuda="", hip="") is None


def test_what_a_claim_writes_is_read_back() -> None:
    for visible_as in ("index", "uuid"):
        written = render_visible([HOST.gpus[3], HOST.gpus[0]], visible_as=visible_as, snapshot=HOST)
        assert written == {"ROCR_VISIBLE_DEVICES": f"3,{A}", "HIP_VISIBLE_DEVICES": "0,1", CUDA: "0,1"}
        assert uuids(read_rocm(written, HOST)) == (D, A)


CUDA = "CUDA_VISIBLE_DEVICES"
RAY = {"RAY_RAYLET_PID": "7"}


@pytest.mark.parametrize(
    ("environ", "visible_as", "written"),
    [
        (RAY, "index", {"HIP_VISIBLE_DEVICES": "3,0"}),
        (RAY, "uuid", {"HIP_VISIBLE_DEVICES": f"3,{A}"}),
        # Ray refuses two values that differ
        ({**RAY, "ROCR_VISIBLE_DEVICES": "3,2,0"}, "index", {"HIP_VISIBLE_DEVICES": "0,2"}),
        ({**RAY, "ROCR_VISIBLE_DEVICES": "3,2,0"}, "uuid", {"HIP_VISIBLE_DEVICES": f"0,{A}"}),
    ],
)
def test_under_ray_rocr_is_left_alone(environ: dict[str, str], visible_as: str, written: dict[str, str]) -> None:
    chosen = [HOST.gpus[3], HOST.gpus[0]]
    assert render_visible(chosen, visible_as=visible_as, snapshot=HOST, environ=environ) == written
    assert uuids(read_rocm({**environ, **written}, HOST)) == (D, A)


def test_the_variable_of_opencl_is_written_where_it_is_set() -> None:
    written = render_visible(HOST.gpus[2:3], visible_as="index", snapshot=HOST, environ={"GPU_DEVICE_ORDINAL": "2,3"})
    assert written["GPU_DEVICE_ORDINAL"] == "0"


def of_slurm(value: str, *names: str, **others: str) -> dict[str, str]:
    """The environment of a Slurm job: by default gres.conf has no flags."""
    chosen = names or ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
    return {"SLURM_JOB_ID": "7", **dict.fromkeys(chosen, value), **others}


@pytest.mark.parametrize(
    ("environ", "inside"),
    [
        (of_slurm("2,3"), (C, D)),
        (of_slurm("2,3", "ROCR_VISIBLE_DEVICES"), (C, D)),  # Flags=amd_gpu_env
        (of_slurm("2,3", "CUDA_VISIBLE_DEVICES"), (C, D)),  # Slurm before 21.08
        # what a user has chosen inside of it counts as HIP counts it
        (of_slurm("2,3", CUDA_VISIBLE_DEVICES="1"), (D,)),
        (of_slurm("2,3", HIP_VISIBLE_DEVICES="1"), (D,)),
    ],
)
def test_the_list_that_slurm_writes_twice_counts_once(environ: dict[str, str], inside: tuple[str, ...]) -> None:
    assert uuids(read_visible_once(environ, HOST)) == inside


def test_elsewhere_two_equal_lists_are_what_hip_makes_of_them() -> None:
    both = {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert uuids(read_visible_once(both, HOST)) == uuids(read_rocm(of_slurm("2,3"), HOST)) == ()


def test_a_message_names_the_variables() -> None:
    visible_limit = read_rocm({"ROCR_VISIBLE_DEVICES": "1,2", "CUDA_VISIBLE_DEVICES": "0"}, HOST)
    assert visible_limit is not None
    assert visible_limit.title == "ROCR_VISIBLE_DEVICES=1,2 CUDA_VISIBLE_DEVICES=0"


def test_all_gpus_hidden() -> None:
    assert uuids(read_rocm(hide_all(), HOST)) == ()
    assert set(visible_variables(HOST)) <= set(hide_all())
