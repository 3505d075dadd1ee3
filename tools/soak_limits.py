"""The policy file of a soak test, which changes from time to time, and what the referee knows of it."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Policy", "allowed", "may_refuse"]

_KEPT = 100  # so many policies of the past are in the log
_OTHERS = {"default_hold": "2s", "max_hold": "1s", "max_wait": "2s"}


class Policy:
    """The policy file, and a log that says when which limits may have been in force.

    Args:
        root: the directory of the stage. The file counts only if root writes it.
    """

    def __init__(self, root: str) -> None:
        self._path, self._log = f"{root}/policy.ini", f"{root}/policies"
        self._past: list[dict[str, Any]] = []
        self.set({})

    def set(self, most: Mapping[int, int | None], others: Mapping[str, str] | None = None) -> None:
        """Write the policy.

        Args:
            most: uid -> how many GPUs the user may hold at once; None is no limit. Others have no limit.
            others: further keys of ``[default]``, as text.
        """
        lines = ["[default]", *(f"{key} = {value}" for key, value in (others or {}).items())]
        for uid, number in most.items():
            lines += [f"[user {uid}]", f"max_gpus = {'unlimited' if number is None else number}"]
        limits = {str(uid): number for uid, number in most.items() if number is not None}
        entry = {"from": time.monotonic(), "to": math.inf, "most": limits, "max_hold": "max_hold" in (others or {})}
        self._past = [*self._past[1 - _KEPT :], entry]
        _replace(self._log, json.dumps(self._past))
        _replace(self._path, "\n".join(lines) + "\n")
        for past in self._past[:-1]:  # it counted until the rename, at the latest
            past["to"] = min(past["to"], time.monotonic())
        _replace(self._log, json.dumps(self._past))

    def change(self, rng: random.Random, uids: tuple[int, ...]) -> None:
        """Write a random policy for these users."""
        most = {uid: rng.choice((None, 1, 2, 3, 4, 6)) for uid in uids}
        self.set(most, {key: text for key, text in _OTHERS.items() if rng.random() < 0.15})


def allowed(root: str, uid: int, since: float) -> float:
    """The most GPUs that a user was ever allowed from a moment (``time.monotonic()``) on; ``math.inf`` is no limit.

    A claim reads the policy once, at a moment that the referee does not know.
    """
    past = _since(root, since)
    return math.inf if past is None else max(_most(one, uid) for one in past)


def may_refuse(root: str, uid: int, since: float, nb_gpus: int, hold_for: float | None) -> bool:
    """Whether a policy since that moment allowed the user no such claim."""
    past = _since(root, since)
    return past is None or any(
        nb_gpus > _most(one, uid) or (one["max_hold"] and hold_for is not None and hold_for > 1.0) for one in past
    )


def _since(root: str, since: float) -> list[dict[str, Any]] | None:
    """The policies that were ever in force from then on; None if that is too long ago."""
    try:
        past: list[dict[str, Any]] = json.loads(Path(f"{root}/policies").read_text())
    except FileNotFoundError:
        return [{"most": {}, "max_hold": False}]
    return None if past[0]["from"] > since else [one for one in past if one["to"] >= since]


def _most(entry: Mapping[str, Any], uid: int) -> float:
    return float(entry["most"].get(str(uid), math.inf))


def _replace(path: str, text: str) -> None:
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(f"{path}.new", 0o644)
    os.rename(f"{path}.new", path)
