"""What is built and published: the manual page, and wheels and sdists of the same bytes, pinned whatever makes them."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipapp
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import api
from support.real import REQUIRED, long, unavailable

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "man_page.py"
SECTIONS = "NAME SYNOPSIS DESCRIPTION COMMANDS ENVIRONMENT FILES EXIT_STATUS EXAMPLES SEE_ALSO"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="this is not a checkout: there is no tools/ here")


@pytest.fixture
def etc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page names the files of a real host, and reads none of them."""
    monkeypatch.delenv("SAFE_GPU_TEST_ETC")
    monkeypatch.setattr(api.variables, "HOST_FILES", ("/etc/safe-gpu/config.ini", "/etc/safe-gpu/policy.ini"))


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


@pytest.fixture
def script(etc: None) -> Any:
    spec: Any = importlib.util.spec_from_file_location("man_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_sections(page: Path) -> None:
    sections = re.findall(r"^\.SH (.*)", page.read_text(), re.MULTILINE)
    assert [name.replace(" ", "_") for name in sections] == SECTIONS.split()


@pytest.mark.parametrize("name", api.commands.COMMANDS)
def test_every_option_of_a_command(terms: dict[str, list[str]], name: str) -> None:
    shown = [*terms[name], *(terms["run"] if name == "wait" else [])]
    explained = {word for term in shown for word in re.findall(r"--?[a-z][-a-z]*", term)}
    hidden = {"-h", "--help", "--pending", *(["--mode"] if name in api.commands.RUNNERS else [])}
    assert set(api.commands.parser_of(name).names()) - hidden <= explained


def test_every_variable_and_exit_code(terms: dict[str, list[str]]) -> None:
    assert set(terms["ENVIRONMENT"]) == {*api.variables.VARIABLES, "CUDA_VISIBLE_DEVICES"}
    codes = {str(value) for name, value in vars(api.commands).items() if name.startswith("EX_")}
    assert codes | {"0", "1", "2", "126", "127", "255"} == set(terms["EXIT STATUS"])  # and the shell's and ssh's


def test_day_and_terminal_change_nothing(script: Any, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert script.page() == page.read_text()


def test_no_line_is_taken_for_a_request(script: Any) -> None:
    assert script.prose(".hidden files and 'quoted' ones") == "\\&.hidden files and 'quoted' ones"
    assert script.prose("x " * 38 + "y .so /etc/passwd").splitlines()[1].startswith("\\&.so")
    assert script.code(".so -x ~/a\\b") == "\\&.so \\-x \\(ti/a\\eb"


def test_mandoc_finds_nothing_to_blame(page: Path) -> None:
    if shutil.which("mandoc") is None:
        unavailable("needs mandoc, to look for mistakes in the page")
    done = subprocess.run(["mandoc", "-T", "lint", str(page)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_hook_leaves_nothing_behind(script: Any, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_build_by_another_python_than_cpython_is_refused_by_one_sentence(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``pip install .`` prints that sentence."""
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    hook = script.get_metadata_hook()()
    hook.update({})
    monkeypatch.setattr(sys.implementation, "name", "pypy")
    with pytest.raises(SystemExit, match="safe_gpu needs CPython: install it with the pip of CPython's python3"):
        hook.update({})


# Programs in one file

ENGINES = {"engines", "engines.claim", "engines.connection", "engines.dragon", "engines.holder", "engines.ray"}


def test_what_packs_programs_finds_every_module_of_the_command(tmp_path: Path) -> None:
    """It looks for import statements, as PyInstaller does. Engines are imported by their users."""
    program = tmp_path / "program.py"
    program.write_text("import safe_gpu.__main__\n")
    finder = ModuleFinder(path=[str(ROOT)])
    finder.run_script(str(program))
    modules = set()
    for path in (ROOT / "safe_gpu").rglob("*.py"):
        parts = path.relative_to(ROOT / "safe_gpu").with_suffix("").parts
        modules.add(".".join(parts).removesuffix("__init__").removesuffix("."))
    found = {name.removeprefix("safe_gpu").removeprefix(".") for name in finder.modules}
    assert modules - found == {"safe_gpu", *ENGINES}


@long
def test_a_zipapp_has_the_scripts_of_shells_and_the_page(tmp_path: Path, run_here: Any) -> None:
    shutil.copytree(ROOT / "safe_gpu", tmp_path / "app" / "safe_gpu", ignore=shutil.ignore_patterns("__pycache__"))
    archive = tmp_path / "safe-gpu.pyz"
    zipapp.create_archive(tmp_path / "app", archive, main="safe_gpu.__main__:main")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, archive, *words], capture_output=True, text=True, timeout=60)

    for shell in api.SHELLS:
        assert run("completion", shell).stdout == run_here("completion", shell).stdout
    assert "</html>" in run("status", "--html").stdout
    assert run("--mem").returncode == 2


# Every build of one tree has the same bytes, by way of the sdist too, and an index accepts it

PARTS = "safe_gpu tests tools .github .gitignore pyproject.toml README.md CHANGELOG.md LICENSE".split()
TOOLS = ROOT / ".github" / "build-tools.txt"


@pytest.mark.timeout(300)
@pytest.mark.skipif(not REQUIRED, reason="needs SAFE_GPU_REQUIRE_REAL=1: pip downloads the builder")
def test_two_builds_have_one_hash(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}

    def run(*command: str | Path, umask: int = 0o022) -> None:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=variables, umask=umask, timeout=280, **streams)
        assert done.returncode == 0, done.stdout

    python = tmp_path / "builder" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "builder")
    run(python, "-m", "pip", "install", "-q", "--require-hashes", "-r", TOOLS)
    run(python, "-m", "pip", "install", "-q", "twine")
    hashes = []
    # The first wheel is built from the sdist, the second from the tree.
    for name, umask, kinds in (("one", 0o022, []), ("other", 0o077, ["--sdist", "--wheel"])):
        tree, built = tmp_path / name, tmp_path / f"{name}-built"
        tree.mkdir()
        run("cp", "-r", *PARTS, tree, umask=umask)
        run(python, "-m", "build", "-n", *kinds, "--outdir", built, tree, umask=umask)
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in built.iterdir()})
    assert sorted(Path(name).suffix for name in hashes[0]) == [".gz", ".whl"]
    assert hashes[0] == hashes[1]
    run(python, "-m", "twine", "check", "--strict", *sorted(built.iterdir()))


def test_whatever_runs_in_a_release_is_pinned() -> None:
    """An action by its commit, for a tag can be moved; packages by their hashes."""
    workflows = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").iterdir()}
    used = re.findall(r"uses: (.*)", "".join(workflows.values()))
    assert len(used) > 5
    assert [one for one in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    release = workflows["release.yml"]
    installed = re.findall(r"pip install (.*)", release)
    pinned = [one for one in installed if "--require-hashes" in one or "--no-deps --no-build-isolation" in one]
    assert len(installed) == len(pinned) == 3
    assert not re.search(r"\b(curl|wget|npx|pipx|uv)\b", release)
    assert re.findall(r"-m build (\S+)", release) == ["-n", "-n"], "the build downloads nothing either"
    for name in re.findall(r"-r (\S+\.txt)", release):
        lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
        assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", line)] == []
