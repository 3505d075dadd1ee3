"""The way out of each error is followed by a test, or it stands here why none can follow it.

The errors are found in the source. Who adds one names its test here. Mistakes on the command line and their hints are
in ``cli/test_mistakes.py``, line by line.
"""

import ast
from collections.abc import Mapping
from pathlib import Path

from support import api
from support.findings import missing_tests

import safe_gpu
from safe_gpu import errors

PACKAGE = Path(safe_gpu.__file__).parent

IN_PYTHON = "claim/test_ways_out.py::test_"
TYPED = "cli/test_ways_out.py::test_"
TRIALS = "doctor/test_trials.py::test_"
FIXES = "doctor/test_fixes.py::test_"
PLACES = "doctor/test_fixes_of_places.py::test_"
GPUS = "doctor/test_fixes_of_gpus.py::test_"

EXAMPLES = (f"{IN_PYTHON}a_value_that_a_message_names_is_accepted",)
CHOICE = "the text names the values that are possible; which of them is meant the caller knows"
FACT = "the text says what this host, process or cluster has; asking for that is another request"
ENGINE = "the way out is a claim of its own, and needs a cluster: tests/engines make such claims"
SANDBOX = "the way out is in the settings of a sandbox"

FOLLOWED_BY: dict[str, Mapping[str, str | tuple[str, ...]]] = {
    "affinity/binding.py": {
        "present_mask": SANDBOX,
        "bind_process": FACT,
        "_tids": (f"{PLACES}a_proc_that_is_not_there",),
        "_move_threads": FACT,
        "claim_shares": FACT,
        "bind_near": CHOICE,
        "bind_node": FACT,
        "split_share": CHOICE,
    },
    "affinity/gpu_affinity.py": {"set_affinity": FACT},
    "affinity/numactl.py": {"wrap_command": CHOICE, "_prefix": FACT, "numactl_options": FACT},
    "affinity/placement.py": {"placement": FACT, "_given": FACT},
    "affinity/planner.py": {
        "_choice": EXAMPLES,
        "as_count": CHOICE,
        "plan": FACT,
        "deal": FACT,
        "__post_init__": CHOICE,
        "_nearest": FACT,
        "_check_disjoint": FACT,
        "_too_few": CHOICE,
    },
    "affinity/resolve_gpus.py": {"named": CHOICE, "by_name": FACT, "by_ordinal": FACT, "visible": FACT},
    "claim/arguments.py": {
        "_hold_seconds": EXAMPLES,
        "read_options": (f"{IN_PYTHON}of_two_that_do_not_go_together_one_is_left_out",),
        "_checked_logger": CHOICE,
        "_check_binding": (*EXAMPLES, f"{IN_PYTHON}memory_is_asked_for_by_min_memory"),
        "_checked_pause": EXAMPLES,
        "_check_placeholder": EXAMPLES,
    },
    "claim/checks.py": {
        "verify_devices": (f"{IN_PYTHON}the_claim_comes_first",),
        "_refuse_other_processes": "to claim again is to come at another moment",
    },
    "claim/claim.py": {
        "visible_limit_of": (f"{FIXES}numbers_that_mean_other_gpus_to_cuda",),
        "_frozen": (f"{IN_PYTHON}the_claim_comes_first",),
    },
    "claim/enclosing.py": {
        "check_possible_inside": (f"{IN_PYTHON}inside_a_claim", f"{TYPED}no_way_leads_out_of_the_enclosing_claim"),
        "refuse_inside_share": "the way out is to make no claim",
        "refuse_gpus_of_ancestors": (f"{IN_PYTHON}inside_a_claim",),
    },
    "claim/failure.py": {"error": "what helps against each cause is told by runtimes/causes.py, and needs that cause"},
    "claim/functions.py": {"_wait_for_turn": "to wait longer is the only way out"},
    "claim/limits.py": {"check_policy_limits": "an administrator is asked"},
    "claim/owner.py": {
        "refuse_lost": (f"{IN_PYTHON}a_claim_whose_descriptors_were_closed",),
        "already_claimed": (f"{IN_PYTHON}a_second_claim",),
        "_prepare_placeholder": "the way out is other code in a placeholder of the caller's own",
    },
    "claim/report.py": {"refusal": ("cli/test_mistakes.py::test_advice_on_a_wait_that_was_too_short",)},
    "claim/search.py": {"lasting": "it tells again what an error said before"},
    "claim/view.py": {"_no_gpu_here": (f"{GPUS}without_a_driver_a_simulated_host",)},
    "claim/worker.py": {
        "check_expected_gpu": (f"{IN_PYTHON}a_worker_that_inherited_what_another_one_is_to_see",),
        "_check_visible": (f"{IN_PYTHON}a_worker_that_inherited_what_another_one_is_to_see",),
        "_bind_to_node": CHOICE,
        "_bind_to_gpus": "it tells again what an error said before",
    },
    "cli/closing.py": {
        "named_gpus": FACT,
        "__init__": "root is asked",
        "write": "it takes thousands of reservations, which resume cancels one by one",
    },
    "cli/hosts.py": {"ssh_to": "a client of ssh is installed by the distribution"},
    "cli/setup.py": {
        "do_setup": "root is asked",
        "_checked": (f"{PLACES}a_directory_above_that_is_missing",),
        "_write_setting": "root is asked",
    },
    "coordination/directory.py": {
        "_absolute": (f"{TRIALS}a_relative_directory_is_one_finding",),
        "refusal": (
            f"{TRIALS}a_full_disk",
            f"{TRIALS}a_read_only_file_system",
            f"{TRIALS}files_of_no_bytes",
            f"{FIXES}what_stands_in_the_way_is_removed",
        ),
        "_refuse_network_types": (f"{PLACES}a_network_file_system",),
    },
    "coordination/host_lock.py": {
        "_cannot_be_locked": (f"{TRIALS}a_file_system_that_keeps_no_entries",),
        "_filelock": (f"{GPUS}filelock_is_installed",),
        "_timeout": ("doctor/test_checks.py::test_a_host_lock_that_is_never_given_back",),
    },
    "coordination/older_package.py": {"_timeout": "to wait longer is the only way out"},
    "coordination/setup.py": {"examine": (f"{FIXES}setup_takes_a_directory_back",)},
    "drivers/__init__.py": {
        "_open_nvidia": (f"{GPUS}without_a_driver_a_simulated_host",),
        "_refused": (f"{IN_PYTHON}gpus_of_another_vendor",),
        "opened_driver": "the way out is another operating system",
        "parse": (f"{IN_PYTHON}a_simulated_host_that_there_is",),
    },
    "drivers/intel.py": {"__init__": "the kernel modules of GPUs cannot be loaded without them"},
    "drivers/kfd.py": {"_devices": "the kernel modules of GPUs cannot be loaded without them"},
    "drivers/nvidia_smi.py": {
        "find_nvidia_smi": "root makes the program one that nobody else can change",
        "_failure": (f"{GPUS}without_a_driver_a_simulated_host",),
    },
    "drivers/nvml.py": {"_ask": (f"{FIXES}a_driver_that_is_loaded_is_not_to_be_installed",)},
    "drivers/nvml_calls.py": {
        "_pynvml": (f"{GPUS}nvidia_ml_py_is_installed",),
        "_load_library": "JetPack is a release of the operating system",
        "missing": (f"{GPUS}nvml_is_where_the_loader_finds_it",),
    },
    "drivers/patience.py": {"answer": (f"{GPUS}a_driver_that_hangs",)},
    "drivers/simulated/driver.py": {"occupy": FACT, "__call__": FACT},
    "drivers/simulated/presets.py": {"find_preset": (f"{IN_PYTHON}a_simulated_host_that_there_is",)},
    "drivers/simulated/tree.py": {"_parts_of_root": (f"{TRIALS}a_relative_directory_is_one_finding",)},
    "engines/claim.py": {
        "choose_nodes": CHOICE,
        "_named_nodes": CHOICE,
        "_id_of_node": FACT,
        "_wait_for": "it tells again what an error said before",
        "checked": ENGINE,
        "_check_unreleased": ENGINE,
    },
    "engines/connection.py": {"start": ENGINE, "_lost": ENGINE},
    "engines/dragon.py": {
        "claim": ENGINE,
        "_not_placeable": ENGINE,
        "make_policies": CHOICE,
        "template_env": ENGINE,
        "at": ENGINE,
        "_visible_gpu": ENGINE,
    },
    "engines/holder.py": {"read": CHOICE},
    "engines/ray.py": {"claim": (f"{IN_PYTHON}what_pip_is_to_install_is_what_the_package_says",)},
    "runtimes/calls.py": {"load": "a library of the driver is installed with the driver"},
    "runtimes/child.py": {"visible_in_child": (f"{GPUS}the_ready_state_of_confidential_computing",)},
    "runtimes/cuda_variables.py": {"render_cuda": EXAMPLES},
    "runtimes/hip.py": {"visible_if_initialized": "needs ROCm; with CUDA the claim comes first in the same way"},
    "runtimes/library.py": {
        "visible_in_child": "nobody asks a library about GPUs that are simulated",
        "visible_if_initialized": (f"{IN_PYTHON}the_claim_comes_first",),
        "_refuse_fork": (f"{IN_PYTHON}a_child_is_spawned",),
        "_refuse_if_torch_uses_it": (f"{IN_PYTHON}the_claim_comes_first",),
    },
    "runtimes/placeholders.py": {
        "prepare": EXAMPLES,
        "allocate": "what helps against each cause is told by runtimes/causes.py, and needs that cause",
        "_import": (f"{IN_PYTHON}a_framework_that_is_installed_or_left_out",),
    },
    "schedulers/gpu_count.py": {"number_for_job": (f"{IN_PYTHON}the_number_for_a_job",)},
    "selection/choice.py": {
        "check_possible": (*EXAMPLES, f"{TYPED}a_variable_that_hides_all_gpus"),
        "_check_names": EXAMPLES,
    },
    "selection/request.py": {"parse_request": (f"{IN_PYTHON}of_two_that_do_not_go_together_one_is_left_out",)},
    "settings/config.py": {
        "parse": (f"{FIXES}a_policy_is_written_anew",),
        "read": "sections are moved into another file, by root",
        "_read_text": (f"{FIXES}a_policy_is_written_anew",),
        "values_of_user": (f"{TYPED}a_file_of_settings_that_others_may_write",),
    },
    "settings/values.py": {
        "parse_duration": EXAMPLES,
        "parse_seconds": EXAMPLES,
        "refused": EXAMPLES,
        "parse_size": EXAMPLES,
    },
    "settings/variables.py": {"check": (f"{IN_PYTHON}words_of_variables",)},
    "status/gather.py": {"gather": "it tells again what errors said before"},
    "status/report.py": {"drawn": "it tells again what an error said before"},
    "topology/files.py": {"__init__": CHOICE},
    "topology/host.py": {"_shape": FACT, "read_topology": "it takes a /sys with CPUs", "gpu": FACT},
}  # fmt: skip

KINDS = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, api.SafeGpuError)}


def raisers() -> dict[str, set[str]]:
    """Module -> the functions in it that make an error of the package."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        module = str(path.relative_to(PACKAGE))
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and module != "errors.py":
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in KINDS:
                        found.setdefault(module, set()).add(function.name)
    return found


def test_each_error_has_its_tests_here() -> None:
    assert raisers() == {module: {*of} for module, of in FOLLOWED_BY.items()}


def test_the_tests_that_are_named_here_exist() -> None:
    for of in FOLLOWED_BY.values():
        for tests in of.values():
            if not isinstance(tests, str):
                assert missing_tests(tests) == []
