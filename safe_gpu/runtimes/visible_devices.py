"""CUDA_VISIBLE_DEVICES, ROCR_ and HIP_VISIBLE_DEVICES, ZE_AFFINITY_MASK: their meanings and spellings. Pure.

The grammar is the CUDA driver's (CUDA Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device
Enumeration"). Details follow PyTorch's parser (``_parse_visible_devices`` in ``torch/cuda/__init__.py``, pull requests
84879 and 92315), which was compared with driver 525.60.13:

* The value is a comma-separated list of indices or of UUIDs. The first entry decides which; an entry of the other kind
  is invalid.
* Numbers are read as by C's strtol: leading blanks and a sign are accepted, and characters after the digits are
  ignored. So ``0 1``, ``0;1`` and ``0-1`` are GPU 0, and ``cuda:0`` and ``GPU 0`` are none.
* A UUID may be shortened to a prefix that matches one device (``GPU-ab``, ``MIG-12``). The older form
  ``MIG-GPU-<uuid>/<gpu instance>/<compute instance>`` is accepted too.
* The list ends at the first invalid entry. An empty list, or one that names a device twice, selects no GPU.

Two libraries read them, one on top of the other (``amd_filter_device.cpp`` of ROCR, ``rocdevice.cpp`` of HIP):

* ROCR reads ROCR_VISIBLE_DEVICES: a list of indices, in the order of the kernel's GPU nodes, and of UUIDs
  (``GPU-<16 hex digits>``, in any case; a prefix that matches one GPU will do). Numbers are read as by C's strtol with
  base 0, and nothing may follow them. The list ends at the first entry that names no GPU, or names one again. A list
  that is set and empty selects no GPU.
* HIP reads HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES if that is unset or empty. Its indices count what ROCR has
  left. They are plain decimal numbers without blanks or leading zeros. Newer versions take UUIDs too. The list ends
  at the first entry that names no GPU. A second mention of a GPU has no effect. An empty value is as good as none.

OpenCL programs read GPU_DEVICE_ORDINAL instead of the latter two. HIP does not.

Level Zero reads ZE_AFFINITY_MASK (Core Programming Guide of its specification; ``parseAffinityMask`` of Intel's
compute runtime): a list of ordinals, whose order means nothing. An empty list, or "default", hides nothing, and entries
that name no device are ignored. What an ordinal names depends on ZE_FLAT_DEVICE_HIERARCHY: a card under COMPOSITE,
where ``1.0`` is its first tile, and a tile under FLAT and COMBINED, counted through all cards. The default has changed
between versions and differs between GPUs. Devices are counted in the order of their bus ids only under
ZE_ENABLE_PCI_ID_DEVICE_ORDER=1. A claim takes whole cards, so a card of which the mask shows a part is outside.

Two programs need exceptions:

* Slurm writes one list of indices into ROCR_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL, unless
  gres.conf has ``Flags=amd_gpu_env`` or AutoDetect=rsmi (gres.conf(5)). HIP would count the list twice, so that the
  second of two jobs sees no GPU. For a claim, which writes all of them anew, the list counts once.
* Ray 2.45 and later cannot be imported where ROCR_VISIBLE_DEVICES is set; 2.46 to some later ones only where
  HIP_VISIBLE_DEVICES is not. Some refuse a CUDA_VISIBLE_DEVICES that differs from HIP_VISIBLE_DEVICES
  (``amd_gpu.py`` of Ray). So in processes that Ray starts only HIP_VISIBLE_DEVICES is written.

CUDA does not count a GPU that is lost, so the GPUs behind it get lower numbers. A program that starts CUDA after that
opens other GPUs than those that were claimed for it. UUIDs keep their meaning.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import HIERARCHY, MASK, PCI_ORDER, Gpu, HostSnapshot, VisibleLimit, are_mixed
from ..gpus.vendors import VENDORS

ROCR = "ROCR_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"

OPENCL = "GPU_DEVICE_ORDINAL"

CONTAINER = "NVIDIA_VISIBLE_DEVICES"

# Ray sets it for its workers, and their child processes inherit it.
_RAY = "RAY_RAYLET_PID"

SELECTOR = "ONEAPI_DEVICE_SELECTOR"

_MOST_TILES = 16

_BLANKS = " \t\n\v\f\r"

# Compiled on first use by re's own cache, because most claims inherit no CUDA_VISIBLE_DEVICES.
_NUMBER = r"([+-]?)0*([0-9]{1,9})"  # no host has more GPUs


def parse_cuda(value: str | None, snapshot: HostSnapshot, *, device_order: str | None = None) -> VisibleLimit | None:
    """Read CUDA_VISIBLE_DEVICES as CUDA would on this host.

    Args:
        value: the text of the variable; None if it is not set.
        snapshot: the host's devices.
        device_order: the text of CUDA_DEVICE_ORDER; any value but ``PCI_BUS_ID`` is CUDA's default, fastest first.

    Returns:
        The visible limit, or None if the variable is not set (every GPU is visible).

    Indices follow the PCI bus order, as in nvidia-smi, if ``device_order`` is ``PCI_BUS_ID`` or all GPUs are of one
    model. They are ambiguous in three cases:

    * The GPUs are of different models, the order is CUDA's own, and not all GPUs are named.
    * MIG is on. Depending on the driver version, a GPU with MIG counts as its first instance or hides the other GPUs.
    * An index is at or beyond that of a lost GPU, which CUDA does not count.

    The UUID of a GPU with MIG on selects its first instance.
    """
    if value is None:
        return None
    entries = [entry.lstrip(_BLANKS) for entry in value.split(",")]
    by_number = re.match(_NUMBER, entries[0]) is not None and snapshot.by_uuid(entries[0]) is None
    if by_number:
        chosen, doubt = _chosen_by_number(entries, snapshot, device_order)
    else:
        chosen, doubt = _chosen_by_uuid(entries, snapshot)
    return VisibleLimit(
        value, tuple(gpu.uuid for gpu in chosen), ambiguous=bool(doubt), uses_indices=by_number, doubt=doubt
    )


def _chosen_by_number(
    entries: Sequence[str], snapshot: HostSnapshot, device_order: str | None
) -> tuple[list[Gpu], str]:
    """Return the devices that a list of numbers names, and why they are ambiguous, or ""."""
    shown = [_as_shown(gpu, snapshot) for gpu in snapshot.physical]
    countable = [gpu for gpu in shown if gpu is not None]  # in PCI bus order
    chosen: list[Gpu] = []
    highest = -1
    for entry in entries:
        number = re.match(_NUMBER, entry)
        if number is None:
            break
        position = int(number[1] + number[2])
        highest = max(highest, position)
        if not 0 <= position < len(countable):
            break
        if countable[position] in chosen:
            chosen = []
            break
        chosen.append(countable[position])
    return chosen, _doubt_about_numbers(highest, chosen, snapshot, device_order)


def _chosen_by_uuid(entries: Sequence[str], snapshot: HostSnapshot) -> tuple[list[Gpu], str]:
    """Return the devices that a list of UUIDs names, and why they are ambiguous, or ""."""
    chosen: list[Gpu] = []
    doubt = ""
    for entry in entries:
        found, doubt_about_entry = _by_uuid(entry, snapshot)
        doubt = doubt or doubt_about_entry
        if found is None:
            break
        if found in chosen:
            return [], doubt
        chosen.append(found)
    return chosen, doubt


def _as_shown(gpu: Gpu, snapshot: HostSnapshot) -> Gpu | None:
    """Return what CUDA shows for a device: the first instance of a GPU with MIG on, nothing of a lost one."""
    if gpu.lost:
        return None
    if not gpu.mig_enabled:
        return gpu
    for instance in snapshot.gpus:
        if instance.mig_parent == gpu.uuid:
            if instance.lost:
                return None
            return instance
    return None


def _by_uuid(entry: str, snapshot: HostSnapshot) -> tuple[Gpu | None, str]:
    """Return the one device whose UUID starts with ``entry`` (None if there is none), and why it is ambiguous, or
    ""."""
    matches = [gpu for gpu in snapshot.gpus if gpu.uuid == entry]
    if not matches:
        if not entry.startswith(("GPU-", "MIG-")):
            return None, ""
        matches = [gpu for gpu in snapshot.gpus if gpu.uuid.startswith(entry)]
    if len(matches) == 1:
        return _as_shown(matches[0], snapshot), ""
    numbered = re.fullmatch(r"MIG-(GPU-[^/]+)/[0-9]+/[0-9]+", entry)
    if numbered is None:
        return None, ""
    instances = [gpu for gpu in snapshot.gpus if gpu.mig_parent == numbered.group(1)]
    if not instances:
        return None, ""
    if len(instances) > 1:
        return instances[0], f"{entry} names a MIG instance by numbers that this driver no longer shows"
    return instances[0], ""


def _doubt_about_numbers(highest: int, chosen: Sequence[Gpu], snapshot: HostSnapshot, device_order: str | None) -> str:
    """Return why CUDA may read indices up to ``highest`` as other GPUs than ``chosen``; "" if it cannot."""
    if highest < 0:
        return ""  # "-1" selects no GPU on any host
    if any(gpu.mig_enabled for gpu in snapshot.gpus):
        return "MIG is on, and CUDA's numbers of the GPUs then depend on the driver version"
    usable = [gpu for gpu in snapshot.physical if not gpu.lost]
    if len(chosen) == len(usable):
        return ""  # all GPUs, so their order does not matter
    lost = [gpu.index for gpu in snapshot.physical if gpu.lost]
    if lost and highest >= lost[0]:
        return f"GPU {lost[0]} is lost, and from that index on CUDA's numbers differ from those of nvidia-smi"
    if chosen and device_order != "PCI_BUS_ID" and are_mixed(usable):
        return (
            "the GPUs of this host are of different models, and without CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA numbers "
            "the fastest first"
        )
    return ""


def render_cuda(gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot) -> dict[str, str]:
    """Return the environment variables that make exactly these devices visible to CUDA, in this order.

    Args:
        gpus: the devices, in the order in which CUDA is to number them from 0.
        visible_as: ``"index"`` or ``"uuid"``. Indices also set CUDA_DEVICE_ORDER, because they depend on it.
        snapshot: the host's devices. If CUDA's numbers differ from nvidia-smi's (MIG on, a GPU lost), UUIDs are written
            even for ``"index"``. Where CUDA does not take the UUID of one of the devices, its numbers are written.

    Raises:
        UnsatisfiableRequestError: ``visible_as`` is neither.
    """
    if visible_as not in ("index", "uuid"):
        problem = f'visible_as={visible_as!r} is unknown: use "index" or "uuid"'
        raise UnsatisfiableRequestError(problem, value=visible_as)
    if (visible_as == "uuid" or snapshot.needs_uuids) and all(gpu.named_by_uuid for gpu in gpus):
        return {CUDA: ",".join(gpu.uuid for gpu in gpus)}
    lost = [gpu.index for gpu in snapshot.physical if gpu.lost]
    numbers = []
    for gpu in gpus:
        lost_before = sum(index < gpu.index for index in lost)
        numbers.append(str(gpu.index - lost_before))
    return {CUDA: ",".join(numbers), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


_STRTOL = r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)"

_SHORTEST_PREFIX = len("GPU-0")
_LONGEST = len("GPU-0123456789abcdef")


def read_rocm(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs that these variables leave to a program that uses HIP, in its order; None if none of them is
    set."""
    of_hip = _variable_of_hip(environ)
    left = list(snapshot.physical)
    if ROCR in environ:
        name = ROCR
        value = environ[ROCR]
        by_index = "GPU-" not in value.upper()
        left = _by_rocr(value, left)
        if of_hip is not None:
            value += f" {of_hip}={environ[of_hip]}"
    elif of_hip is not None:
        name = of_hip
        value = environ[of_hip]
        by_index = "GPU-" not in value
    else:
        return None
    if of_hip is not None:
        left = _by_hip(environ[of_hip], left)
    return VisibleLimit(value, tuple(gpu.uuid for gpu in left), uses_indices=by_index, name=name, library="HIP")


