"""Locks of files: the one that a look holds for microseconds, and those around it."""
