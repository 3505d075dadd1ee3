"""What a worker of a claim, or one rank under a launcher, does first: it checks its GPU and binds itself next to it.

``SAFE_GPU_EXPECT`` names the GPU that a worker must see which an engine started. ``safe-gpu run`` and ``safe-gpu bind``
check it before they become the command, so programs that are not Python are checked too.
"""

import os

from ..affinity.binding import BindingReport, PartReport, bind_near, bind_node
from ..affinity.planner import AffinityOptions, falls_back, parse_options
from ..affinity.resolve_gpus import BOUND, Names, ResolvedGpus, by_ordinal, named, remember, remembered, visible
from ..coordination.doors import digest
from ..coordination.holders import claim_around, living_claims
from ..drivers import opened_driver
from ..errors import GPUAffinityError, HolderLostError, SafeGpuError, WrongDeviceError, package_logger
from ..gpus.devices import HostSnapshot, vendor_of
from ..runtimes.visible_devices import read_visible, stale_indices, visible_variables
from ..schedulers.job import current
from . import owner

EXPECT = "SAFE_GPU_EXPECT"


def check_expected_gpu() -> None:
    """Check that this process sees only the GPU of ``SAFE_GPU_EXPECT``, and that it is still held for its workers.

    Without the variable it does nothing. The variable is removed after the check, so that it does not reach jobs which
    the command submits.

    Raises:
        WrongDeviceError: the environment selects another GPU, several or none, or this host does not have the GPU.
        HolderLostError: the claim that held the GPU has ended.
        NoDriverError, StateDirError: the driver or the state directory cannot be used.
    """
    uuid = os.environ.get(EXPECT)
    if not uuid:
        return
    with opened_driver() as driver:
        snapshot = driver.snapshot()
    visible_limit = read_visible(os.environ, snapshot)
    seen = tuple(gpu.uuid for gpu in snapshot.gpus) if visible_limit is None else visible_limit.uuids
    if seen != (uuid,):
        name = visible_variables(snapshot)[0]
        shown = os.environ.get(name)
        raise WrongDeviceError(
            f"this process was started for GPU {uuid} ({EXPECT}), and on {os.uname().nodename} "
            f"{f'without {name}' if shown is None else f'{name}={shown}'} it sees "
            f"{', '.join(seen) if 0 < len(seen) <= 2 else f'{len(seen)} GPUs'}: start it with the policy and the "
            f"environment of the claim, or unset {EXPECT} if it was inherited by mistake",
            expected=uuid,
            actual=", ".join(seen),
        )
    if not is_held(uuid, os.environ.get("SAFE_GPU_SCOPE")):
        host = os.uname().nodename
        raise HolderLostError(
            f"{host}: GPU {uuid}, for which this process was started ({EXPECT}), is no longer held by its claim: claim "
            f"again, or unset {EXPECT} if it was inherited by mistake",
            host=host,
        )
    del os.environ[EXPECT]


def is_held(uuid: str, token: str | None) -> bool:
    """Return whether a claim holds this GPU; with a ``token`` (SAFE_GPU_SCOPE), whether that claim does.

    Raises:
        StateDirError: the claims cannot be read.
    """
    secret = None if token is None else digest(token)
    return any(uuid in claim.gpus and secret in (None, claim.token) for claim in living_claims())


def bind(
    gpus: Names | None = None,
    *,
    ordinal: int | None = None,
    node: int | None = None,
    mode: str | AffinityOptions | None = "node",
    memory: str | None = None,
    strict: bool = True,
) -> BindingReport:
    """Bind all threads of this process to CPUs next to some GPUs, for example in a DataLoader's ``worker_init_fn``.

    It starts from the CPU mask before any earlier binding, so a second call does not narrow the first. GPUs that are
    named here are remembered in ``SAFE_GPU_BOUND``, for a later :func:`bind` or :func:`~safe_gpu.placement` here and in
    child processes. An INFO line names the GPU and the mask.

    Args:
        gpus: indices or UUIDs, as nvidia-smi shows them. None: the GPUs that this process claimed, or that the process
            from which it was forked claimed, else those next to which it was bound before, else those that
            CUDA_VISIBLE_DEVICES selects.
        ordinal: CUDA's number of one GPU in this process, instead of ``gpus``.
        node: the kernel's number of a NUMA node, instead of a GPU; needs no driver, and takes no mode but "node".
        mode: as ``affinity`` of a claim; torch's ``NumaOptions`` is accepted. None binds the memory only.
        memory: None, "preferred" or "bind"; a refused policy is only reported.
        strict: False puts errors into the report instead of raising them, as does a NumaOptions with
            ``should_fall_back_if_binding_fails``.

    Raises:
        GPUAffinityError: the CPUs cannot be planned or bound. NoDriverError, UnsatisfiableRequestError: it cannot be
            determined which GPUs are meant. With ``strict=False`` none of these is raised.
    """
    log = package_logger()
    try:
        report = bind_rank(gpus, ordinal, node, mode, memory, own=True)
    except SafeGpuError as err:
        if strict and not falls_back(mode):
            raise
        log.warning("not bound: %s", err)
        now = frozenset(os.sched_getaffinity(0))
        return BindingReport(now, PartReport(refused=(str(err),)), memory_mode=memory, as_asked=False)
    report.log(log)
    return report


