"""Where the files of a simulated host are.

    <tree>/<preset>/<uuid>.<pid>-<bytes>-<kind>-<number>     a process on a GPU; see ``contexts``
    <tree>/<preset>/<uuid>.bad                               a GPU that refuses contexts with the error that stands here
    <tree>/<preset>/<uuid>.ill                               a GPU against which the driver says what stands here
    <tree>/<preset>/<card>.mode                              the mode of a card, by its name in all modes; see ``cards``

The tree is ``SAFE_GPU_SIMULATED_DIR``, else ``simulated`` in the state directory. All users of a host share one
directory of mode 1777.
"""

import os
from contextlib import ExitStack, suppress

from ...coordination.directory import OPEN_DIR, SharedDirectory, refusal_of_error, replace_file, state_dir_path
from ...errors import StateDirError
from ...host.foreign_files import as_text, open_to_read
from ...host.locks import Held

_LONGEST_TEXT = 4096  # bytes


class Tree:
    """The directory of one simulated host. It is made when the first process comes.

    Args:
        preset: name of the host.
        state_dir: the tree is ``simulated`` there. None: as at the top of this module.

    Attributes:
        root: path of the tree, which is the identity of the host: processes with two state directories and one tree
            are on one host.
        path: path of the directory.

    Raises:
        StateDirError: a relative path.
    """

    def __init__(self, preset: str, state_dir: str | None) -> None:
        self._parts = (*_parts_of_root(state_dir), preset)
        self.root = os.path.join(*self._parts[:-1])
        self.path = os.path.join(*self._parts)

    def is_unused(self) -> bool:
        """Return whether nobody has used a host of this tree yet, so that there is nothing to open."""
        try:
            os.lstat(self.root)
        except FileNotFoundError:
            return True
        except OSError:
            return False  # who opens it is told the error
        return False

    def open(self) -> int:
        """Return a descriptor of the directory, to which no link leads.

        Raises:
            FileNotFoundError: it is missing. StateDirError: it cannot be opened.
        """
        try:
            fd = os.open(self._parts[0], OPEN_DIR)
            for name in self._parts[1:]:
                above = fd
                try:
                    fd = os.open(name, OPEN_DIR, dir_fd=above)
                finally:
                    os.close(above)
        except FileNotFoundError:
            raise
        except OSError as err:
            raise refusal_of_error(self.path, err) from err
        return fd

    def make(self) -> int:
        """Return the same, and make what is missing."""
        while True:
            with suppress(FileNotFoundError):
                return self.open()
            with ExitStack() as stack:
                directory = stack.enter_context(SharedDirectory(self._parts[0]))
                for name in self._parts[1:]:
                    directory = stack.enter_context(SharedDirectory(name, directory))

    def replace(self, name: str, text: str) -> None:
        """Write a file, which appears at once with all of this text.

        Raises:
            StateDirError: it cannot be written.
        """
        directory = Held(self.make())
        try:
            replace_file(directory.fd, name, text.encode())
        except OSError as err:
            raise refusal_of_error(self.path, err) from err
        finally:
            directory.release()


def text_of(name: str, directory: int) -> str:
    """Return the beginning of the text in a file of an open directory; "" if it cannot be read."""
    with suppress(OSError), open_to_read(name, os.O_NOFOLLOW, directory) as file:
        data = file.read(_LONGEST_TEXT) or b""
        return as_text(data.decode(errors="replace").strip())
    return ""


def mode_of(card: str, directory: int) -> str | None:
    """Return the mode that an open directory says for a card; None if it says none, or what is no text."""
    with suppress(OSError, ValueError), open_to_read(f"{card}.mode", os.O_NOFOLLOW, directory) as file:
        data = file.read(_LONGEST_TEXT) or b""
        return data.decode().strip()
    return None


def _parts_of_root(state_dir: str | None) -> tuple[str, ...]:
    """Return where the tree is: a directory, and what is below it."""
    if state_dir:
        return state_dir, "simulated"
    root = ""
    if state_dir is None:
        root = os.environ.get("SAFE_GPU_SIMULATED_DIR", "")
    if not root:
        return state_dir_path(), "simulated"
    if not os.path.isabs(root):
        raise StateDirError(f"SAFE_GPU_SIMULATED_DIR={root} is relative: set it to an absolute path", path=root)
    return (os.path.abspath(root),)
