"""What a worker of a claim, or one rank under a launcher, does first: it checks its GPU and binds itself next to it.

``SAFE_GPU_EXPECT`` names the GPU that a worker must see which an engine started. ``safe-gpu run`` and ``safe-gpu bind``
check it before they become the command, so programs that are not Python are checked too.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

from ..affinity.binding import BindingReport, PartReport, bind_near, bind_node, known_mask
from ..affinity.planner import AffinityOptions, falls_back, parse_options
from ..affinity.resolve_gpus import BOUND, Names, ResolvedGpus, by_ordinal, named, remember, remembered, visible
from ..coordination.doors import digest
from ..coordination.holders import enclosing_claim, living_claims
from ..drivers import opened_driver
from ..errors import GPUAffinityError, HolderLostError, SafeGpuError, WrongDeviceError, package_logger
from ..gpus.devices import Gpu, HostSnapshot, vendor_of
from ..runtimes.visible_devices import read_visible, stale_indices, visible_variables
from ..schedulers.job import current
from . import owner
from .caller import called_by_users

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
    _check_visible(uuid, snapshot)
    if not is_held(uuid, os.environ.get("SAFE_GPU_SCOPE")):
        host = os.uname().nodename
        raise HolderLostError(
            f"{host}: GPU {uuid}, for which this process was started ({EXPECT}), is no longer held by its claim: claim "
            f"again, or unset {EXPECT} if it was inherited by mistake",
            host=host,
        )
    del os.environ[EXPECT]


def _check_visible(uuid: str, snapshot: HostSnapshot) -> None:
    """Check that this process sees this GPU only.

    Raises:
        WrongDeviceError: it does not.
    """
    visible_limit = read_visible(os.environ, snapshot)
    if visible_limit is None:
        seen = [gpu.uuid for gpu in snapshot.gpus]
    else:
        seen = list(visible_limit.uuids)
    if seen == [uuid]:
        return
    name = visible_variables(snapshot)[0]
    value = os.environ.get(name)
    setting = f"{name}={value}"
    if value is None:
        setting = f"without {name}"
    what = ", ".join(seen)
    if not seen or len(seen) > 2:
        what = f"{len(seen)} GPUs"
    raise WrongDeviceError(
        f"this process was started for GPU {uuid} ({EXPECT}), and on {os.uname().nodename} {setting} it sees {what}: "
        f"start it with the policy and the environment of the claim, or unset {EXPECT} if it was inherited by mistake",
        expected=uuid,
        actual=", ".join(seen),
    )


def is_held(uuid: str, token: str | None) -> bool:
    """Return whether a claim holds this GPU; with a ``token`` (SAFE_GPU_SCOPE), whether that claim does.

    Raises:
        StateDirError: the claims cannot be read.
    """
    holding = [claim for claim in living_claims() if uuid in claim.gpus]
    if token is None:
        return bool(holding)
    secret = digest(token)
    return any(claim.token == secret for claim in holding)


@called_by_users()
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
            determined which GPUs are meant. HolderLostError: this process has closed the descriptors of its claim. With
            ``strict=False`` none of these is raised.
    """
    log = package_logger()
    try:
        report = _bind_own(gpus, ordinal, node, mode, memory)
    except SafeGpuError as err:
        if strict and not falls_back(mode):
            raise
        log.warning("not bound: %s", err)
        return BindingReport(
            cpus=known_mask(), threads=PartReport(refused=(str(err),)), memory_mode=memory, as_asked=False
        )
    report.log(log)
    return report


def _bind_own(
    gpus: Names | None, ordinal: int | None, node: int | None, mode: str | AffinityOptions | None, memory: str | None
) -> BindingReport:
    """Bind as :func:`bind` with ``strict``, and log nothing."""
    options = parse_options(mode, memory)
    is_named = gpus is not None or ordinal is not None
    if node is not None:
        return _bind_to_node(node, is_named, options, memory)
    bound = _bind_to_gpus(gpus, ordinal, options, memory, unnamed=_own)
    if is_named:
        remember(bound.gpus)
    return bound.report


