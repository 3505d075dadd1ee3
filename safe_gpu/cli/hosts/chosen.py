"""Which other hosts a command is about."""

import argparse
import os

from ..option_values import hosts_of_option


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose other hosts."""
    which = parser.add_argument_group("other hosts, by ssh").add_mutually_exclusive_group()
    which.add_argument("--host", type=hosts_of_option, metavar="H", help="these hosts: gpu1,gpu2")
    every = "those of SAFE_GPU_HOSTS, else of hosts in ~/.config/safe-gpu/config.ini, else of root's file"
    which.add_argument("--all-hosts", action="store_true", help=every)
    parser.add_argument("--sort", choices=("free",), help="with hosts: those with the most free GPUs first")


def chosen_hosts(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the hosts that the command is about; where none are known, a usage error."""
    if options.host:
        return tuple(options.host)
    from ...settings.other_hosts import known_hosts

    try:
        if hosts := known_hosts(os.environ):
            return hosts
    except ValueError as err:
        options.usage_error(f"SAFE_GPU_HOSTS: {err}")
    options.usage_error("which hosts? set SAFE_GPU_HOSTS=gpu1,gpu2, or hosts in ~/.config/safe-gpu/config.ini")
    return ()
