"""Claims: how a process gets its GPUs, holds them and releases them.

``selection`` decides which GPUs are free. ``coordination`` has the entries, the doors and the queue. The way of a claim
through the files stands on one screen in CONTRIBUTING.
"""

import sys
from types import ModuleType
from typing import NoReturn


class _Room(ModuleType):
    """This module, which is ``safe_gpu.claim`` once a name in it is loaded: it says what to call instead."""

    def __call__(self, *args: object, **options: object) -> NoReturn:
        raise TypeError("safe_gpu.claim is a module: call safe_gpu.claim_gpus()")


sys.modules[__name__].__class__ = _Room
