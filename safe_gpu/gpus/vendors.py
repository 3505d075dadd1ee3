"""The vendors of GPUs: a row for each, with what differs between them.

A vendor is also a driver in ``drivers``, a library in ``runtimes``, and the grammar of its variables there, which
``runtimes.visible_devices`` chooses by ``library``.
"""

import re
from typing import NamedTuple

BARE_UUID = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
"""Regular expression of a UUID without ``GPU-``, as the GPUs of Jetson have."""


class Vendor(NamedTuple):
    """One vendor.

    Attributes:
        title: the name in messages.
        uuid: regular expression of the UUIDs of its devices; see ``devices.vendor_of``.
        by_place: how the names begin of GPUs that have no UUID and are named by their place; "" if all have one.
        drivers: the names by which ``SAFE_GPU_DRIVER`` chooses a driver of its GPUs only.
        loaded: a directory or file below the root for each kernel driver, which is there while that is loaded.
        control: the device file that every process on its GPUs opens, below the root; "" if there is none.
        device: how the names of its device files begin.
        library: the library through which programs use the GPUs.
        variables: those that choose among the GPUs. Claims name the GPUs in the first one.
        hides: the value of these variables that hides all GPUs.
        keeps_order: whether the library numbers the GPUs in the order of a list in these variables.
        prefixes: how the names of all variables of its library begin that claims read or set.
        preset: a simulated host with its GPUs.
        version: that of its driver on simulated hosts.
        install, pass_in, is_slow, no_library, recover: what ``safe-gpu doctor`` advises where there is no driver; no
            GPU in a container; a slow poll; a library that does not start; a lost GPU.
    """

    title: str
    uuid: str
    drivers: tuple[str, ...]
    loaded: tuple[str, ...]
    device: str
    library: str
    variables: tuple[str, ...]
    prefixes: tuple[str, ...]
    preset: str
    version: str
    install: str
    pass_in: str
    is_slow: str
    recover: str
    no_library: str = ""
    by_place: str = ""
    control: str = ""
    hides: str = ""
    keeps_order: bool = True


VENDORS = {
    "nvidia": Vendor(
        title="NVIDIA",
        uuid=r"(GPU|MIG)-(?![^-]{16}$).*",
        drivers=("nvml", "nvidia-smi"),
        loaded=("proc/driver/nvidia/version",),
        control="dev/nvidiactl",
        device="nvidia",
        library="CUDA",
        variables=("CUDA_VISIBLE_DEVICES",),
        prefixes=("CUDA_",),
        preset="dgx-a100",
        version="550.54.15",
        install="install the NVIDIA driver and nvidia-ml-py",
        pass_in="pass GPUs into the container (docker run --gpus all), or see nvidia-smi",
        is_slow="turn persistence mode on: start nvidia-persistenced, or `nvidia-smi -pm 1` as root",
        no_library="install the driver's CUDA library of the same version as the kernel module, and load nvidia_uvm; "
        "on NVSwitch hosts start nvidia-fabricmanager; with confidential computing set the ready state (nvidia-smi "
        "conf-compute -srs 1); see dmesg",
        recover="look for Xid in dmesg, then `nvidia-smi -r` as root, or reboot the host",
    ),
    "amd": Vendor(
        title="AMD",
        uuid=r"GPU-[^-]{16}|AMD-.*",  # as ROCR writes 16 hex digits
        by_place="AMD-",
        drivers=("kfd",),
        loaded=("sys/class/kfd/kfd/topology/nodes",),
        control="dev/kfd",
        device="kfd",
        library="HIP",
        variables=("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        prefixes=("ROCR_", "HIP_"),
        preset="mi250x",
        version="6.8.5",
        install="load the kernel driver amdgpu",
        pass_in="pass GPUs into the container (docker run --device /dev/kfd --device /dev/dri), or see rocminfo",
        is_slow="see dmesg for amdgpu: a GPU answers slowly after a reset or a sleep",
        no_library="install ROCm's HIP runtime, and join the groups that may open /dev/kfd and /dev/dri (render, "
        "video)",
        recover="look for amdgpu in dmesg, or reboot the host",
    ),
    "intel": Vendor(
        title="Intel",
        uuid=r"INTEL-.*",  # sysfs has no UUID
        by_place="INTEL-",
        drivers=("intel",),
        loaded=("sys/bus/pci/drivers/i915", "sys/bus/pci/drivers/xe"),
        device="render",
        library="Level Zero",
        variables=("ZE_AFFINITY_MASK",),
        hides="9999",  # an empty mask hides nothing, a number that no device has hides all
        keeps_order=False,
        prefixes=("ZE_", "ONEAPI_"),
        preset="max1550",
        version="Linux 6.8.0",
        install="load the kernel driver xe or i915",
        pass_in="pass GPUs into the container (docker run --device /dev/dri), and join the groups that may open "
        "/dev/dri/renderD* (render, video)",
        is_slow="see dmesg for xe and i915: a GPU answers slowly after a reset or a sleep",
        recover="look for xe or i915 in dmesg, or reboot the host",
    ),
}
"""Key -> row. A claim that chooses no vendor takes the first one here of which the host has GPUs."""

FIRST = next(iter(VENDORS))

# What drivers say where they cannot tell a product name. No product is called so.
_NO_NAME = re.compile(
    r"\W|(n/?a|none|unknown)$|.*(\berr(or)?\b|\bfail|\bunable\b|\blost\b|\breset\b|\bblocked\b|\binvalid\b|"
    r"permission|deprecated|not (available|found|supported))",
    re.IGNORECASE,
)


def product_name(text: str | None) -> str:
    """Return what a driver says as the name of a product; "" if it is an error.

    >>> product_name("NVIDIA H200"), product_name("[Unknown Error]")
    ('NVIDIA H200', '')
    """
    if text is None or _NO_NAME.match(text):
        return ""
    return text