def _variable_of_hip(environ: Mapping[str, str]) -> str | None:
    """Return the variable that HIP reads; None if neither is set, or both are empty."""
    for name in (HIP, CUDA):
        if environ.get(name):
            return name
    return None


def _by_rocr(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.removesuffix(",").split(",")[: len(gpus)]:  # as C++'s getline
        found = _by_entry_of_rocr(entry.upper().strip(_BLANKS), gpus)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def _by_entry_of_rocr(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("G"):
        if not _SHORTEST_PREFIX <= len(entry) <= _LONGEST:
            return None
        matches = [gpu for gpu in gpus if gpu.uuid.upper().startswith(entry)]
        if len(matches) != 1:
            return None
        return matches[0]
    number = re.fullmatch(_STRTOL, entry)
    if number is None:
        return None
    sign, digits = number.groups()
    index = _as_strtol(digits.lower())
    is_negative = sign == "-" and index > 0
    if is_negative or index >= len(gpus):
        return None
    return gpus[index]


def _as_strtol(digits: str) -> int:
    """Return a number as C's strtol reads it with base 0."""
    if digits.startswith("0x"):
        return int(digits, 16)
    if digits.startswith("0"):
        return int(digits, 8)
    return int(digits)


def _by_hip(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.split(","):
        found = _by_entry_of_hip(entry, gpus)
        if found is None:
            break
        if found not in chosen:
            chosen.append(found)
    return chosen


def _by_entry_of_hip(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if "GPU-" in entry:
        for gpu in gpus:
            if entry in gpu.uuid:
                return gpu
        return None
    if not re.fullmatch(r"0|[1-9][0-9]{0,8}", entry) or int(entry) >= len(gpus):
        return None
    return gpus[int(entry)]


def render_rocm(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make exactly these GPUs visible, in this order, to a process with this environment.

    ROCR gets UUIDs whatever ``visible_as`` says, and the index of a GPU that has no UUID. HIP then sees nothing else,
    and its own variables count from 0: an inherited one would count GPUs that are no longer there. OpenCL's variable
    is written if it is set.

    Under Ray an inherited ROCR_VISIBLE_DEVICES stays as it is, and HIP's variable counts what it leaves.
    """
    written = {}
    if _RAY in environ:
        left = list(snapshot.physical)
        if ROCR in environ:
            left = _by_rocr(environ[ROCR], left)
        places = {gpu.uuid: place for place, gpu in enumerate(left)}
        numbers = ",".join(str(places[gpu.uuid]) for gpu in gpus)
        written[HIP] = numbers
        if visible_as == "uuid":
            written[HIP] = _uuids_or_numbers(gpus, places)
        if CUDA in environ:
            written[CUDA] = written[HIP]
    else:
        numbers = _from_zero(len(gpus))
        written[ROCR] = _uuids_or_numbers(gpus, {gpu.uuid: gpu.index for gpu in gpus})
        written[HIP] = numbers
        written[CUDA] = numbers
    if OPENCL in environ:
        written[OPENCL] = numbers
    return written


def _uuids_or_numbers(gpus: Iterable[Gpu], numbers: Mapping[str, int]) -> str:
    """Return a list of UUIDs, with the number of each GPU that has none.

    Args:
        numbers: by UUID, or by what else names a GPU.
    """
    names = []
    for gpu in gpus:
        if gpu.uuid.startswith("GPU-"):
            names.append(gpu.uuid)
        else:
            names.append(str(numbers[gpu.uuid]))
    return ",".join(names)


def _from_zero(count: int) -> str:
    """Return the list ``0,1,2`` for a count of 3."""
    return ",".join(str(number) for number in range(count))


def _ordinals(snapshot: HostSnapshot, *, cards: bool) -> dict[str, range]:
    """Return UUID -> the numbers of the card. Cards that are not listed, such as integrated GPUs, have one tile."""
    tiles = {gpu.index: gpu.tiles for gpu in snapshot.gpus}
    numbers: dict[int, range] = {}
    first = 0
    for index in range(max(tiles, default=-1) + 1):
        count = 1
        if not cards:
            count = tiles.get(index, 1)
        numbers[index] = range(first, first + count)
        first += count
    return {gpu.uuid: numbers[gpu.index] for gpu in snapshot.gpus}


def _hierarchy(environ: Mapping[str, str]) -> str:
    """Return the hierarchy that is set; "" if none is, or none that Level Zero knows."""
    value = environ.get(HIERARCHY, "").upper()
    if value not in ("COMPOSITE", "FLAT", "COMBINED"):
        return ""
    return value


def read_level_zero(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the cards that ZE_AFFINITY_MASK shows whole, in the order of their bus ids; None if it limits nothing."""
    value = environ.get(MASK, "")
    if value in ("", "default"):
        return None
    hierarchy = _hierarchy(environ)
    listed = snapshot.physical
    named = _tiles_in_mask(value, composite=hierarchy == "COMPOSITE")
    tiles_of = _tiles_of_cards(snapshot, composite=hierarchy == "COMPOSITE")
    uuids = [gpu.uuid for gpu in listed if tiles_of[gpu.uuid] <= named]
    doubt = ""
    if not hierarchy and any(gpu.tiles > 1 for gpu in listed):
        doubt = f"without {HIERARCHY} it depends on the driver whether its numbers are those of cards or of tiles"
    elif are_mixed(listed) and environ.get(PCI_ORDER) != "1" and len(uuids) < len(listed):
        doubt = f"the GPUs of this host are of different models, and without {PCI_ORDER}=1 their order is the driver's"
    return VisibleLimit(
        value, tuple(uuids), ambiguous=bool(doubt), uses_indices=True, doubt=doubt, name=MASK, library="Level Zero"
    )


def _tiles_in_mask(mask: str, *, composite: bool) -> set[tuple[int, int]]:
    """Return what a mask names, as (number, tile): each tile of a device that it names as a whole.

    Args:
        composite: whether a number names a card, a part of which can be named too.
    """
    named: set[tuple[int, int]] = set()
    for entry in mask.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?", entry.strip(_BLANKS))
        if match is None:
            continue
        number, tile = match.groups()
        if tile is None:
            named.update((int(number), each) for each in range(_MOST_TILES))
        elif composite:
            named.add((int(number), int(tile)))
    return named


def _tiles_of_cards(snapshot: HostSnapshot, *, composite: bool) -> dict[str, set[tuple[int, int]]]:
    """Return for each card what a mask must name so that it is shown whole; as of :func:`_tiles_in_mask`."""
    ordinals = _ordinals(snapshot, cards=composite)
    found = {}
    for gpu in snapshot.gpus:
        tiles = 1
        if composite:
            tiles = gpu.tiles
        found[gpu.uuid] = {(number, tile) for number in ordinals[gpu.uuid] for tile in range(tiles)}
    return found


def render_level_zero(gpus: Sequence[Gpu], *, snapshot: HostSnapshot, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make exactly these cards visible, with all their tiles.

    Numbers are the only names that there are. ONEAPI_DEVICE_SELECTOR counts what the mask leaves. It is written where
    it is set and holds numbers.
    """
    hierarchy = _hierarchy(environ) or "FLAT"
    ordinals = _ordinals(snapshot, cards=hierarchy == "COMPOSITE")
    numbers: list[int] = []
    for gpu in gpus:
        numbers += ordinals[gpu.uuid]
    written = {MASK: ",".join(str(number) for number in numbers), HIERARCHY: hierarchy, PCI_ORDER: "1"}
    if re.search(r"[0-9]", environ.get(SELECTOR, "").replace("level_zero", "")):
        written[SELECTOR] = f"level_zero:{_from_zero(len(numbers))}"
    return written


def visible_variables(snapshot: HostSnapshot) -> tuple[str, ...]:
    """Return the variables that choose among these GPUs."""
    return VENDORS[snapshot.vendor].variables


def read_visible(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs to which an environment limits a process; None if no variable does."""
    library = VENDORS[snapshot.vendor].library
    if library == "CUDA":
        return parse_cuda(environ.get(CUDA), snapshot, device_order=environ.get("CUDA_DEVICE_ORDER"))
    if library == "HIP":
        return read_rocm(environ, snapshot)
    return read_level_zero(environ, snapshot)


def read_visible_once(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs to which an environment limits a claim: as :func:`read_visible`, but a list that a batch
    scheduler has written into several variables counts once. HIP would take Slurm's second copy for numbers within the
    list. Where none of these variables is set, the GPUs that a container was given are the limit
    (:func:`read_container`)."""
    if snapshot.vendor == "amd" and "SLURM_JOB_ID" in environ and CUDA in environ:
        copied = environ[CUDA] == environ.get(ROCR) and not environ.get(HIP)
        if copied and "GPU-" not in environ[CUDA]:
            environ = {name: value for name, value in environ.items() if name != CUDA}
    limit = read_visible(environ, snapshot)
    if limit is None:
        return read_container(environ, snapshot)
    return limit


def read_container(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs that this container was given, where it shows more than these; None where it does not, or where
    they are not told.

    A privileged container shows all GPUs of the host (kubernetes#81256). Kubernetes and Nomad name those that they have
    given to it by UUIDs in NVIDIA_VISIBLE_DEVICES. Numbers are not read: they are those of the host, and a container
    numbers its GPUs anew.
    """
    value = environ.get(CONTAINER, "")
    names = [name.strip() for name in value.split(",")]
    shown = [gpu for gpu in snapshot.gpus if not gpu.mig_enabled]
    given = tuple(gpu.uuid for gpu in shown if gpu.uuid in names or gpu.mig_parent in names)
    if not given or len(given) == len(shown):
        return None
    return VisibleLimit(value, given, name=CONTAINER, library="the NVIDIA Container Toolkit", lift="")


def render_visible(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that make exactly these GPUs visible, in this order, to a process with this environment
    (None: an empty one). The first one names them.

    Raises:
        UnsatisfiableRequestError: as for :func:`render_cuda`, which every claim calls to check its arguments.
    """
    library = VENDORS[snapshot.vendor].library
    if library == "CUDA":
        return render_cuda(gpus, visible_as=visible_as, snapshot=snapshot)
    if library == "Level Zero":
        return render_level_zero(gpus, snapshot=snapshot, environ=environ or {})
    return render_rocm(gpus, visible_as=visible_as, snapshot=snapshot, environ=environ or {})


def hide_all() -> dict[str, str]:
    """Return the variables that hide all GPUs."""
    variables: dict[str, str] = {}
    for vendor in VENDORS.values():
        variables.update(dict.fromkeys(vendor.variables, vendor.hides))
    return variables


def stale_indices(value: str | None, device_order: str | None, claimed: Collection[str], snapshot: HostSnapshot) -> str:
    """Return what is wrong with the indices, and what to do: a sentence without the full stop. "" if nothing is wrong.

    Args:
        value, device_order: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER of this process; None if not set.
        claimed: UUIDs of the GPUs of the claim inside which this process runs.
        snapshot: the host now.
    """
    if VENDORS[snapshot.vendor].library != "CUDA":
        return ""  # the others do not renumber
    visible_limit = parse_cuda(value, snapshot, device_order=device_order)
    if visible_limit is None or not visible_limit.uses_indices or not claimed:
        return ""
    foreign = [gpu.label for gpu in snapshot.gpus if gpu.uuid in visible_limit and gpu.uuid not in claimed]
    entries = [entry.strip() for entry in visible_limit.value.split(",")]
    number_of_entries = sum(entry[:1].isdigit() for entry in entries)
    if foreign:
        meant = f"GPU {','.join(foreign)}, which this claim does not hold"
    elif number_of_entries > len(visible_limit.uuids):
        meant = "fewer GPUs than this claim holds"
    else:
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={visible_limit.value} now means {meant}{_why_shifted(claimed, snapshot)}: "
        f"{_way_out_of_stale(claimed, snapshot)} (--visible-as uuid keeps a claim from this)"
    )


def _why_shifted(claimed: Collection[str], snapshot: HostSnapshot) -> str:
    """Return why indices no longer mean the GPUs of a claim, a clause; "" if that is not known."""
    causes = []
    lost = [gpu.label for gpu in snapshot.gpus if gpu.lost]
    if lost:
        causes.append(f"GPU {','.join(lost)} is lost")
    if any(snapshot.by_uuid(uuid) is None for uuid in claimed):
        causes.append("a claimed GPU is gone")
    if not causes:
        return ""
    return f", since {' and '.join(causes)}"


def _way_out_of_stale(claimed: Collection[str], snapshot: HostSnapshot) -> str:
    left = [gpu for gpu in snapshot.gpus if gpu.uuid in claimed and not gpu.lost]
    if not left:
        return "end this claim"
    names = render_cuda(left, visible_as="uuid", snapshot=snapshot)[CUDA]
    return f"set CUDA_VISIBLE_DEVICES={names} before CUDA starts"
