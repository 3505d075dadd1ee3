"""A vendor's library by its file: finding it, mapping it, and calling its functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import NoDriverError, SafeGpuError
from ..host.procfs import lines_of
from .loading import load_file, open_mapped

if TYPE_CHECKING:
    import ctypes

    from typing_extensions import Self

# What CUDA and HIP answer if they see no GPU at all, and if they see none with an ordinal.
NO_GPU = 100
NO_DEVICE = 101


class CudaCallError(SafeGpuError):
    """A call of a vendor's library failed.

    Attributes:
        call: the function, "cuInit".
        code: its result, a CUresult or a hipError_t.
        name: "CUDA_ERROR_NO_DEVICE", where the library knows one.
    """

    def __init__(self, message: str = "", *, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class Calls:
    """A library with its functions by name. Every handle is passed as the C type that its header declares.

    Attributes:
        title: what messages call the library.
        names: the files to load, in this order.
        vendor, install: in messages: what it belongs to, and how to get it.
        not_initialized_codes: what it answers while it is not initialised: code -> name.
    """

    title: ClassVar[str] = "CUDA"
    names: ClassVar[Sequence[str]]
    vendor: ClassVar[str]
    install: ClassVar[str]
    not_initialized_codes: ClassVar[Mapping[int, str]] = {}

    def __init__(self, handle: ctypes.CDLL | None = None) -> None:
        self._handle = handle

    def load(self) -> Self:
        """Map the library into this process, which does not initialise it. A copy that is mapped already is used.

        Raises:
            NoDriverError: this host has none.
        """
        if self.is_mapped():
            return self
        troubles = []
        for name in self.files():
            try:
                self._handle = load_file(name)
            except OSError as err:
                troubles.append(err)
            else:
                return self
        problem = f"{self.title}'s library cannot be loaded ({troubles[0]}): {self.install}"
        raise NoDriverError(problem, driver=self.title.lower()) from troubles[0]

    def files(self) -> Sequence[str]:
        """Return the files to load, in this order."""
        return self.names

    def is_mapped(self) -> bool:
        """Return whether the library is mapped into this process."""
        if self._handle is not None:
            return True
        names = self.mapped_files()
        if not names:
            return False
        self._handle = open_mapped(names)
        return self._handle is not None

    def mapped_files(self) -> Sequence[str]:
        """Return the names under which the library may be mapped into this process, its file first; none if it is not.

        Reading the maps is faster than importing ctypes.
        """
        beginning = os.fsencode(f"/{self.names[0].partition('.so')[0]}.so")
        is_readable = False
        for line in lines_of("/proc/self/maps"):
            is_readable = True
            if beginning in line:
                path = line.rstrip(b"\n").split(None, 5)[-1]
                return (os.fsdecode(path), *self.names)
        if is_readable:
            return ()
        return self.names

    def ask(self, name: str, *arguments: Any) -> int:
        """Call a function and return its result without checking it. One with a version suffix is looked up without it
        too.

        Raises:
            CudaCallError: the library has no such function.
        """
        for symbol in (name, name.removesuffix("_v2")):
            function = getattr(self._handle, symbol, None)
            if function is not None:
                return int(function(*arguments))
        raise CudaCallError(f"{self.names[0]} has no {name}: {self.vendor} is too old", call=name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            CudaCallError: its result is not 0, or the library has no such function.
        """
        code = self.ask(name, *arguments)
        if code == 0:
            return
        if code in self.not_initialized_codes:
            title = self.not_initialized_codes[code]
            meaning = ""
        else:
            title, meaning = self.texts(code)
        function = name.removesuffix("_v2")
        message = f"{function} failed with {title} ({code})"
        if meaning:
            message += f": {meaning}"
        raise CudaCallError(message, call=function, code=code, name=title)

    def texts(self, code: int) -> tuple[str, str]:
        """Return the name of a result, and what it means, "" if the library does not say."""
        raise NotImplementedError
