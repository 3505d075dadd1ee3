"""Clients of one protocol, two in C and this package, on one simulated host; all become ``job.c``."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support import api
from support.processes import PACKAGE_ROOT
from support.real import REQUIRED, unavailable
from support.state import write_for_all

HERE = Path(__file__).parent
PRESET = "dgx-a100"
PATIENCE = 40.0  # only a hang takes that long

# Those that run everywhere; ``.ci/run`` asks for all.
SHORT = (
    "test_each_sees_what_the_other_holds",
    "test_both_share_a_gpu",
    "test_a_claim_inside_a_claim",
    "test_the_client_is_a_program_of_its_own",
)

SHORT_FILES = ("test_hostile_files.py", "test_example.py")

# One option of the clients in C is two of ``safe-gpu run``.
OPTIONS = {
    "now": {"c": ("-t", "0"), "python": ("--timeout", "0")},
    "a minute": {"c": ("-f", "60"), "python": ("--for", "1m")},
    "an hour": {"c": ("-f", "3600"), "python": ("--for", "1h")},
    "10 GiB": {"c": ("-s", str(10 << 30)), "python": ("--share", "10GiB")},
    "60 GiB": {"c": ("-s", str(60 << 30)), "python": ("--share", "60GiB")},
    "around": {"c": ("-i",), "python": ()},  # claims inside it
}

# Read before the guard around every test takes it away.
SEED = os.environ.get("SAFE_GPU_TEST_SEED", "")


# The programs of the two clients in C.
PROGRAMS = {"c": "complete/for_tests.c", "minimal": "client.c"}

# How the sources are changed before they are compiled: what they say, and what they say instead.
ALWAYS = {
    # The example knows no simulated hosts, so it is told where their doors are.
    "client.c": {'"safe-gpu/1/%s%s", uuid, tail': '"safe-gpu/1/%s%s%s", getenv("DOORS_OF_SIMULATED_HOST"), uuid, tail'}
}

# Builds that are broken on purpose.
BROKEN = {
    "complete/for_tests.c": {
        "no second listing": {
            "  list(&claims);\n  remove_dead(&claims);\n": "",
            "  renameat(d->fd,": "  nap(0.01, 0.01);\n  renameat(d->fd,",  # it takes its time to name its entry
        },
        "not locked": {"!fcntl(fd, F_OFD_SETLK, &lock)": "true"},
        "no doors": {"if (without_doors) return true;": "return true;"},
        "no part of the GPU": {"if (gpu->is_piece && !take_part_of_pieces(gpu)) return false;": ""},
        "no queue": {"bool is_first = !nearest_ahead(&count);": "bool is_first = nearest_ahead(&count) || true;"},
    },
    "client.c": {
        "no second listing": {
            "{ /* 4 and 5, when host.lock has been given back */\n  list_claims();\n": "{\n",
            "  renameat(d->fd,": "  nap(10000, 10001);\n  renameat(d->fd,",
        },
        "no host.lock": {"flock(host_lock, LOCK_EX | LOCK_NB)": "false"},
        "not locked": {"  if (fcntl(d->own, F_OFD_SETLK, &lock)) err(": "  if (lock.l_len) err("},
        "no doors": {
            "  int whole = take_door(gpu->uuid, -1);\n": "  int whole = socket(AF_UNIX, SOCK_DGRAM, 0);\n",
            "  bits held = held_parts(gpu->uuid);\n": "  bits held = 0;\n",
        },
        # A driver that shows a stranger on every GPU from the second poll of an attempt on.
        "a driver": {
            "static void poll_driver(void) {}": "static void poll_driver(void) {\n"
            '  for (int i = 0; i < gpu_count; i++) gpus[i].is_busy = claims.own >= 0 && getenv("STRANGER");\n}'
        },
    },
}


def changed(text: str, source: str, broken: str) -> str:
    """Return all sources of a program as they are compiled."""
    changes = dict(ALWAYS.get(source, {}))
    if broken:
        changes |= BROKEN[source][broken]
    for said, instead in changes.items():
        assert text.count(said) == 1, f"the client does not say {said!r} once"
        text = text.replace(said, instead)
    return text


@pytest.fixture(scope="session")
def build() -> Iterator[Callable[..., str]]:
    """``build("job.c")`` compiles it, once, where other users can run it too.

    ``build("client.c", "no doors")`` compiles a client that is broken as in BROKEN.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang") or unavailable("needs a C compiler")
    with tempfile.TemporaryDirectory(prefix="safe-gpu-client-") as directory:
        os.chmod(directory, 0o755)

        @functools.cache
        def compiled(source: str, broken: str) -> str:
            name = f"{source} {broken}".strip().replace(" ", "-").replace("/", "-")
            path = f"{directory}/{name}"
            words = [compiler, "-std=c11", "-O0", "-o", path, "-x", "c", "-"]
            text = changed(whole_source(HERE / source), source, broken)
            subprocess.run(words, input=text, text=True, check=True, timeout=120)
            os.chmod(path, 0o755)
            return path

        yield lambda source, broken="": compiled(source, broken)


