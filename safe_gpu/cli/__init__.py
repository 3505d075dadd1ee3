"""The command ``safe-gpu``: what was typed in, an exit code out."""

from .commands import main

__all__ = ["main"]
