"""Claim GPUs safely on shared hosts."""

__version__ = "3.0.0"
