"""Whatever stands in the kernel's files, AMD's GPUs have distinct names, and what is malformed cannot be claimed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from safe_gpu import sysfs as kfd_nodes
from safe_gpu.drivers import kfd as kfd_processes

NODES = "sys/class/kfd/kfd/topology/nodes"
PROC = "sys/class/kfd/kfd/proc"
NAMES = ("simd_count", "location_id", "domain", "unique_id", "cpu_cores_count", "hive_id", "gfx_target_version", "x")

numbers = st.integers(-1, 1 << 70) | st.sampled_from([0, 1, 0xC100, 0x1000C100, 1 << 32, (1 << 64) - 1, 1 << 64])
line = st.builds("{} {}".format, st.sampled_from(NAMES), numbers) | st.text(max_size=12)
properties = st.lists(line, max_size=10).map("\n".join)
texts = numbers.map(str) | st.text(max_size=12)
sound = st.builds(
    "simd_count 4\nlocation_id {}\nunique_id {}".format, st.sampled_from([0xC100, 0x1000C100]), st.sampled_from([0, 5])
)
trees = st.lists(st.tuples(texts, properties) | st.tuples(st.just("7"), sound), max_size=6)


class Memory(kfd_nodes.Files):
    """Files by path; None is one that may not be opened."""

    def __init__(self, files: dict[str, str | None]) -> None:
        super().__init__("/nowhere")
        self.files = files

    def read(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        text = self.files[path]
        if text is None:
            raise PermissionError(1, "Operation not permitted", path)
        return text.strip("\0 \t\r\n")

    def names(self, path: str) -> list[str]:
        return list({name[len(path) + 1 :].split("/")[0] for name in self.files if name.startswith(path + "/")})

    def exists(self, path: str) -> bool:
        return any(name == path or name.startswith(path + "/") for name in self.files)


def memory(nodes: list[tuple[str, str]], hidden: int = -1) -> Memory:
    files: dict[str, str | None] = {f"{NODES}/0/gpu_id": "0"}
    for number, (gpu_id, text) in enumerate(nodes, 1):
        files[f"{NODES}/{number}/gpu_id"] = None if number == hidden else gpu_id
        files[f"{NODES}/{number}/properties"] = None if number == hidden else text
    return Memory(files)


@settings(max_examples=80, deadline=None)
@given(trees, st.integers(-1, 6))
def test_any_topology(nodes: list[tuple[str, str]], hidden: int) -> None:
    found = kfd_nodes.devices(memory(nodes, hidden))
    assert found is not None
    assert len({device.uuid for device in found}) == len(found) <= len(nodes)
    for device in found:
        assert device.node.number != hidden
        assert device.broken or (device.node.gpu_id and device.bus_id and device.node.properties["simd_count"])
        assert device.uuid.startswith(("GPU-", "AMD-"))


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["vram_7", "vram_8", "context_0/vram_7", "queues/1/gpuid", "x"]), texts | st.none())
)
def test_any_process(files: dict[str, str | None]) -> None:
    found = kfd_processes.processes(
        Memory({f"{PROC}/41/{name}": text for name, text in files.items()} | {f"{PROC}/0": ""}), [7, 8]
    )
    assert set(found) == {7, 8}
    for use in found.values():
        assert use.error or all(process.pid == 41 and (process.memory_used or 0) >= 0 for process in use.processes)
    for gpu_id in (7, 8):
        given_text = files.get(f"vram_{gpu_id}", "0")
        readable = (
            given_text is not None
            and given_text.strip("\0 \t\r\n").isascii()
            and given_text.strip("\0 \t\r\n").isdigit()
        )
        if not readable:
            assert found[gpu_id].error, "a figure that cannot be read is no proof that the GPU is free"
