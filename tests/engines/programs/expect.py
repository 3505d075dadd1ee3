"""What the programs expect to go wrong; they run without pytest."""

from __future__ import annotations

from typing import Any


def raises(kind: type[BaseException], *words: str, call: Any) -> Any:
    """The error that ``call`` raises; it must be of this kind and have these words in its message."""
    caught = None
    try:
        call()
    except kind as err:
        caught = err
    assert caught is not None, f"no {kind.__name__}"
    for word in words:
        assert word in str(caught), f"{word!r} is not in: {caught}"
    return caught
