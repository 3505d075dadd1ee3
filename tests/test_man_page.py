"""The manual page safe-gpu(1): complete, clean, and in the environment once the package is installed."""

import importlib.util
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.real import unavailable

from safe_gpu.cli import commands
from safe_gpu.settings import variables as settings

SCRIPT = Path(__file__).parents[1] / "tools" / "man_page.py"
SECTIONS = "NAME SYNOPSIS DESCRIPTION COMMANDS ENVIRONMENT FILES EXIT_STATUS EXAMPLES SEE_ALSO"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="this is not a checkout: there is no tools/ here")


@pytest.fixture(autouse=True)
def etc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names the files of a real host, and reads none of them."""
    monkeypatch.delenv("SAFE_GPU_TEST_ETC")
    monkeypatch.setattr(settings, "HOST_FILES", ("/etc/safe-gpu/config.ini", "/etc/safe-gpu/policy.ini"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page, made as in a build: without any package beside this one."""
    path = tmp_path_factory.mktemp("man") / "safe-gpu.1"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-I", "-S", "-B", str(SCRIPT)], stdout=file, check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def terms(page: Path) -> dict[str, list[str]]:
    """Section or command -> what it explains, as it is typed."""
    found: dict[str, list[str]] = {}
    title = ""
    lines = page.read_text().replace("\\-", "-").splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith((".SH", ".SS")):
            title = line[4:]
            found[title] = []
        elif before == ".TP":
            found[title].append(re.sub(r"\\f[BIR]", "", line))
    return found


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("man_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_sections(page: Path) -> None:
    sections = re.findall(r"^\.SH (.*)", page.read_text(), re.MULTILINE)
    assert [name.replace(" ", "_") for name in sections] == SECTIONS.split()


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_option_of_a_command(terms: dict[str, list[str]], name: str) -> None:
    explained = {word for term in terms[name] for word in re.findall(r"--?[a-z][-a-z]*", term)}
    hidden = {"-h", "--help", "--pending", *(["--mode"] if name in commands.RUNNERS else [])}
    options = set(commands.parser_of(name).names()) - hidden
    as_for_run = {word for term in terms["run"] for word in re.findall(r"--?[a-z][-a-z]*", term)}
    assert options <= explained | (as_for_run if name == "wait" else set())


def test_every_variable_and_exit_code(terms: dict[str, list[str]]) -> None:
    assert set(terms["ENVIRONMENT"]) == {*settings.VARIABLES, "CUDA_VISIBLE_DEVICES"}
    codes = {str(value) for name, value in vars(commands).items() if name.startswith("EX_")}
    assert codes | {"0", "1", "2", "126", "127", "255"} == set(terms["EXIT STATUS"])  # and the shell's and ssh's


def test_day_and_terminal_change_nothing(script: ModuleType, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert script.page() == page.read_text()


def test_no_line_is_taken_for_a_request(script: ModuleType) -> None:
    assert script.prose(".hidden files and 'quoted' ones") == "\\&.hidden files and 'quoted' ones"
    assert script.prose("x " * 38 + "y .so /etc/passwd").splitlines()[1].startswith("\\&.so")
    assert script.code(".so -x ~/a\\b") == "\\&.so \\-x \\(ti/a\\eb"


def test_mandoc_finds_nothing_to_blame(page: Path) -> None:
    if shutil.which("mandoc") is None:
        unavailable("needs mandoc, to look for mistakes in the page")
    done = subprocess.run(["mandoc", "-T", "lint", str(page)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_hook_leaves_nothing_behind(script: ModuleType, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interface = SimpleNamespace(BuildHookInterface=object)
    for name in ("hatchling", "hatchling.builders", "hatchling.builders.hooks", "hatchling.builders.hooks.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)
    hook = script.get_build_hook()()
    build_data: dict[str, dict[str, str]] = {"shared_data": {}}
    hook.initialize("standard", build_data)
    ((path, where),) = build_data["shared_data"].items()
    assert where == "share/man/man1/safe-gpu.1"
    assert Path(path).read_text().splitlines()[1:] == page.read_text().splitlines()[1:]
    hook.finalize("standard", build_data, "")
    assert not Path(path).parent.exists()


def test_an_installation_has_it() -> None:
    try:
        files = metadata.files("safe-gpu") or []
    except metadata.PackageNotFoundError:
        pytest.skip("safe_gpu is not installed here")
    pages = [file for file in files if file.name == "safe-gpu.1"]
    if not pages:
        unavailable("safe_gpu was installed by an older build: pip install -e .")
    text = Path(str(pages[0].locate())).resolve().read_text()
    assert text.startswith(".TH SAFE-GPU 1 ")
    assert str(Path(str(pages[0].locate())).resolve()).endswith("/share/man/man1/safe-gpu.1")
