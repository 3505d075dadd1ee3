"""The hosts that can be simulated.

Everything is made on demand from a few lines of facts: :func:`preset` by name, then the devices as an idle driver would
report them (:meth:`Preset.gpus`) and the CPUs as the kernel would (:meth:`Preset.topology`).
"""

from ..errors import UnsatisfiableRequestError
from .preset_parts import Cpus, Preset, SimulatedGpu, SimulatedInstance


def preset(name: str) -> Preset:
    """Return the simulated host of this name.

    Raises:
        UnsatisfiableRequestError: there is none; the message lists those there are.
    """
    found = PRESETS.get(name)
    if found is None:
        raise UnsatisfiableRequestError(
            f"there is no simulated host {name!r}: choose SAFE_GPU_DRIVER=simulated: with one of {', '.join(PRESETS)}",
            value=name,
        )
    return found


def _alike(name: str, mib: int, *places: tuple[int, int, str], display: bool = False) -> tuple[SimulatedGpu, ...]:
    """Return GPUs of one model, from (bus, node, UUID without its prefix)."""
    return tuple(SimulatedGpu(f"GPU-{uuid}", bus, node, name, mib, display) for bus, node, uuid in places)


_MIG_INSTANCES = (
    SimulatedInstance("MIG-834b07f6-c0c6-14fb-47cf-dd20e5ee0207", "3g.40gb", 40320),
    SimulatedInstance("MIG-e52114e3-f535-c645-6b06-9fc38ab5d42e", "2g.20gb", 19968),
    SimulatedInstance("MIG-299d2235-1b33-1592-4960-fbf69de48f18", "1g.10gb", 9856),
    SimulatedInstance("MIG-641b266c-0be3-b981-57dd-f4b81cb01398", "1g.10gb", 9856),
)

_CUT, _WHOLE = _alike(
    "NVIDIA H100 PCIe",
    81559,
    (0x17, 0, "12c7deae-45ed-f3ee-588c-80c6e90aa234"),
    (0xCA, 1, "f1e80895-0f46-5c25-6602-ecdeaeceaf92"),
)


def _of_intel(name: str, mib: int, tiles: int, *places: tuple[int, int]) -> tuple[SimulatedGpu, ...]:
    """Return cards of one model, from (bus, node)."""
    return tuple(
        SimulatedGpu(f"INTEL-0000:{bus:02x}:00.0", bus, node, f"Intel {name}", mib, tiles=tiles) for bus, node in places
    )


