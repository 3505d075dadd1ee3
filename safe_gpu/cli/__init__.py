"""The command ``safe-gpu``: what was typed in, an exit code out."""

from .commands import main

TYPE_CHECKING = False  # importing typing takes time
if TYPE_CHECKING:
    # ``parser_of`` imports these by name. What packs programs, such as PyInstaller, looks for import statements.
    from . import completion, drain, history, inspect, job, policy, resume, setup, status  # noqa: F401

__all__ = ["main"]
