"""The token in ``SAFE_GPU_SCOPE``, and the names by which claims inside a claim find it."""

from ..host import procfs
from .socket_names import OUTER, scope_of


def token_with_namespace(secret: str, namespace: int | None) -> str:
    """Return a token that says in which network namespace the names of its claim are; 0 is none.

    >>> token_with_namespace("0123456789abcdef", 4026531840)
    '0123456789abcdef@4026531840'
    """
    return secret if namespace is None else f"{secret}@{namespace}"


def has_names_here(token: str) -> bool:
    """Return whether the names of the claim with this token are those that this process can see."""
    namespace = token.partition("@")[2]
    return not namespace or namespace == str(procfs.network_namespace())


def scope_name(outer: str, token: str, inode: int) -> str:
    """Return the name that says which claim has the name ``outer``, whose socket has this inode.

    >>> scope_name("GPU-a3f1c07e52d98b16.outer...........", "0123456789abcdef", 12345)
    'GPU-a3f1c07e52d98b16.42632906f2613e45'
    """
    return scope_of("", f"{token}:{inode}", outer.rstrip(".").removesuffix(OUTER))
