"""Entries that tests make themselves."""

import os

from support import api


def remove_entry(directory: api.Directory, name: str, held: api.Held) -> None:
    """Remove an entry of this process, and give it back; a forked child only closes its copy."""
    held.release(first=lambda: os.unlink(name, dir_fd=directory.fd))
