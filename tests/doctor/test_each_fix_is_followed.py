"""Each fix of ``doctor`` is followed by a test, or it stands here why none can follow it.

The findings are found in the source. Who adds one names its test here.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

from support import api
from support.findings import missing_tests

from safe_gpu import doctor

GPUS, PLACES, OTHERS, TRIALS = (
    f"doctor/test_{name}.py::test_" for name in ("fixes_of_gpus", "fixes_of_places", "fixes", "trials")
)
PODMAN = "containers/test_podman.py::test_"

Following = Mapping[str, str | tuple[str, ...]]
"""A fix as the source has it -> the tests that follow it, or a sentence on why there is none."""

FOLLOWED_BY: dict[str, Following] = {
    "check": {
        "'do what the message says, and check again'": (
            f"{TRIALS}a_full_disk",
            f"{TRIALS}files_of_no_bytes",
            f"{TRIALS}a_relative_directory_is_one_finding",
        ),
        "'look for the cause that the message names; the other checks are not affected'": (
            "what a check of its own raises is a fault of safe_gpu"
        ),
    },
    "driver": {
        "host.vendor.pass_in": "see OF_VENDORS",
        "'upgrade the driver to 535.98 or newer, or set SAFE_GPU_DRIVER=nvidia-smi'": (
            f"{GPUS}numbers_that_are_wrong",
        ),
        "host.vendor.is_slow": "see OF_VENDORS",
        "'unset SAFE_GPU_DRIVER'": (f"{TRIALS}a_simulated_host_is_told",),
    },
    "_without_nvml": {
        "fix": (f"{GPUS}nvidia_ml_py_is_installed", f"{GPUS}nvml_is_where_the_loader_finds_it"),
    },
    "_no_driver": {
        "f'{vendor.install}, or try SAFE_GPU_DRIVER=simulated:{vendor.preset}'": (
            f"{GPUS}without_a_driver_a_simulated_host",
        ),
        "f'{vendor.recover}; if it only takes long, {vendor.is_slow}'": (f"{GPUS}a_driver_that_hangs",),
        "'do what the message says, and check again'": (
            f"{OTHERS}a_driver_that_is_loaded_is_not_to_be_installed",
        ),
    },
    "cuda_starts": {"host.vendor.no_library": "see OF_VENDORS"},
    "lost_gpus": {
        "host.vendor.recover": "see OF_VENDORS",
        "'ask the scheduler or the container for these GPUs'": (f"{GPUS}a_gpu_that_the_job_was_not_given",),
    },
    "ill_gpus": {
        "fix": (
            f"{GPUS}a_reset",
            f"{GPUS}an_ill_gpu_is_drained",
            f"{GPUS}a_claim_that_works_ends_the_note_of_one_that_failed",
        ),
    },
    "process_lists": {
        "way_out": (f"{GPUS}another_driver_lists_processes", f"{OTHERS}gpus_that_cannot_be_watched"),
        "'make sure that nobody uses these GPUs without safe_gpu, or claim as root'": (
            f"{GPUS}what_the_kernel_shows_to_root",
        ),
        "f'{fix} {MEMORY_VARIABLE}'": (f"{OTHERS}gpus_that_cannot_be_watched",),
    },
    "policy": {
        "f'as root: replace {path} by a file of root\\'s with mode 644'": (f"{OTHERS}a_policy_is_written_anew",),
        "'unset SAFE_GPU_POLICY'": (f"{OTHERS}variables",),
    },
    "variables": {"f'unset {name}'": (f"{OTHERS}variables",)},
    "visible_devices": {"f'set {limit.clear_by}'": (f"{OTHERS}numbers_that_mean_other_gpus_to_cuda",)},
    "_visible_gpus": {
        "lift": (f"{OTHERS}variables", f"{PLACES}what_a_job_asks_its_scheduler_for"),
        "f'correct it, or {lift}'": (f"{PLACES}a_list_that_is_corrected",),
    },
    "batch_job": {
        "'ask the scheduler for the GPUs that the job uses'": (f"{PLACES}what_a_job_asks_its_scheduler_for",),
    },
    "_other_gpus_than_given": {
        "'compare gres.conf with the driver's numbers (AutoDetect=nvml), or set CUDA_VISIBLE_DEVICES as Slurm says'": (
            f"{PLACES}a_job_uses_the_gpus_that_slurm_says",
        ),
    },
    "packages": {"'pip install -U filelock'": (f"{GPUS}filelock_is_installed",)},
    "drained": {
        "'; '.join(fixes)": (
            f"{OTHERS}drained_gpus_are_resumed",
            f"{OTHERS}reserved_gpus_are_given_free",
            f"{OTHERS}who_drained_is_who_resumes",
            f"{OTHERS}lines_that_no_command_takes_out",
            f"{PLACES}lines_that_close_no_gpu_are_removed",
        ),
    },
    "directory": {
        "f'start the container with -v {real}:{real}'": (
            f"{PODMAN}a_container_with_the_state_directory_of_the_host",
        ),
        "_way_out(path)": (f"{PLACES}another_directory", f"{PLACES}a_network_file_system"),
    },
    "_trouble_with_owner": {
        "'end what uses it, and remove it'": (f"{OTHERS}what_stands_in_the_way_is_removed",),
        "f'as root: {setup_command(path)}'": (f"{OTHERS}setup_takes_a_directory_back",),
    },
    "_not_there": {
        "another_place(path)": (f"{TRIALS}a_read_only_file_system",),
        "'create that directory, open to all users (mode 755)'": (f"{PLACES}a_directory_above_that_is_missing",),
        "f'as root: {setup_command(path)}'": (f"{PLACES}a_directory_above_that_is_root_s",),
    },
    "_trouble_with_mode": {"_way_out(path)": (f"{PLACES}another_directory",)},
    "_trouble_above": {"_ELSEWHERE": (f"{PLACES}another_directory",)},
    "doors": {"fix": (f"{PLACES}doors_that_cannot_be_taken", f"{PLACES}more_open_files")},
    "entries": {
        "fix": (f"{OTHERS}entries_that_are_ignored_are_removed", f"{PLACES}a_directory_with_too_many_names"),
    },
    "process_namespace": {
        "'start the container with --pid=host'": (
            f"{PLACES}a_container_with_the_processes_of_the_host",
            f"{PODMAN}a_container_of_podman_with_the_processes_of_the_host",
        ),
        "'mount /proc in this chroot, sandbox or container'": (f"{PLACES}a_proc_that_is_not_there",),
        "fix": (f"{PLACES}a_proc_that_hides_processes",),
    },
    "ended_processes": {
        "f'reset the GPU if that lasts: {host.vendor.recover}'": (
            f"{GPUS}a_reset_ends_what_ended_processes_hold",
        ),
    },
    "elsewhere": {"fix": (f"{PLACES}one_state_directory_for_all_sessions",)},
    "beside": {"fix": (f"{PLACES}processes_beside_claims_are_started_with_run",)},
    "modes": {"fix": (f"{PLACES}claims_whose_gpu_was_divided_are_ended",)},
}  # fmt: skip

# What VENDORS has for each vendor. Of the others than NVIDIA there is no fake that can be reset or be slow, and no
# library that starts.
OF_VENDORS: dict[str, Following] = {
    "nvidia": {
        "install": (f"{GPUS}nvidia_ml_py_is_installed",),
        "pass_in": "passing a GPU into a container needs one, and the vendor's tools",
        "is_slow": (f"{GPUS}persistence_mode_makes_a_slow_driver_quick",),
        "no_library": (f"{GPUS}the_ready_state_of_confidential_computing",),
        "recover": (f"{GPUS}a_reset", f"{GPUS}a_driver_that_hangs"),
    },
    "amd": {},
    "intel": {},
}


def findings() -> dict[str, set[str]]:
    """Name of a function of doctor -> the fixes of its findings, as the source has them."""
    found: dict[str, set[str]] = {}
    for path in Path(doctor.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) in ("warning", "failed"):
                    found.setdefault(function.name, set()).add(ast.unparse(call.args[1]))
    return found


def without_quotes(texts: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same, whichever quotes this Python writes."""
    return {name: {text.replace("\\", "").replace('"', "'") for text in of} for name, of in texts.items()}


def test_each_finding_has_its_tests_here() -> None:
    listed = {name: {*of} for name, of in FOLLOWED_BY.items()}
    assert without_quotes(findings()) == without_quotes(listed)


def test_each_advice_of_a_vendor_has_its_tests_here() -> None:
    assert OF_VENDORS.keys() == api.VENDORS.keys()
    assert OF_VENDORS["nvidia"].keys() == {"install", "pass_in", "is_slow", "no_library", "recover"}


def test_the_tests_that_are_named_here_exist() -> None:
    for table in (FOLLOWED_BY, OF_VENDORS):
        for following in table.values():
            for tests in following.values():
                if not isinstance(tests, str):
                    assert missing_tests(tests) == []
