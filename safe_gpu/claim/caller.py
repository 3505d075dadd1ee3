"""What all functions that users call have in common: hints for names of arguments, and short tracebacks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

from ..errors import SafeGpuError, cause_to_show

_Function = TypeVar("_Function", bound=Callable[..., Any])


def called_by_users(*more: str) -> Callable[[_Function], _Function]:
    """Return a decorator of functions that users call, and of ``__init__`` of classes. The signature stays.

    A keyword argument that there is not is a TypeError in the name of the function, with what to write instead. An
    error of this package has one line of this package in its traceback.

    Args:
        more: the names of the arguments that the function takes by ``**``.
    """

    def decorate(function: _Function) -> _Function:
        known = (*named_arguments(function), *more)
        typed = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def called(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    raise TypeError(_why_unknown(typed, name, known))
            try:
                return function(*args, **options)
            except SafeGpuError as err:
                raise err.with_traceback(None) from cause_to_show(err)

        return called  # type: ignore[return-value]

    return decorate


def named_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments of a function that is written in Python, without ``self``."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name != "self"]


def _why_unknown(function: str, name: str, known: Collection[str]) -> str:
    from ..wording.elsewhere import instead_of

    return f"{function}() got an unexpected keyword argument {name!r}{instead_of(name, known)}"