_ALL = (
    Preset(
        "dgx-a100",
        Cpus(packages=2, nodes=4, cores=16, llc=4),  # two EPYC 7742, four NUMA nodes per socket
        _alike(
            "NVIDIA A100-SXM4-80GB",
            81920,
            (0x07, 3, "ef7dbe0b-0496-e4d0-6312-be5b5d9cf278"),
            (0x0F, 3, "9e5cb3bf-4bef-417c-86ff-1898f0035f21"),
            (0x47, 1, "3428af49-220e-a18a-5dab-1b44d872ecb1"),
            (0x4E, 1, "80f89ab6-a3a8-075a-cdd6-d082b8b8519b"),
            (0x87, 7, "b7ee056f-76fe-6316-b7df-8e24833f4ed3"),
            (0x90, 7, "89f2771c-8622-baae-6d71-0b4cd7f36650"),
            (0xB7, 5, "b80a3163-1a18-c740-e6c7-2111acf85dd4"),
            (0xBD, 5, "3a492e5f-3158-20c8-3551-c260b0002aff"),
        ),
        nvswitch=True,
    ),
    Preset(
        "dgx-h100",
        Cpus(packages=2, nodes=1, cores=56, llc=56, distances=(10, 10, 21)),  # two Xeon Platinum 8480C
        _alike(
            "NVIDIA H100 80GB HBM3",
            81559,
            (0x1B, 0, "7712d67f-4b92-0cd7-9582-4fb17bbdfe1a"),
            (0x43, 0, "f4681da6-cd67-bb3a-42bd-2f6132e6b676"),
            (0x52, 0, "9727d12b-8b7b-00b1-83ee-a3686ddb954b"),
            (0x61, 0, "8dd5a67d-e405-0fad-bbf3-5596eafda6dd"),
            (0x9D, 1, "b8971a84-e5c9-ab93-27d8-f9f15d81bade"),
            (0xC3, 1, "afbbbaee-462c-011f-837c-e094b7f6bdcf"),
            (0xD1, 1, "bf28f7da-d983-d560-a186-bc83f1608bbe"),
            (0xDF, 1, "3ca4f5ab-a0c5-e19a-d772-f15cba13d6d0"),
        ),
        nvswitch=True,
    ),
    Preset(
        "p4d",
        Cpus(packages=2, nodes=1, cores=24, llc=24, distances=(10, 10, 21)),  # two Xeon Platinum 8275CL
        tuple(
            SimulatedGpu(f"GPU-{uuid}", bus, node, "NVIDIA A100-SXM4-40GB", 40960, slot=slot)
            for bus, slot, node, uuid in (
                (0x10, 0x1C, 0, "27c3a9d0-8e51-4f6b-b2d4-6a1e90c75f38"),
                (0x10, 0x1D, 0, "e5108b7c-3d92-41a6-9f0e-c84b2d6a7135"),
                (0x20, 0x1C, 0, "94f6d21e-7ba3-4058-8c1d-05e3b79fa264"),
                (0x20, 0x1D, 0, "b06e5f83-c1d4-4927-a3e8-7f92d0416bc5"),
                (0x90, 0x1C, 1, "6d82b415-f9e0-437c-85ab-1c30e7d29f46"),
                (0x90, 0x1D, 1, "1fa97e64-5c28-4bd3-9e07-a2b658d4c031"),
                (0xA0, 0x1C, 1, "c3d05b92-6f17-48ea-b4c9-8e7a13f06d52"),
                (0xA0, 0x1D, 1, "58b1e4f7-0a6d-4c93-86d2-f94c3b7e1a09"),
            )
        ),
        nvswitch=True,
    ),
    Preset(
        "workstation-mixed",
        Cpus(packages=1, nodes=1, cores=24, llc=6),  # a Threadripper PRO 5965WX
        (
            SimulatedGpu(
                "GPU-d0309c32-ecf1-b22f-2e21-3d634af0547b", 0x01, 0, "NVIDIA RTX A2000 12GB", 12282, display=True
            ),
            SimulatedGpu("GPU-8908c767-7109-c1e0-1fcc-05bc3d309491", 0x21, 0, "NVIDIA GeForce RTX 4090", 24564),
            SimulatedGpu("GPU-c1a92806-ab77-a665-e02e-f674696ceee1", 0x41, 0, "NVIDIA GeForce RTX 3090", 24576),
        ),
    ),
    Preset(
        "laptop",
        Cpus(packages=1, nodes=1, cores=8, llc=8, adjacent=True),  # a Ryzen 7 7840HS
        _alike(
            "NVIDIA GeForce RTX 4070 Laptop GPU", 8188, (0x01, 0, "4f667d77-15c7-524b-c32d-5340d78b712e"), display=True
        ),
    ),
    Preset(
        "big-16",
        Cpus(packages=2, nodes=1, cores=24, llc=24, distances=(10, 10, 21)),  # two Xeon Platinum 8168, as in a DGX-2
        _alike(
            "Tesla V100-SXM3-32GB",
            32510,
            (0x34, 0, "d4acffe1-ef41-73f2-5f97-74a147ba95ac"),
            (0x36, 0, "33bc8e3b-66b7-db0e-0d8c-58ba0ca34a19"),
            (0x39, 0, "5f1ef1e4-717d-e4b1-7883-7097b829b92d"),
            (0x3B, 0, "12ad696c-a968-05d0-9430-79fe203a58c6"),
            (0x57, 0, "acf4b0ea-2a17-3b23-af6f-adc3532d08e9"),
            (0x59, 0, "0db7d6b0-6649-d6cd-8d99-309382e2868c"),
            (0x5C, 0, "4a88ef7c-94a6-feeb-616c-164e8e481f34"),
            (0x5E, 0, "e9736f0e-8543-5b72-b49f-96b25e421304"),
            (0xB7, 1, "7963d1ae-6f01-7ef3-cb0e-114e86debc24"),
            (0xB9, 1, "29a5ea43-1b9b-b7ca-4f0c-6e3e1fc1b134"),
            (0xBC, 1, "60db92f7-0ca8-eedb-28cc-7ba015037478"),
            (0xBE, 1, "43dcb2aa-6bd1-6600-e1d9-04d02c160f79"),
            (0xE0, 1, "6287c384-e97d-6cd5-9c18-7058eb7007e1"),
            (0xE2, 1, "153a555b-dee3-ba46-0982-451548b25174"),
            (0xE5, 1, "bf672bde-bb81-bbf8-fcab-ad1739004f88"),
            (0xE7, 1, "fe420698-57d9-a969-a3d0-124ddcccadef"),
        ),
        nvswitch=True,
    ),
    Preset(
        "mig-h100",
        Cpus(packages=2, nodes=1, cores=32, llc=32, distances=(10, 10, 21)),
        (_CUT._replace(instances=_MIG_INSTANCES), _WHOLE),
    ),
    Preset(
        "mi250x",
        Cpus(packages=1, nodes=4, cores=16, llc=8),  # an EPYC 7A53, as in LUMI and Frontier: each die is next to one L3
        _alike(
            "AMD Instinct MI250X",
            65520,
            (0xC1, 3, "a3f1c07e52d98b16"),
            (0xC6, 3, "0d7be93a41c6f528"),
            (0xC9, 1, "5e2490b7fd13a86c"),
            (0xCE, 1, "c86fa1350e7d94b2"),
            (0xD1, 0, "71d4e8290ba35fc6"),
            (0xD6, 0, "f90b6c5d3e1782a4"),
            (0xD9, 2, "2ac7538e96f0d41b"),
            (0xDE, 2, "b4187dfa60c2e935"),
        ),
        nvswitch=True,
    ),
    Preset(
        "mi300x-cpx",
        Cpus(packages=2, nodes=1, cores=96, llc=8, distances=(10, 10, 32)),  # two EPYC 9654
        tuple(  # each in eight partitions, which share the bus id
            SimulatedGpu(f"GPU-{unique_id + partition:016x}", bus, node, "AMD Instinct MI300X", 24560)
            for bus, node, unique_id in (
                (0x05, 0, 0x9C41B2D7058EF310),
                (0x26, 0, 0x1FD80A6E93B7C520),
                (0x46, 0, 0xE07B54C81A2F9D30),
                (0x65, 0, 0x48A3F61D7C05EB40),
                (0x85, 1, 0xD2956E0BF84A1C50),
                (0xA6, 1, 0x370CE8B15D9F2460),
                (0xC6, 1, 0xAB62147F0E83D970),
                (0xE5, 1, 0x6D1F93C052B8A780),
            )
            for partition in range(8)
        ),
        nvswitch=True,
    ),
    Preset(
        "two-vendors",
        Cpus(packages=2, nodes=1, cores=32, llc=8, distances=(10, 10, 32)),  # two EPYC 7543
        (
            *_alike(
                "NVIDIA A100-PCIE-40GB",
                40960,
                (0x21, 0, "0ad28a51-5c1e-7d04-9b1d-2f1f6e0c4b93"),
                (0x24, 0, "5b3c9fe2-7a60-4c88-8e57-91d0ab5be6f4"),
                (0xA1, 1, "9e01d7b6-3f42-2a95-b6c3-48e7705fd128"),
                (0xA4, 1, "c47f2e80-1b9d-6e37-a20f-d35c98e614a7"),
            ),
            *_alike(
                "AMD Instinct MI210",
                65520,
                (0x43, 0, "1c6e90fb35a7d284"),
                (0x46, 0, "83f5a1d40e2b79c6"),
                (0xC3, 1, "d70b4e9f68c13a52"),
                (0xC6, 1, "49a2f8c7b05e6d31"),
            ),
        ),
    ),
    Preset(
        "max1550",
        Cpus(packages=2, nodes=1, cores=52, llc=52, distances=(10, 10, 21)),  # two Xeon Max 9470C, as in Aurora
        _of_intel(
            "Data Center GPU Max 1550", 131072, 2, (0x18, 0), (0x42, 0), (0x6C, 0), (0x93, 1), (0xBD, 1), (0xE7, 1)
        ),
        nvswitch=True,
    ),
    Preset(
        "arc-a770",
        Cpus(packages=1, nodes=1, cores=16, llc=16, adjacent=True),
        _of_intel("Arc A770", 16384, 1, (0x03, 0), (0x07, 0)),
    ),
)

PRESETS: dict[str, Preset] = {host.name: host for host in _ALL}
"""Name -> host."""