def bind_rank(
    gpus: Names | None = None,
    ordinal: int | None = None,
    node: int | None = None,
    mode: str | AffinityOptions | None = "node",
    memory: str | None = None,
    *,
    own: bool = False,
) -> BindingReport:
    """Bind as :func:`bind` for one rank under a launcher, and log nothing. Of several visible GPUs the one at its local
    rank is used.

    Args:
        own: whether the GPUs that :func:`bind` finds are meant instead, where none is named.
    """
    options, is_named = parse_options(mode, memory), gpus is not None or ordinal is not None
    if node is not None:
        if is_named or (options is not None and options.mode != "node"):
            raise GPUAffinityError(f"node={node!r} names no GPU: leave out gpus=, ordinal= and modes but 'node'")
        return bind_node(node, cpus=options is not None, memory=memory)
    with opened_driver(prefer=_vendor_of(gpus)) as driver:
        snapshot = driver.snapshot()
        shift = _shift(snapshot) if gpus is None else ""
        try:
            chosen = named(gpus, ordinal, snapshot, os.environ) if is_named else (_own if own else _of_rank)(snapshot)
        except GPUAffinityError as err:
            raise GPUAffinityError(f"{err}; {shift}" if shift else str(err)) from err
        report = bind_near(chosen.gpus, driver, options=options, memory=memory)
        if is_named or not own:
            remember(chosen.gpus)
    return report._replace(target=chosen.title, notes=(*chosen.notes, *report.notes, *([shift] if shift else [])))


def _vendor_of(gpus: Names | None) -> str | None:
    """Return the vendor of the GPUs that are meant, as far as their UUIDs or the claim of this process tell."""
    if isinstance(gpus, (list, tuple)) and gpus:
        gpus = gpus[0]
    if isinstance(gpus, str) and len(gpus) >= len("GPU-0123456789abcdef"):
        return vendor_of(gpus.partition(",")[0])
    claimed = owner.latest_gpus()
    uuid = claimed[0].uuid if claimed else os.environ.get(BOUND, "").partition(",")[0]
    return vendor_of(uuid) if uuid else None


def _own(snapshot: HostSnapshot) -> ResolvedGpus:
    claimed = owner.latest_gpus()
    if claimed:
        return ResolvedGpus(claimed, "claimed by this process")
    return remembered(snapshot, os.environ) or visible(snapshot, os.environ)


def _of_rank(snapshot: HostSnapshot) -> ResolvedGpus:
    """Return the GPUs of a rank: the one at its local rank, or all that are visible if there is none."""
    shown, rank = visible(snapshot, os.environ), current(os.environ).local_rank
    if len(shown.gpus) == 1:
        return shown
    if rank is None:
        doubt = f"no local rank is set and {len(shown.gpus)} GPUs are visible, so all of them count"
        return shown._replace(doubt=f"{doubt}: name one with --ordinal, or several with --gpu")
    if rank < len(shown.gpus):
        return by_ordinal(rank, snapshot, os.environ, also=" (the local rank)")
    return shown._replace(doubt=f"local rank {rank} is beyond the {len(shown.gpus)} visible GPUs, so all of them count")


def _shift(snapshot: HostSnapshot) -> str:
    """Return what is wrong if the indices in CUDA_VISIBLE_DEVICES no longer mean the GPUs of the claim around this
    process."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not value[:1].isdigit():
        return ""

    claimed = [gpu.uuid for gpu in owner.latest_gpus()]
    if not claimed:
        around = claim_around(living_claims(), os.environ.get("SAFE_GPU_SCOPE", ""))
        claimed = [] if around is None else list(around.gpus)
    return stale_indices(value, os.environ.get("CUDA_DEVICE_ORDER"), claimed, snapshot)
