"""Prefixes a command with numactl so that it runs next to a GPU, for launchers that start other programs."""

import os
from collections.abc import Sequence
from functools import cache

from ..drivers import opened_driver
from ..errors import GPUAffinityError, SafeGpuError, package_logger
from ..host.programs import TooLate, TooMuch, find_program, output_of
from ..topology.cpulist import format_cpulist
from .binding import near, original_mask
from .planner import AffinityOptions, as_count, check_memory_mode, falls_back, parse_options
from .resolve_gpus import named

# Seconds for "numactl OPTIONS true" to end, and bytes of what it prints.
_PATIENCE = 30.0
_MOST_OUTPUT = 1 << 16


def wrap_command(
    command: Sequence[str],
    *,
    gpu: int | None = None,
    ordinal: int | None = None,
    mode: str | AffinityOptions | None,
    memory: str | None = None,
    strict: bool = True,
    check: bool = False,
) -> list[str]:
    """Return ``command`` with ``numactl --physcpubind=...`` before it, for the share of one GPU among all GPUs of the
    host.

    An INFO line has the GPU that was meant and the final command. numactl must be installed where the command runs;
    here it is needed for ``check`` and for falling back only.

    Args:
        command: the arguments, the program first.
        gpu: index as nvidia-smi shows it.
        ordinal: CUDA's number in this process, after CUDA_VISIBLE_DEVICES, instead of ``gpu``.
        mode: as ``affinity`` of a claim, with the same CPUs, or torch's ``NumaOptions``. None binds no CPUs; without
            ``memory`` the command is returned as it is.
        memory: the policy for the GPU's NUMA node: None, "preferred" (``--preferred``) or "bind" (``--membind``).
        strict: False logs a warning and returns the command as it is where the binding cannot be worked out or the
            check, which it implies, fails; the CPUs stay bound if only the memory policy fails. So does a NumaOptions
            with ``should_fall_back_if_binding_fails``. Avoid it: a command that runs unbound is slow, and only the log
            says why.
        check: run ``numactl`` with these options and ``true``, here. Each binding is tried once per process and PATH.

    Raises:
        GPUAffinityError: an argument is wrong. Unless it falls back: there is no such GPU, no share for it, or no
            driver, or numactl refuses.
    """
    import shlex

    if isinstance(command, (str, bytes)) or not command or not all(isinstance(word, str) for word in command):
        raise GPUAffinityError(f"a command is a list of strings, the program first, not {command!r}")
    options = parse_options(mode, memory)
    if options is None and memory is None:
        return list(command)
    if (gpu is None) == (ordinal is None):
        raise GPUAffinityError("name one GPU: gpu= as nvidia-smi shows it, or ordinal= as CUDA numbers it")
    log = package_logger()
    may_fall_back = not strict or falls_back(mode)
    try:
        if gpu is not None:
            gpu = as_count("gpu", gpu, 0)
        with opened_driver() as driver:
            chosen = named(gpu, ordinal, driver.snapshot(), os.environ)
            there = near(chosen.gpus[:1], driver, options, memory, original_mask())
        prefix, notes = _prefix(there.cpus, there.nodes, memory, check=check, may_fall_back=may_fall_back)
    except SafeGpuError as err:
        if may_fall_back:
            log.warning("the command runs unbound: %s", err)
            return list(command)
        if isinstance(err, GPUAffinityError):
            raise
        which = repr(gpu)
        if gpu is None:
            which = f"ordinal {ordinal}"
        raise GPUAffinityError(f"the place of GPU {which} is not known: {err}") from err
    for note in (*chosen.notes, *there.notes, *notes):
        log.warning("%s", note)
    wrapped = [*prefix, *command]
    log.info("next to %s: %s", chosen.title, shlex.join(wrapped))
    return wrapped


def _prefix(
    cpus: frozenset[int] | None, nodes: frozenset[int], memory: str | None, *, check: bool, may_fall_back: bool
) -> tuple[list[str], list[str]]:
    """Return ``numactl`` with its options, and a sentence if the memory policy was left out of them.

    Raises:
        GPUAffinityError: numactl refuses the CPUs, or, unless it falls back, the memory policy.
    """
    try:
        prefix = ["numactl", *numactl_options(cpus, nodes, memory)]
        if check or may_fall_back:
            refusal = _refusal(tuple(prefix), os.environ.get("PATH"))
            if refusal:
                raise GPUAffinityError(refusal)
        return prefix, []
    except GPUAffinityError as err:
        if not may_fall_back or cpus is None or memory is None:
            raise
        prefix, _ = _prefix(cpus, nodes, None, check=check, may_fall_back=True)
        return prefix, [f"bound without a memory policy: {err}"]


@cache
def _refusal(prefix: tuple[str, ...], path: str | None) -> str:
    """Run ``true`` under numactl, found on this PATH: "", or why it fails, with what numactl printed."""
    try:
        numactl = find_program("numactl", os.environ)
        if numactl is None:
            return "numactl is not installed here, or not on PATH"
        true = find_program("true", os.environ)
        if true is None:
            return "true is not installed here, or not on PATH"
        command = [numactl, *prefix[1:], true]
        env = {**os.environ, "LC_ALL": "C"}
        code, _, error = output_of(command, env=env, timeout=_PATIENCE, most=_MOST_OUTPUT, separate_stderr=True)
    except (TooLate, TooMuch):
        return f"numactl did not end within {_PATIENCE:g} s, or prints without end"
    except OSError as err:
        return f"numactl cannot be run: {err}"
    if code == 0:
        return ""
    said = error.strip().partition("\n")[0]  # the rest is how to use it
    return f"{' '.join(prefix)} fails here: {said or f'exit code {code}'}"


def numactl_options(cpus: frozenset[int] | None, nodes: frozenset[int], memory: str | None) -> list[str]:
    """Return the options of numactl(8) for a share (None is none) and a memory policy.

    Raises:
        GPUAffinityError: a memory policy without a node.
    """
    options = []
    if cpus is not None:
        options.append(f"--physcpubind={format_cpulist(cpus)}")
    if check_memory_mode(memory) is None:
        return options
    if not nodes:
        raise GPUAffinityError(f"memory={memory!r} needs to know the GPU's NUMA node, and it is not known")
    name = "preferred-many"
    if memory == "bind":
        name = "membind"
    elif len(nodes) == 1:
        name = "preferred"
    return [*options, f"--{name}={format_cpulist(nodes)}"]