def whole_source(path: Path) -> str:
    """A source with those of the client that it includes."""
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        if line.startswith('#include "'):
            line = whole_source(path.with_name(line.split('"')[1]))
        lines.append(line)
    return "".join(lines)


def spelling(gpu: api.Gpu) -> str:
    """A device as the C client takes it: ``UUID``, ``UUID=GPU``, ``UUID@GPU`` or ``UUID@GPU+MODE``."""
    if not gpu.is_piece:
        return gpu.uuid if gpu.whole == gpu.uuid else f"{gpu.uuid}={gpu.whole}"
    return f"{gpu.uuid}@{gpu.whole}" + (f"+{gpu.mode}" if gpu.mode else "")


class Party:
    """A process that claims and becomes a job.

    Args:
        kind: of the complete client in C ("c"), of the example ("minimal"), or of ``safe-gpu run`` ("python").
    """

    def __init__(self, kind: str, size: int, command: Sequence[str], env: Mapping[str, str], **options: Any) -> None:
        self.kind, self.size = kind, size
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=env, start_new_session=True, **streams, **options)
        self.pid = self.process.pid

    def __repr__(self) -> str:
        return f"{self.kind} {self.pid} for {self.size}"

    def end(self, how: int = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.wait(PATIENCE)

    def close(self) -> None:
        """End it with its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()

    def finish(self) -> tuple[int, str, str]:
        """Exit status, output and errors of one that ends by itself."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out.decode(), err.decode()


class Scene:
    """A simulated host, the referee's markers and log, and those who claim there."""

    def __init__(self, directory: Path, build: Callable[..., str], preset: str = PRESET) -> None:
        self.directory, self.build, self.required = directory, build, REQUIRED
        self.preset = preset
        self.parties: list[Party] = []
        seed = int(SEED or random.randrange(10**6))
        self.random = random.Random(seed)
        print(f"SAFE_GPU_TEST_SEED={seed} repeats this choice")
        host = api.find_preset(preset).gpus
        self.uuids = [gpu.uuid for gpu in host]
        self.capacity = api.share_capacity(host[0])
        self.state_dir = directory / "state"
        self.markers = directory / "markers"
        self.tree = directory / "hosts" / preset
        self.log = directory / "log"
        for path in (self.markers, self.tree.parent, self.tree):
            path.mkdir()
            path.chmod(0o1777)
        self.markers.chmod(0o777)  # not sticky: a job removes the markers of other users' dead ones
        write_for_all(self.log, "")
        self.env = {
            **os.environ,
            "PYTHONPATH": str(PACKAGE_ROOT),
            "SAFE_GPU_DIR": str(self.state_dir),
            "SAFE_GPU_SIMULATED_DIR": str(self.tree.parent),
            "SAFE_GPU_DRIVER": f"simulated:{preset}",
            "SAFE_GPU_LEGACY_LOCK": "never",
            "DOORS_OF_SIMULATED_HOST": api.doors.uuid_prefix(str(self.tree.parent)),
        }

    def words(self, kind: str, size: int, *options: str, broken: str = "", only: Sequence[api.Gpu] = ()) -> list[str]:
        """The command line of a client, up to the command that it becomes.

        Args:
            options: of OPTIONS; broken: how the C client is broken; only: the devices to choose from, if not all.
        """
        spelling_of = "python" if kind == "python" else "c"
        spelt = [word for option in options for word in OPTIONS[option][spelling_of]]
        if kind in PROGRAMS:
            names = ",".join(map(spelling, only) if only else self.uuids)
            listed = ("-n", str(size), "-g", names, "-m", str(self.capacity))
            return [self.build(PROGRAMS[kind], broken), *spelt, *listed]
        run = [sys.executable, "-m", "safe_gpu", "run", "--affinity", "none", "--visible-as", "uuid", "-q"]
        if only:
            run += ["--only", ",".join(gpu.uuid for gpu in only)]
        return [*run, "-n", str(size), *spelt, "--"]

    def ends(self, kind: str, size: int, *options: str, **more: Any) -> int:
        """The exit status of a client whose command does nothing."""
        return self.start(kind, size, *options, command=["true"], **more).finish()[0]

    def job(self, seconds: float = -1) -> list[str]:
        """The referee's job, which stays that long; -1: until it is killed."""
        return [self.build("job.c"), str(self.markers), str(self.tree), str(self.log), str(seconds)]

    def start(
        self,
        kind: str,
        size: int,
        *options: str,
        command: Sequence[str] = (),
        seconds: float = -1,
        broken: str = "",
        only: Sequence[api.Gpu] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        **process: Any,
    ) -> Party:
        """Start a client that claims ``size`` GPUs and becomes ``command``, or the referee's job."""
        words = [*self.words(kind, size, *options, broken=broken, only=only), *(command or self.job(seconds))]
        self.parties.append(Party(kind, size, words, {**self.env, **env}, **process))
        return self.parties[-1]

    def make_state_dir(self, state_dir: Path | None = None) -> None:
        """Make the state directory, which the example does not."""
        assert self.ends("c", 1, env={"SAFE_GPU_DIR": str(state_dir or self.state_dir)}) == 0

    def said(self, word: str) -> list[list[str]]:
        """What stands behind this word in the log, line by line."""
        lines = (line.split(" ") for line in self.log.read_text().splitlines())
        return [line[1:] for line in lines if line[0] == word]

    def served(self) -> list[int]:
        """Who has got GPUs, in order."""
        return [int(pid) for pid, _ in self.said("holds")]

    def entries(self, name: str, state_dir: Path | None = None) -> list[api.Entry]:
        """Living claims ("claims") or waiters ("queue"), by their numbers."""
        try:
            with api.Directory(str(state_dir or self.state_dir), name, make=False) as directory:
                return api.Entries(directory).look()
        except FileNotFoundError:
            return []

    def tickets(self, state_dir: Path | None = None) -> list[int]:
        """The pids of those who wait, by their numbers."""
        return [ticket.pid for ticket in self.entries("queue", state_dir)]

    def until(self, condition: Callable[[], bool], *parties: Party) -> None:
        """Wait for it. A party that ends meanwhile fails the test with what it said."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            for party in parties:
                if party.process.poll() is not None and not condition():
                    raise AssertionError(f"{party} ended: {party.finish()}")
            assert time.monotonic() < deadline, f"{self.log.read_text()}\nqueue: {self.tickets()}"
            time.sleep(0.005)

    def until_holds(self, party: Party) -> Party:
        self.until(lambda: party.pid in self.served(), party)
        return party

    def stranger(self, uuid: str) -> Party:
        """A job that has taken a GPU without a claim."""
        self.parties.append(Party("stranger", 1, self.job(), {**self.env, "CUDA_VISIBLE_DEVICES": uuid}))
        return self.until_holds(self.parties[-1])

    def until_waits(self, party: Party) -> Party:
        self.until(lambda: party.pid in self.tickets(), party)
        return party

    def status(self) -> list[dict[str, Any]]:
        """What ``safe-gpu status --json`` says of the GPUs."""
        words = [sys.executable, "-m", "safe_gpu", "status", "--json"]
        done = subprocess.run(words, env=self.env, capture_output=True, check=True, timeout=PATIENCE)
        return list(json.loads(done.stdout)["gpus"])

    def all_can_be_claimed(self) -> None:
        """By each client in turn, without waiting."""
        for kind in ("minimal", "c", "python"):
            assert self.ends(kind, len(self.uuids), "now") == 0

    def close(self) -> None:
        for party in self.parties:
            party.close()


@pytest.fixture
def scene_of(build: Callable[..., str]) -> Iterator[Callable[[str], Scene]]:
    """``scene_of("max1550")``: that simulated host."""
    with ExitStack() as stack:

        def make(preset: str) -> Scene:
            path = stack.enter_context(tempfile.TemporaryDirectory(prefix="safe-gpu-protocol-"))
            os.chmod(path, 0o1777)
            scene = Scene(Path(path), build, preset)
            stack.callback(scene.close)
            return scene

        yield make


@pytest.fixture
def scene(build: Callable[..., str], request: pytest.FixtureRequest) -> Iterator[Scene]:
    if not REQUIRED and request.function.__name__ not in SHORT and request.path.name not in SHORT_FILES:
        pytest.skip("needs SAFE_GPU_REQUIRE_REAL=1, as it takes long")
    with tempfile.TemporaryDirectory(prefix="safe-gpu-protocol-") as path:
        os.chmod(path, 0o1777)
        scene = Scene(Path(path), build)
        yield scene
        scene.close()
