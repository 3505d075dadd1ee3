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
from collections.abc import Collection, Mapping, Sequence

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import HIERARCHY, MASK, PCI_ORDER, Gpu, HostSnapshot, VisibleLimit, are_mixed
from ..gpus.vendors import VENDORS

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"

OPENCL = "GPU_DEVICE_ORDINAL"

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
    shown = (_as_shown(gpu, snapshot) for gpu in snapshot.physical)
    countable = [gpu for gpu in shown if gpu is not None]  # in PCI bus order
    chosen: list[Gpu] = []
    highest = -1
    doubt = ""
    for entry in entries:
        if by_number:
            number = re.match(_NUMBER, entry)
            position = int(number[1] + number[2]) if number else -1
            highest = max(highest, position)
            found = countable[position] if 0 <= position < len(countable) else None
        else:
            found, doubtful = _by_uuid(entry, snapshot)
            doubt = doubt or doubtful
        if found is None or found in chosen:
            chosen = chosen if found is None else []
            break
        chosen.append(found)
    if by_number:
        doubt = _doubt_about_numbers(highest, chosen, snapshot, device_order)
    return VisibleLimit(value, tuple(gpu.uuid for gpu in chosen), bool(doubt), by_number, doubt)


def _as_shown(gpu: Gpu, snapshot: HostSnapshot) -> Gpu | None:
    """Return what CUDA shows for a device: the first instance of a GPU with MIG on, nothing of a lost one."""
    shown: Gpu | None = gpu
    if gpu.mig_enabled:
        shown = next((instance for instance in snapshot.gpus if instance.mig_parent == gpu.uuid), None)
    return None if gpu.lost or shown is None or shown.lost else shown


def _by_uuid(entry: str, snapshot: HostSnapshot) -> tuple[Gpu | None, str]:
    """Return the one device whose UUID starts with ``entry`` (None if there is none), and why it is ambiguous, or
    ""."""
    same = [gpu for gpu in snapshot.gpus if gpu.uuid == entry]
    if not same and not entry.startswith(("GPU-", "MIG-")):
        return None, ""
    matches = same or [gpu for gpu in snapshot.gpus if gpu.uuid.startswith(entry)]
    if len(matches) == 1:
        return _as_shown(matches[0], snapshot), ""
    numbered = re.fullmatch(r"MIG-(GPU-[^/]+)/[0-9]+/[0-9]+", entry)
    if numbered is None:
        return None, ""
    instances = [gpu for gpu in snapshot.gpus if gpu.mig_parent == numbered.group(1)]
    if len(instances) > 1:
        return instances[0], f"{entry} names a MIG instance by numbers that this driver no longer shows"
    return (instances[0] if instances else None), ""


