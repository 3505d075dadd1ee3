"""The command ``safe-gpu``: what was typed in, an exit code out. Nothing here decides anything about GPUs."""

from .commands import main

__all__ = ["main"]
