"""What tests take from inside the package, each name once, so that a move within it is one line here.

The helpers beside this module, and programs that tests start, import what they need themselves: they load little.
"""

from safe_gpu import drivers
from safe_gpu.affinity import binding, memory_policy, planner
from safe_gpu.affinity.binding import (
    PartReport,
    bind_claim,
    bind_near,
    bind_process,
    claim_shares,
    memory_nodes,
    nodes_of_cpus,
    original_mask,
    restore_state,
    save_state,
    split_share,
    with_memory,
)
from safe_gpu.affinity.gpu_affinity import Mode, Multithreading, Scope, set_affinity
from safe_gpu.affinity.memory_policy import policy_for, set_policy
from safe_gpu.affinity.numactl import numactl_options, wrap_command
from safe_gpu.affinity.placement import PlacementReport, ProcessPlacement, ThreadPlacement, parse_numa_maps, placement
from safe_gpu.affinity.plan_text import affinity_json, affinity_table, node_table
from safe_gpu.affinity.planner import (
    DIVIDING_MODES,
    MODES,
    MULTITHREADING,
    PER_GPU_MODES,
    SCOPES,
    AffinityOptions,
    is_remote,
    parse_options,
    plan,
)
from safe_gpu.affinity.resolve_gpus import BOUND, by_name, by_ordinal, remembered, visible
from safe_gpu.claim import checks, claim, owner, search, view
from safe_gpu.claim.arguments import DEFAULT, HoldTime, parse_hold_for, parse_timeout, read_options
from safe_gpu.claim.arguments import UNKNOWN as UNKNOWN_HOLD
from safe_gpu.claim.attempt import OUTDATED, TAKEN, WITHDRAWN, Seen
from safe_gpu.claim.claim import Claim, share_variables
from safe_gpu.claim.functions import wait_for_gpus
from safe_gpu.claim.limits import LimitReached, quota_of
from safe_gpu.claim.others import pids_of_enclosing
from safe_gpu.claim.owner import owner_type
from safe_gpu.claim.polls import driver_pids
from safe_gpu.claim.report import ClaimAhead, Forecast, WaitStatus, holders_line, refusal_message, waiting_message
from safe_gpu.claim.search import (
    AGAIN,
    POLL,
    REFUSE,
    SLEEP,
    WATCH,
    WaitState,
    decide,
    pause_between_polls,
    pause_of_watch,
)
from safe_gpu.claim.view import HostView
from safe_gpu.claim.worker import check_expected_gpu
from safe_gpu.cli import arguments, commands, hosts
from safe_gpu.cli import setup as cli_setup
from safe_gpu.cli.advice import warning_about
from safe_gpu.cli.arguments import add_request, add_vendor, claim_arguments
from safe_gpu.cli.commands import COMMANDS, RUNNERS, main, parser_of
from safe_gpu.cli.completion import SHELLS
from safe_gpu.cli.completion import candidates as completions
from safe_gpu.cli.hosts import Answer, SshResult, document, for_any_shell, in_display_order, read_answer, render_hosts
from safe_gpu.cli.job import become, find_command
from safe_gpu.cli.output import CommandError
from safe_gpu.cli.setup import rule_text
from safe_gpu.cli.wait_line import WaitLine, text_for_terminal
from safe_gpu.cli.watching import redrawn
from safe_gpu.coordination import (
    closed,
    directory,
    doors,
    entries,
    entry,
    history,
    holders,
    host_lock,
    listing,
    older_package,
    queue,
    setup,
)
from safe_gpu.coordination.closed import all_windows, closed_now, drained_gpus, look_up_admitted_users
from safe_gpu.coordination.directory import (
    HOST_LOCK,
    OPEN_FILE,
    PARTS,
    Directory,
    SharedDirectory,
    make_directory,
    remover_of,
    state_dir_path,
)
from safe_gpu.coordination.doors import MOST_PARTS, Doors, digest
from safe_gpu.coordination.entries import Entries, living_entries
from safe_gpu.coordination.entry import Entry, facts_of_this_process, is_alive, make_entry, sleep_until_dead
from safe_gpu.coordination.faults import clear_fault, read_faults, write_fault
from safe_gpu.coordination.history import LARGEST, NAME, end_line, file_names, month_of
from safe_gpu.coordination.holders import Claims, holder_as_written, keepers_of, living_claims
from safe_gpu.coordination.host_lock import Host
from safe_gpu.coordination.looks import ClaimLooks, Looks, Sight, Use, line_of, next_telling
from safe_gpu.coordination.older_package import take_older_package_lock
from safe_gpu.coordination.queue import TicketRequest, Waiter, is_stopped, tickets_that_count, waiting_tickets
from safe_gpu.coordination.silicon import Silicon, keys_of, silicon_of
from safe_gpu.coordination.turns import by_turn, turn_of, turn_of_newcomer
from safe_gpu.doctor import Check, CheckedHost, run_checks
from safe_gpu.doctor.state import directory as directory_check
from safe_gpu.drivers import (
    meant_vendor,
    nvidia_smi,
    nvml,
    nvml_calls,
    open_driver,
    open_drivers,
    opened_driver,
    patience,
)
from safe_gpu.drivers.base import Driver, is_wsl, own_namespace_pids
from safe_gpu.drivers.intel import PRIVATE, IntelDriver, parse_client
from safe_gpu.drivers.kfd import KfdDriver
from safe_gpu.drivers.nvidia_smi import NvidiaSmiDriver
from safe_gpu.drivers.nvml import NvmlDriver
from safe_gpu.drivers.nvml_calls import LIBRARY
from safe_gpu.drivers.simulated import PRESETS, Preset, SimulatedContext, SimulatedDriver, find_preset
from safe_gpu.engines import dragon
from safe_gpu.engines.claim import ClusterClaim, HostClaim, NodeFacts, choose_nodes, claim_on_all, claim_through
from safe_gpu.engines.connection import RemoteHolder, serve, start_all
from safe_gpu.engines.dragon import DragonClaim, WorkerCheck, _split
from safe_gpu.engines.dragon import claim as dragon_claim
from safe_gpu.engines.holder import ClaimArguments, ClusterGpu, HolderProcess, HostReport, enter_worker
from safe_gpu.errors import (
    ClaimTimeout,
    CudaInitializedError,
    GPUAffinityError,
    GpuContendedError,
    HolderLostError,
    LockTimeout,
    MissingPackageError,
    NoDriverError,
    NotEnoughGpusError,
    PlaceholderError,
    PolicyError,
    SafeGpuError,
    StateDirError,
    UnsatisfiableRequestError,
)
from safe_gpu.gpus.devices import (
    LAST_CHOICE,
    MIG_IS_ON,
    ComputeMode,
    Gpu,
    GpuFault,
    GpuProcess,
    GpuVerdict,
    HeldAs,
    Holder,
    HostSnapshot,
    ProcessKind,
    VisibleLimit,
    are_mixed,
    bus_order,
    recent_faults,
    vendor_of,
    vendor_of_name,
)
from safe_gpu.gpus.vendors import FIRST, VENDORS
from safe_gpu.gpus.windows import UNSAID, Window, drain_line, first_open, parse_closed, spans_of, why_reserved
from safe_gpu.host import awaiting, locks, procfs, programs, signals
from safe_gpu.host.awaiting import Awaited, Watchdog
from safe_gpu.host.foreign_files import open_to_read, read_bytes, read_start
from safe_gpu.host.locks import Held, ReadLock, keep_across_exec, lock, unlock
from safe_gpu.host.procfs import FileSystem, has_ended, user_name
from safe_gpu.host.programs import command_for_record, is_root, own_command, program_names
from safe_gpu.host.signals import DeferredSignals, unwind_on_signals
from safe_gpu.runtimes import causes, cuda, loading, placeholders, visible_devices
from safe_gpu.runtimes.calls import CudaCallError
from safe_gpu.runtimes.cuda import CUDA, CudaPlaceholder, same_device
from safe_gpu.runtimes.cuda_variables import parse_cuda, render_cuda
from safe_gpu.runtimes.hip import HIP
from safe_gpu.runtimes.level_zero_variables import read_level_zero
from safe_gpu.runtimes.library import Runtime
from safe_gpu.runtimes.placeholders import NoPlaceholder
from safe_gpu.runtimes.rocm_variables import read_rocm
from safe_gpu.runtimes.visible_devices import hide_all, render_visible, stale_indices
from safe_gpu.schedulers import gpu_count
from safe_gpu.schedulers.gpu_count import (
    QstatError,
    ResourceRequest,
    Slots,
    ask_qstat,
    declared_gpus,
    hard_request,
    here,
    number_for_job,
    slots,
    with_end,
)
from safe_gpu.schedulers.job import SCHEDULERS, JobContext, Scheduler, current, lines_of_this_host, resource_names
from safe_gpu.selection import choice
from safe_gpu.selection.backfill import (
    BackfillRequest,
    When,
    free_at,
    free_time,
    latest_harmless_ends,
    open_gpus,
    starts,
    when_free,
)
from safe_gpu.selection.choice import can_be_met_by_releases, candidates, check_possible, choose, choose_shares
from safe_gpu.selection.request import (
    CONDITIONS,
    Condition,
    Conditions,
    MinMemory,
    Near,
    Selection,
    Share,
    parse_request,
)
from safe_gpu.selection.sharing import room, share_capacity, share_fraction
from safe_gpu.selection.verdicts import (
    DEFAULT_RULES,
    HIDDEN,
    NOT_YET,
    SHOWN,
    UNKNOWN,
    UNWATCHABLE,
    Known,
    Rules,
    computes,
    fence_hint,
    how_misread,
    judge,
    presence,
    why_wedged,
)
from safe_gpu.settings import config, variables
from safe_gpu.settings.config import KEYS, Limits, host_names, host_values, limits_of_user, parse, read, resolve
from safe_gpu.settings.values import (
    model_pattern,
    names_device,
    parse_duration,
    parse_moment,
    parse_size,
    unknown_names,
)
from safe_gpu.settings.variables import VARIABLES, known_hosts, setting_of_hosts
from safe_gpu.status import history as status_history
from safe_gpu.status import report as status_report
from safe_gpu.status.document import figures_of
from safe_gpu.status.facts import GpuStatus, HostStatus, ProcessStatus, WaiterStatus, of_user, of_vendor
from safe_gpu.status.gather import gather, status_of, with_idle_times
from safe_gpu.status.history import ClaimEnd, PastClaim, claims_between, gpu_hours_by, hours_held, merged
from safe_gpu.status.metrics import render_metrics
from safe_gpu.status.page import render_page
from safe_gpu.status.render import render
from safe_gpu.status.report import ReportRow, free_hours, percentile_95, report, report_by_day, table_of_report
from safe_gpu.status.starts import at_limits, expected_starts
from safe_gpu.status.table import COLUMNS_OF_GPU, COLUMNS_OF_USER, GpuColumn
from safe_gpu.status.usage import UseFacts
from safe_gpu.topology import kfd_topology
from safe_gpu.topology.cpulist import LIMIT, format_cpulist, parse_cpulist, parse_cpumask
from safe_gpu.topology.files import Files
from safe_gpu.topology.host import GpuLocality, HostTopology, SysfsHost, read_topology
from safe_gpu.topology.kfd_topology import devices
from safe_gpu.wording import elsewhere as words_elsewhere
from safe_gpu.wording.style import as_option, on_command_line
from safe_gpu.wording.text import (
    Column,
    clock,
    cut,
    display_width,
    format_age,
    format_bytes,
    gpu_ranges,
    short_age,
    wrapped,
)
