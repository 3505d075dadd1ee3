"""Environment variables and root's file: those that would quietly cost safety are refused or warned of; what the lines
of the file mean, which sections apply to whom, and which files count."""

import ast
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import try_claim

import safe_gpu
from safe_gpu import PolicyError

ROOT = Path(safe_gpu.__file__).parent


def test_every_variable_that_is_read_is_known() -> None:
    """Any text in the source that is a name of ours, whole, and any that stands in a sentence."""
    texts = [
        node.value
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    named = {name for text in texts for name in re.findall(r"\bSAFE_GPU_[A-Z_]*[A-Z]\b(?!_?\*)", text)}
    assert "SAFE_GPU_DIR" in named
    assert {name for name in named if not name.startswith("SAFE_GPU_TEST")} <= set(api.variables.VARIABLES)


@pytest.mark.parametrize(("name", "meant"), [("safe_gpu_dirr", "SAFE_GPU_DIR"), ("SAFE_GPU_XYZZY", "")])
def test_a_variable_that_nobody_reads(name: str, meant: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    names = frozenset({*api.variables.VARIABLES, "SAFE_GPU_TEST_X", "PATH", name})
    assert api.variables.unknown(names) == {name: meant}
    assert [api.variables.doubts({known: ""}) for known in api.variables.VARIABLES] == [[]] * len(
        api.variables.VARIABLES
    )
    monkeypatch.setenv(name, "1")
    with safe_gpu.claim_gpus(1, timeout=0):
        pass
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith(f"{name} is not a variable of safe_gpu and has no effect")
    assert (f"did you mean {meant}?" in record.getMessage()) == bool(meant)


CHOICES = [(variable.name, variable.words) for variable in api.VARIABLES.values() if variable.words]


@pytest.mark.parametrize(("name", "words"), CHOICES)
def test_a_word_that_is_not_understood(name: str, words: tuple[str, ...], monkeypatch, dgx) -> None:
    for word in ("", *words):
        api.variables.check({name: word})
    for word in ("off", "Ignore", "0"):
        monkeypatch.setenv(name, word)
        match = f"{name}={word} is unknown: set it to .*{words[-1]}"
        with pytest.raises(api.UnsatisfiableRequestError, match=match) as caught:
            safe_gpu.claim_gpus(1, timeout=0)
        assert caught.value.value == word
    assert dgx.claimed() == []


def test_a_state_directory_is_named_by_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for value, path in (("", "/tmp/safe-gpu"), ("/x//y/", "/x/y")):
        monkeypatch.setenv("SAFE_GPU_DIR", value)
        assert api.state_dir_path() == path
    monkeypatch.setenv("SAFE_GPU_DIR", "~/state")
    for claim in (lambda: safe_gpu.claim_gpus(1, timeout=0), safe_gpu.get_free_gpus, api.state_dir_path):
        with pytest.raises(api.StateDirError, match=r"SAFE_GPU_DIR=~/state is relative.* absolute path"):
            claim()
    assert list(tmp_path.iterdir()) == []


# A simulated driver where there is a real one


@pytest.fixture
def real_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that stands for the kernel driver's."""
    monkeypatch.delenv("SAFE_GPU_TEST_SIMULATED")
    monkeypatch.setattr(api.variables, "REAL_DRIVERS", {str(tmp_path / "version"): "NVIDIA"})
    (tmp_path / "version").write_text("NVRM version: 550.54.15\n")
    return tmp_path / "version"


def test_simulated_gpus_beside_real_ones_are_warned_of_every_time(real_driver: Path, caplog) -> None:
    simulated = {"SAFE_GPU_DRIVER": "simulated:dgx-a100"}
    for _ in range(2):
        assert try_claim(1) == (0,)
    said = "SAFE_GPU_DRIVER=simulated:dgx-a100: these GPUs are simulated, and this host has a real"
    assert [record.getMessage().startswith(said) for record in caplog.records if record.levelno > 20] == [True] * 2
    assert api.variables.doubts({"SAFE_GPU_DRIVER": "nvml"}) == []
    real_driver.unlink()
    assert api.variables.doubts(simulated) == []


# Root's file


FILE = """\
; the group's rules
[default]
max_gpus = 2
max_hold: 1d12h        # a day and a half
Default_Hold = 02:00:00

[group students]
max_gpus = 1
max_wait = 90

[group staff]
max_gpus = 6
idle_report_after = 30m
weight = 2

  [user anna]
max_gpus = unlimited
max_hold = inf
[user DOM\\eva maria]
max_gpus = 0
"""


def limits(user: str, *groups: str, text: str = FILE, is_root: bool = False) -> api.Limits:
    return api.resolve(api.parse(text, "/p"), (user, "1001"), lambda group: group in groups, is_root=is_root)


def test_which_section_wins() -> None:
    for user, groups, expected in (
        ("ben", (), (2, 129600.0, 7200.0, None, None, None)),
        ("ben", ("staff", "students"), (1, 129600.0, 7200.0, 90.0, 1800.0, 2.0)),  # the first in the file, key by key
        ("anna", ("students",), (None, None, 7200.0, 90.0, None, None)),
        ("DOM\\eva maria", (), (0, 129600.0, 7200.0, None, None, None)),
    ):
        assert tuple(getattr(limits(user, *groups), key) for key in api.KEYS) == expected


def test_a_value_names_its_section_and_a_user_may_be_a_number() -> None:
    sections = {"max_gpus": "[user anna]", "max_hold": "[user anna]", "default_hold": "[default]"}
    assert limits("anna", "students").sections == sections | {"max_wait": "[group students]"}
    assert limits("ben", text="[user 1001]\nmax_gpus=3").max_gpus == 3


def test_root_is_exempt_unless_named() -> None:
    assert limits("root", "staff", is_root=True) == api.Limits("/p", exempt=True)
    named = limits("root", is_root=True, text=FILE + "[user root]\nmax_wait = 5")
    assert (named.exempt, named.max_gpus, named.max_wait) == (False, 2, 5.0)


def test_groups_are_asked_for_only_where_the_file_has_some() -> None:
    rules = api.parse("[default]\nmax_gpus=1\n[user ben]", "/p")
    assert api.resolve(rules, ("ben",), pytest.fail, is_root=False).max_gpus == 1
    assert api.resolve(api.parse("[group staff]\nmax_gpus=1", "/p"), ("root",), pytest.fail, is_root=True).exempt


def test_a_wrong_line_is_named() -> None:
    for text, line, says in (
        ("[default]\n\nmax_gpus 2", 3, "neither [section] nor key = value"),
        ("[default]\nmax_gpu = 2", 2, "did you mean max_gpus?"),
        ("[default]\nbanana = 2", 2, "'banana' is unknown: write max_gpus, max_hold"),
        ("[default]\nmax_gpus = 2\nmax_gpus = 3", 3, "set twice"),
        ("[default]\nmax_hold = 0", 2, "a second is the least"),
        ("[default", 1, "is not a section"),
    ):
        with pytest.raises(PolicyError, match=f"^/p:{line}: ") as caught:
            api.parse(text, "/p")
        assert (caught.value.path, caught.value.line, says in str(caught.value)) == ("/p", line, True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


@pytest.fixture
def write(open_tmp: Path) -> Callable[..., Path]:
    """A policy file with this text, owner and mode."""

    def make(text: str | bytes = "[default]\nmax_gpus = 3\n", uid: int = 0, mode: int = 0o644) -> Path:
        path = open_tmp / "policy.ini"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.chown(path, uid, 0)
        path.chmod(mode)
        return path

    return make


@needs_root
def test_a_file_of_root_counts(write: Any, tmp_path: Path) -> None:
    rules, ignored = api.read(str(write(b"\xef\xbb\xbf[default]\r\nmax_gpus = 3\r\n")))
    assert (ignored, rules and rules.sections[0].values) == ("", {"max_gpus": 3})
    assert api.read(str(tmp_path / "none")) == (None, "")
    with pytest.raises(PolicyError, match="longer than 64 KiB"):
        api.read(str(write("#" * 70_000)))


@needs_root
def test_links_directories_and_files_that_others_may_write_are_ignored(write: Any, tmp_path: Path) -> None:
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(write())
    os.mkfifo(fifo, 0o644)
    for place, says in (
        (link, "is a link"),
        (fifo, "not a file"),
        ({"uid": 4711}, "belongs to 4711, not to root"),
        ({"text": "nonsense", "mode": 0o664}, "can be written by others than root (mode 0664)"),
        ({"mode": 0o646}, "can be written by others"),
    ):
        rules, ignored = api.read(str(write(**place) if isinstance(place, dict) else place))
        assert (rules, says in ignored) == (None, True)


@needs_root
def test_a_file_without_a_reader_is_an_error(write: Any, as_user: Any) -> None:
    """Nothing is limited quietly because root forgot a chmod."""
    path = write(mode=0o600)

    def look(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        api.read(str(path))

    assert "ask root for a file of mode 644" in as_user(look, uid=4711).hear()


def test_groups_of_this_process_and_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process are the kernel's, those of other users the directory's."""
    rules = api.parse("[group audio]\nmax_gpus = 5\n[group 77]\nmax_gpus = 7\n[default]\nmax_gpus = 1\n", "/p")
    monkeypatch.setattr(api.config, "gid_of", {"audio": 29, "77": 77}.get)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(os, "getgroups", lambda: [77])
    assert api.limits_of_user(rules, os.geteuid()).max_gpus == 7
    monkeypatch.setattr(api.config, "gids_of", lambda uid: {29} if uid == 1000 else set())
    assert [api.limits_of_user(rules, uid).max_gpus for uid in (1000, 1001)] == [5, 1]
    assert api.limits_of_user(rules, 0) == api.Limits("/p", exempt=True)


def test_what_the_directory_says_of_root() -> None:
    assert (0 in api.config.gids_of(0), api.config.gids_of(999_999_999)) == (True, set())
    assert (api.config.gid_of("root"), api.config.gid_of("4711"), api.config.gid_of("no-such-group")) == (0, 4711, None)


@needs_root
@pytest.mark.parametrize("name", ["config.ini", "policy.ini"])
def test_a_user_cannot_lift_the_limits_of_the_host(name: str, open_tmp: Path, monkeypatch: Any, as_user: Any) -> None:
    etc = open_tmp / "etc"
    monkeypatch.setattr(api.variables, "HOST_FILES", (f"{etc}/config.ini", f"{etc}/policy.ini"))
    variables = {"SAFE_GPU_POLICY": "/nonexistent", "SAFE_GPU_DRIVER": "nvml"}
    assert api.variables.policy_file(variables) == "/nonexistent"  # this host has no policy yet
    etc.mkdir(mode=0o755)
    (etc / name).touch()
    simulated = {**variables, "SAFE_GPU_DRIVER": "simulated:dgx-a100"}

    def look(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        say(
            [
                api.variables.policy_file(variables),
                *api.variables.doubts(variables),
                api.variables.policy_file(simulated),
            ]
        )

    path = f"{etc}/{name}"
    said = [path, f"SAFE_GPU_POLICY=/nonexistent has no effect: {path} applies on this host", "/nonexistent"]
    assert as_user(look, uid=4711).hear() == str(said)
    assert api.variables.policy_file(variables) == "/nonexistent"  # root may try another one


@needs_root
def test_both_names_at_once_are_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lifted quietly because root began a new file."""
    monkeypatch.setattr(api.variables, "HOST_FILES", (f"{tmp_path}/config.ini", f"{tmp_path}/policy.ini"))
    for name in api.variables.HOST_FILES:
        Path(name).write_text("[default]\nmax_gpus = 1")
    with pytest.raises(PolicyError, match="move its sections there"):
        api.read(api.variables.policy_file({}))


@needs_root
def test_root_sets_the_defaults_of_a_host(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "state_dir = /var/lib/safe-gpu\nvendor = amd\nsge_resource = accel\nunexplained_memory = 300MiB"
    path = str(write(f"[host]\n{text}\n[default]\nmax_gpus = 3\n"))
    variables = {"SAFE_GPU_POLICY": path}
    monkeypatch.setenv("SAFE_GPU_POLICY", path)
    monkeypatch.delenv("SAFE_GPU_DIR")
    assert api.state_dir_path() == "/var/lib/safe-gpu"
    assert (api.meant_vendor(variables), api.resource_names(variables)) == ("amd", ("accel",))
    assert api.Rules.of(variables).unexplained_limit == 300 << 20
    assert api.limits_of_user(api.read(path)[0] or api.config.Policy(path), os.geteuid()).exempt
    assert api.variables.doubts(variables) == []
    monkeypatch.setenv("SAFE_GPU_DIR", "/elsewhere")  # the environment still wins, and a claim says so
    assert api.state_dir_path() == "/elsewhere"
    doubts = api.variables.doubts({**variables, "SAFE_GPU_DIR": "/elsewhere"})
    told = f"SAFE_GPU_DIR=/elsewhere is used, although {path} says state_dir = /var/lib/safe-gpu: two state"
    assert told in str(doubts)


@needs_root
def test_a_wrong_setting_is_named(write: Any) -> None:
    for text, says in (
        ("state_dir = tmp", "is relative: write a path from / on"),
        ("refused_exit = 256", "is not an exit code: write 1 to 255"),
        ("max_gpus = 2", "'max_gpus' is unknown: write state_dir"),
    ):
        with pytest.raises(PolicyError, match=f":4: .*{says}"):
            api.config.host_values(str(write(f"[user anna]\nmax_gpus = nonsense\n[host]\n{text}")))


# The files of root on the machine that runs the tests


def test_no_test_goes_by_the_limits_of_this_machine(child: Callable[..., Any]) -> None:
    """Neither in this process, nor in its children, nor as another user, who is a fork of it."""
    code = "from safe_gpu.settings import variables\nsay(*variables.HOST_FILES)"
    etc = str(Path(api.variables.HOST_FILES[0]).parent)
    assert not Path(etc).exists()
    assert child(code).hear().split(" ") == [f"{etc}/config.ini", f"{etc}/policy.ini"] == list(api.variables.HOST_FILES)
    plain = child(code, env={"SAFE_GPU_TEST_ETC": ""}).hear()
    assert plain.split(" ") == ["/etc/safe-gpu/config.ini", "/etc/safe-gpu/policy.ini"]


def test_whose_limits_tests_go_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's files, for all users' claims of real GPUs."""
    own, simulated = {"SAFE_GPU_TEST_ETC": "/x"}, {"SAFE_GPU_DRIVER": "simulated:dgx-a100"}
    for variables, is_root, counts in (
        ({**own, **simulated}, False, True),
        ({**own, "SAFE_GPU_DRIVER": "nvml"}, False, False),
        ({**own, "SAFE_GPU_DRIVER": "nvml"}, True, True),
        (simulated, True, False),
    ):
        for name in ("SAFE_GPU_TEST_ETC", "SAFE_GPU_DRIVER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(api.variables, "is_root", lambda is_root=is_root: is_root)
        assert api.variables.directory_of_root() == ("/x" if counts else "/etc/safe-gpu")