def bind_rank(
    gpus: Names | None = None,
    ordinal: int | None = None,
    node: int | None = None,
    mode: str | AffinityOptions | None = "node",
    memory: str | None = None,
) -> BindingReport:
    """Bind as :func:`bind` for one rank under a launcher, and log nothing. Of several visible GPUs the one at its local
    rank is used."""
    options = parse_options(mode, memory)
    is_named = gpus is not None or ordinal is not None
    if node is not None:
        return _bind_to_node(node, is_named, options, memory)
    bound = _bind_to_gpus(gpus, ordinal, options, memory, unnamed=_of_rank)
    remember(bound.gpus)
    return bound.report


def _bind_to_node(node: int, is_named: bool, options: AffinityOptions | None, memory: str | None) -> BindingReport:
    if is_named or (options is not None and options.mode != "node"):
        raise GPUAffinityError(f"node={node!r} names no GPU: leave out gpus=, ordinal= and modes but 'node'")
    return bind_node(node, cpus=options is not None, memory=memory)


class _Bound(NamedTuple):
    """A binding, and the GPUs next to which it is."""

    report: BindingReport
    gpus: tuple[Gpu, ...]


def _bind_to_gpus(
    gpus: Names | None,
    ordinal: int | None,
    options: AffinityOptions | None,
    memory: str | None,
    *,
    unnamed: Callable[[HostSnapshot], ResolvedGpus],
) -> _Bound:
    """Bind this process next to the GPUs that are named, or else those that ``unnamed`` finds."""
    with opened_driver(prefer=_vendor_of(gpus)) as driver:
        snapshot = driver.snapshot()
        shift = ""
        if gpus is None:
            shift = _shift(snapshot)
        try:
            if gpus is not None or ordinal is not None:
                chosen = named(gpus, ordinal, snapshot, os.environ)
            else:
                chosen = unnamed(snapshot)
        except GPUAffinityError as err:
            if not shift:
                raise
            raise GPUAffinityError(f"{err}; {shift}") from err
        report = bind_near(chosen.gpus, driver, options=options, memory=memory)
    notes = [*chosen.notes, *report.notes]
    if shift:
        notes.append(shift)
    return _Bound(report._replace(target=chosen.title, notes=tuple(notes)), chosen.gpus)


def _vendor_of(gpus: Names | None) -> str | None:
    """Return the vendor of the GPUs that are meant, as far as their UUIDs or the claim of this process tell."""
    if isinstance(gpus, (list, tuple)) and gpus:
        gpus = gpus[0]
    if isinstance(gpus, str) and len(gpus) >= len("GPU-0123456789abcdef"):
        return vendor_of(gpus.partition(",")[0])
    claimed = owner.latest_gpus()
    if claimed:
        return vendor_of(claimed[0].uuid)
    bound = os.environ.get(BOUND, "").partition(",")[0]
    if bound:
        return vendor_of(bound)
    return None


def _own(snapshot: HostSnapshot) -> ResolvedGpus:
    holder = owner.current_owner()
    if holder is not None:
        owner.refuse_lost(holder)
    claimed = owner.latest_gpus()
    if claimed:
        return ResolvedGpus(claimed, "claimed by this process")
    return remembered(snapshot, os.environ) or visible(snapshot, os.environ)


def _of_rank(snapshot: HostSnapshot) -> ResolvedGpus:
    """Return the GPUs of a rank: the one at its local rank, or all that are visible if there is none."""
    shown = visible(snapshot, os.environ)
    rank = current(os.environ).local_rank
    if len(shown.gpus) == 1:
        return shown
    if rank is None:
        doubt = f"no local rank is set and {len(shown.gpus)} GPUs are visible, so all of them count"
        return shown._replace(doubt=f"{doubt}: name one with --ordinal, or several with --gpu")
    if rank < len(shown.gpus):
        return by_ordinal(rank, snapshot, os.environ, also=" (the local rank)")
    return shown._replace(doubt=f"local rank {rank} is beyond the {len(shown.gpus)} visible GPUs, so all of them count")


def _shift(snapshot: HostSnapshot) -> str:
    """Return what is wrong if the indices in CUDA_VISIBLE_DEVICES no longer mean the GPUs that this process claimed, or
    those of the enclosing claim."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not value[:1].isdigit():
        return ""
    claimed = [gpu.uuid for gpu in owner.latest_gpus()]
    if not claimed:
        enclosing = enclosing_claim(living_claims(), os.environ.get("SAFE_GPU_SCOPE", ""))
        if enclosing is not None:
            claimed = list(enclosing.gpus)
    return stale_indices(value, os.environ.get("CUDA_DEVICE_ORDER"), claimed, snapshot)
