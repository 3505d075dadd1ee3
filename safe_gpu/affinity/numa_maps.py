"""The memory of a process by NUMA node, and its memory policy, from ``/proc/PID/numa_maps``.

A line is one mapping: address, policy, then facts such as ``N0=pages N1=pages kernelpagesize_kB=4`` (numa(7)). A
mapping without a policy of its own shows that of the process's main thread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..cpulist import parse_cpulist

# "bind:0-1", "prefer:0", "prefer (many):0", "bind=static:0", "default"
_POLICY = re.compile(rb"[0-9a-f]+ (weighted interleave|prefer \(many\)|[a-z]+)(?:=[a-z|]+)?(?::([0-9,-]+))?(?: |$)")
_NAMES = {b"prefer": "preferred", b"prefer (many)": "preferred"}


class NumaMaps(NamedTuple):
    """What the mappings of a process show.

    Attributes:
        memory: bytes of its pages by node.
        policy, nodes: the policy of most mappings, in the words of this package, and its nodes.
    """

    memory: dict[int, int]
    policy: str
    nodes: frozenset[int]


def parse_numa_maps(lines: Iterable[bytes]) -> NumaMaps | None:
    """The sums over all mappings; None if there are none, which means that the file may not be read."""
    total: Counter[int] = Counter()
    policies: Counter[tuple[bytes, bytes]] = Counter()
    for line in lines:
        if policy := _POLICY.match(line):
            policies[policy[1], policy[2] or b""] += 1
        size = re.search(rb" kernelpagesize_kB=([0-9]{1,18})\b", line)
        for node, pages in re.findall(rb" N([0-9]{1,9})=([0-9]{1,18})\b", line):
            total[int(node)] += int(pages) * (int(size[1]) if size else 4) * 1024
    if not policies:
        return None
    ((name, nodes), _), *_ = policies.most_common(1)
    memory = dict(sorted(total.items()))
    return NumaMaps(memory, _NAMES.get(name) or name.decode(), parse_cpulist(nodes.decode()) or frozenset())
