"""The command ``safe-gpu demo``: a race of processes for GPUs, and a referee that checks it for collisions."""

from .race import run

__all__ = ["run"]
