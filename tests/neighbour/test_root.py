"""Root with a user's environment loads nothing that the user could have put there."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from safe_gpu.drivers.nvml import LIBRARY
from safe_gpu.host.programs import is_root
from safe_gpu.runtimes import library
from safe_gpu.settings import variables as settings

NEIGHBOUR = 4711

pytestmark = pytest.mark.skipif(not is_root(), reason="needs root, to be the victim")

NVML = "from safe_gpu.drivers.nvml import why_missing; print(why_missing())"
CUDA = """
from safe_gpu.errors import NoDriverError
from safe_gpu.runtimes.cuda import CUDA
try:
    CUDA.visible_in_child()
except NoDriverError as err:
    print(err)
"""


@pytest.fixture
def planted(open_tmp: Path, build_library: Callable[..., Path]) -> Path:
    """A directory of another user with a library that leaves a file where it is loaded."""
    directory = open_tmp / "lib"
    directory.mkdir()
    source = '#include <stdlib.h>\n__attribute__((constructor)) void run(void) { system("touch $PWNED"); }\n'
    (directory / "evil.c").write_text(source)
    for name in (LIBRARY, "libcuda.so.1"):
        built = build_library(str(directory / "evil.c"), name)
        (directory / name).write_bytes(built.read_bytes())
    os.chown(directory, NEIGHBOUR, NEIGHBOUR)
    return directory


@pytest.mark.parametrize("code", [NVML, CUDA], ids=["NVML", "CUDA"])
@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (0, "{planted}"),
        (NEIGHBOUR, "{planted}"),
        (NEIGHBOUR, "{planted.parent}"),  # root's and sticky, where everybody may put a library
        (NEIGHBOUR, "{planted.parent}/down/.."),
        (NEIGHBOUR, "$ORIGIN" + "/.." * 8 + "{planted}"),  # the loader puts the program's directory there
        (NEIGHBOUR, "/$ORIGIN" + "/.." * 8 + "{planted}"),
    ],
)
def test_libraries_are_loaded_from_places_of_root_only(
    planted: Path, open_tmp: Path, child: Callable, code: str, owner: int, place: str
) -> None:
    mark = open_tmp / "pwned"
    (planted / "below").mkdir()
    (open_tmp / "down").symlink_to(planted / "below")
    os.chown(planted, owner, owner)
    for file in planted.glob("*.so*"):
        shutil.copy(file, open_tmp)
        os.chown(open_tmp / file.name, NEIGHBOUR, NEIGHBOUR)
    deep = open_tmp / "/".join("d" * 9)
    deep.mkdir(parents=True)
    environment = {"LD_LIBRARY_PATH": place.format(planted=planted), "PWNED": str(mark)}
    said = child(code, env=environment, cwd=deep).finish()
    assert mark.exists() is (owner == 0)
    assert ("not found where root may load it from" in said) is (owner != 0)


def test_the_cache_of_the_loader_is_read() -> None:
    assert any(os.path.isfile(path) for path in library._candidates("libc.so.6"))
    assert not any(os.path.isfile(path) for path in library._candidates("libnothing.so.1"))


@pytest.mark.parametrize("name", ["SAFE_GPU_DIR", "SAFE_GPU_FSROOT", "SAFE_GPU_SIMULATED_DIR"])
def test_paths_of_a_user_are_warned_of(open_tmp: Path, name: str) -> None:
    (open_tmp / "mine").mkdir()
    os.chown(open_tmp / "mine", NEIGHBOUR, NEIGHBOUR)
    for path in (open_tmp / "mine", open_tmp / "mine" / "new"):
        (doubt,) = settings.doubts({name: str(path)})
        assert doubt.startswith(f"{name}={path}: other users can change")
    assert settings.doubts({name: str(open_tmp / "new")}) == []
    assert settings.doubts({name: "/"}) == []
    (open_tmp / "new").mkdir()  # by another user, after it was found to be missing
    os.chown(open_tmp / "new", NEIGHBOUR, NEIGHBOUR)
    assert settings.doubts({name: str(open_tmp / "new")}) != []