def _doubt_about_numbers(highest: int, chosen: Sequence[Gpu], snapshot: HostSnapshot, device_order: str | None) -> str:
    """Return why CUDA may read indices up to ``highest`` as other GPUs than ``chosen``; "" if it cannot."""
    if highest < 0:
        return ""  # "-1" selects no GPU on any host
    if any(gpu.mig_enabled for gpu in snapshot.gpus):
        return "MIG is on, and CUDA's numbers of the GPUs then depend on the driver version"
    usable = [gpu for gpu in snapshot.physical if not gpu.lost]
    if len(chosen) == len(usable):
        return ""  # all GPUs, so their order does not matter
    lost = next((gpu.index for gpu in snapshot.physical if gpu.lost), None)
    if lost is not None and highest >= lost:
        return f"GPU {lost} is lost, and from that index on CUDA's numbers differ from those of nvidia-smi"
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
    numbers = (gpu.index - sum(index < gpu.index for index in lost) for gpu in gpus)
    return {CUDA: ",".join(map(str, numbers)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


_STRTOL = r"[ \t\n\v\f\r]*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)"

_SHORTEST_PREFIX, _LONGEST = len("GPU-0"), len("GPU-0123456789abcdef")


def read_rocm(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs that these variables leave to a program that uses HIP, in its order; None if none of them is
    set."""
    left = list(snapshot.physical)
    above = next((name for name in (HIP, CUDA) if environ.get(name)), None)
    name, value = (ROCR, environ[ROCR]) if ROCR in environ else (above, environ.get(above or ""))
    if name is None or value is None:
        return None
    by_index = "GPU-" not in (value.upper() if name == ROCR else value)
    if name == ROCR:
        left = _by_rocr(value, left)
    if above is not None:
        left = _by_hip(environ[above], left)
        value = value if name == above else f"{value} {above}={environ[above]}"
    return VisibleLimit(value, tuple(gpu.uuid for gpu in left), uses_indices=by_index, name=name, library="HIP")


def _by_rocr(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.removesuffix(",").split(",")[: len(gpus)]:  # as C++'s getline
        found = _by_entry(entry.upper().strip(_BLANKS), gpus)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen


def _by_entry(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("G"):
        if not _SHORTEST_PREFIX <= len(entry) <= _LONGEST:
            return None
        matches = [gpu for gpu in gpus if gpu.uuid.upper().startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.fullmatch(_STRTOL, entry)
    if number is None:
        return None
    digits = number[2].lower()
    index = int(digits, 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10)
    return gpus[index] if index < len(gpus) and (number[1] != "-" or index == 0) else None


def _by_hip(value: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    chosen: list[Gpu] = []
    for entry in value.split(","):
        if "GPU-" in entry:
            found = next((gpu for gpu in gpus if entry in gpu.uuid), None)
        else:
            plain = re.fullmatch(r"0|[1-9][0-9]{0,8}", entry)
            found = gpus[int(entry)] if plain and int(entry) < len(gpus) else None
        if found is None:
            break
        if found not in chosen:
            chosen.append(found)
    return chosen


def render_rocm(
    gpus: Sequence[Gpu], *, visible_as: str, snapshot: HostSnapshot, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that make exactly these GPUs visible, in this order, to a process with this environment.

    ROCR gets UUIDs whatever ``visible_as`` says, and the index of a GPU that has no UUID. HIP then sees nothing else,
    and its own variables count from 0: an inherited one would count GPUs that are no longer there. OpenCL's variable
    is written if it is set.

    Under Ray an inherited ROCR_VISIBLE_DEVICES stays as it is, and HIP's variable counts what it leaves.
    """
    if _RAY not in environ:
        numbers = ",".join(map(str, range(len(gpus))))
        by_uuid = (gpu.uuid if gpu.uuid.startswith("GPU-") else str(gpu.index) for gpu in gpus)
        written = {ROCR: ",".join(by_uuid), HIP: numbers, CUDA: numbers}
    else:
        left = list(snapshot.physical)
        if ROCR in environ:
            left = _by_rocr(environ[ROCR], left)
        places = {gpu.uuid: str(place) for place, gpu in enumerate(left)}
        numbers = names = ",".join(places[gpu.uuid] for gpu in gpus)
        if visible_as == "uuid":
            names = ",".join(gpu.uuid if gpu.uuid.startswith("GPU-") else places[gpu.uuid] for gpu in gpus)
        written = {HIP: names, **({CUDA: names} if CUDA in environ else {})}
    return {**written, **({OPENCL: numbers} if OPENCL in environ else {})}


def _ordinals(snapshot: HostSnapshot, *, cards: bool) -> dict[str, range]:
    """Return UUID -> the numbers of the card. Cards that are not listed, such as integrated GPUs, have one tile."""
    tiles = {gpu.index: 1 if cards else gpu.tiles for gpu in snapshot.gpus}
    found, first = {}, 0
    for index in range(max(tiles, default=-1) + 1):
        found[index] = range(first, first := first + tiles.get(index, 1))
    return {gpu.uuid: found[gpu.index] for gpu in snapshot.gpus}


def _hierarchy(environ: Mapping[str, str]) -> str:
    """Return the hierarchy that is set; "" if none is, or none that Level Zero knows."""
    value = environ.get(HIERARCHY, "").upper()
    return value if value in ("COMPOSITE", "FLAT", "COMBINED") else ""


def read_level_zero(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the cards that ZE_AFFINITY_MASK shows whole, in the order of their bus ids; None if it limits nothing."""
    value = environ.get(MASK, "")
    if value in ("", "default"):
        return None
    hierarchy, listed = _hierarchy(environ), snapshot.physical
    composite = hierarchy == "COMPOSITE"
    ordinals = _ordinals(snapshot, cards=composite)
    tiles = {gpu.uuid: gpu.tiles for gpu in listed}
    named: set[tuple[int, int]] = set()  # number, and tile of the card
    for entry in value.split(","):
        number = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?", entry.strip(_BLANKS))
        if number is None or (number[2] and not composite):
            continue
        named |= {(int(number[1]), tile) for tile in ([int(number[2])] if number[2] else range(_MOST_TILES))}
    uuids = [
        gpu.uuid
        for gpu in listed
        if {(one, tile) for one in ordinals[gpu.uuid] for tile in range(tiles[gpu.uuid] if composite else 1)} <= named
    ]
    doubt = ""
    if not hierarchy and max(tiles.values(), default=1) > 1:
        doubt = f"without {HIERARCHY} it depends on the driver whether its numbers are those of cards or of tiles"
    elif are_mixed(listed) and environ.get(PCI_ORDER) != "1" and len(uuids) < len(listed):
        doubt = f"the GPUs of this host are of different models, and without {PCI_ORDER}=1 their order is the driver's"
    return VisibleLimit(value, tuple(uuids), bool(doubt), True, doubt, name=MASK, library="Level Zero")


def render_level_zero(gpus: Sequence[Gpu], *, snapshot: HostSnapshot, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make exactly these cards visible, with all their tiles.

    Numbers are the only names that there are. ONEAPI_DEVICE_SELECTOR counts what the mask leaves. It is written where
    it is set and holds numbers.
    """
    hierarchy = _hierarchy(environ) or "FLAT"
    ordinals = _ordinals(snapshot, cards=hierarchy == "COMPOSITE")
    numbers = [number for gpu in gpus for number in ordinals[gpu.uuid]]
    written = {MASK: ",".join(map(str, numbers)), HIERARCHY: hierarchy, PCI_ORDER: "1"}
    if re.search(r"[0-9]", environ.get(SELECTOR, "").replace("level_zero", "")):
        written[SELECTOR] = f"level_zero:{','.join(map(str, range(len(numbers))))}"
    return written


def visible_variables(snapshot: HostSnapshot) -> tuple[str, ...]:
    """Return the variables that choose among these GPUs."""
    return VENDORS[snapshot.vendor].variables


def read_visible(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs to which an environment limits a process; None if no variable does."""
    library = VENDORS[snapshot.vendor].library
    if library == "CUDA":
        return parse_cuda(environ.get(CUDA), snapshot, device_order=environ.get("CUDA_DEVICE_ORDER"))
    return (read_rocm if library == "HIP" else read_level_zero)(environ, snapshot)


def read_visible_once(environ: Mapping[str, str], snapshot: HostSnapshot) -> VisibleLimit | None:
    """Return the GPUs to which an environment limits a claim: as :func:`read_visible`, but a list that a batch
    scheduler has written into several variables counts once. HIP would take Slurm's second copy for numbers within the
    list."""
    if snapshot.vendor == "amd" and "SLURM_JOB_ID" in environ and CUDA in environ:
        copied = environ[CUDA] == environ.get(ROCR) and not environ.get(HIP)
        if copied and "GPU-" not in environ[CUDA]:
            environ = {name: value for name, value in environ.items() if name != CUDA}
    return read_visible(environ, snapshot)


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
    return {name: vendor.hides for vendor in VENDORS.values() for name in vendor.variables}


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
    foreign = [gpu for gpu in snapshot.gpus if gpu.uuid in visible_limit and gpu.uuid not in claimed]
    lacking = sum(entry.strip()[:1].isdigit() for entry in visible_limit.value.split(",")) > len(visible_limit.uuids)
    if not foreign and not lacking:
        return ""
    meant = "fewer GPUs than this claim holds"
    if foreign:
        meant = f"GPU {','.join(gpu.label for gpu in foreign)}, which this claim does not hold"
    lost = ",".join(gpu.label for gpu in snapshot.gpus if gpu.lost)
    causes = [f"GPU {lost} is lost"] if lost else []
    if any(snapshot.by_uuid(uuid) is None for uuid in claimed):
        causes.append("a claimed GPU is gone")
    why = f", since {' and '.join(causes)}" if causes else ""
    mine = [gpu for gpu in snapshot.gpus if gpu.uuid in claimed and not gpu.lost]
    right = render_cuda(mine, visible_as="uuid", snapshot=snapshot)[CUDA]
    way_out = f"set CUDA_VISIBLE_DEVICES={right} before CUDA starts" if mine else "end this claim"
    return (
        f"CUDA_VISIBLE_DEVICES={visible_limit.value} now means {meant}{why}: {way_out} "
        "(--visible-as uuid keeps a claim from this)"
    )
