"""The commands of administrators: no new claims on a GPU with ``drain`` and ``resume``, ``policy``, and ``setup``."""

import json
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.claims import claim as made

from safe_gpu import NotEnoughGpusError, SafeGpuError, get_free_gpus

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who drains GPUs and whose file a policy must be")


@pytest.fixture
def etc(open_tmp: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the host's settings, which does not exist yet."""
    monkeypatch.setenv("SAFE_GPU_POLICY", str(open_tmp / "etc" / "config.ini"))
    return open_tmp / "etc"


def claim(**options: Any) -> list[int]:
    with made(**options) as owner:
        return owner.devices_taken


def test_claims_take_others_and_holders_go_on(etc: Path, run_here: Any, command: Any, dgx: Any) -> None:
    holder = command.start("run", "--", "sh", "-c", "echo up; exec sleep 600")
    assert holder.stdout.readline() == "up\n"
    first, second = run_here("drain", "0-3", "--reason", "a fan is\nbroken").stderr.splitlines()
    assert first == "safe-gpu: GPU 0: drained by root: a fan is broken; claimed by root until that claim ends"
    assert second == "safe-gpu: GPU 1-3: drained by root: a fan is broken"
    assert claim() == [4]
    assert get_free_gpus() == ["4", "5", "6", "7"]
    with pytest.raises(NotEnoughGpusError, match="drained by root: a fan is broken"):
        claim(only="1-3")
    shown = json.loads(run_here("status", "--json").stdout)["gpus"]
    assert [one["state"] for one in shown] == ["claimed"] + ["unusable"] * 3 + ["free"] * 4
    assert "drained by root: a fan is broken" in shown[0]["reason"]
    (etc / "config.ini").touch()
    waiter = command.start("run", "--only", "1-3", "--", "sh", "-c", "echo got $CUDA_VISIBLE_DEVICES")
    assert "for 1 GPU (0 of 3 free); GPU 1-3: drained by root: a fan is broken" in waiter.stderr.readline()
    assert run_here("resume", "2").returncode == 0
    assert waiter.communicate(timeout=60)[0] == "got 2\n"
    assert run_here("resume").returncode == 0
    assert (api.drained_gpus(), holder.poll()) == ({}, None)


def test_no_further_share_of_a_drained_gpu(etc: Path, run_here: Any, command: Any) -> None:
    command.start("run", "--share", "10GiB", "--", "sh", "-c", "echo up; exec sleep 600").stdout.readline()
    assert claim(share="10GiB", only=0) == [0]
    run_here("drain", "0")
    with pytest.raises(NotEnoughGpusError, match="drained by root"):
        claim(share="10GiB", only=0)
    assert claim(share="10GiB") == [1]


def test_instances_of_a_drained_gpu(etc: Path, run_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mig-h100")
    free = get_free_gpus()
    drained = next(label.partition(":")[0] for label in free if ":" in label)
    run_here("drain", drained)
    assert get_free_gpus() == [label for label in free if label.partition(":")[0] != drained]


# For a time

ANNA, BEN = 4711, 4712


def outcome_as(as_user: Any, uid: int, work: Callable[[], object]) -> str:
    def say_outcome(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        try:
            text = str(work())
        except SafeGpuError as err:
            text = f"{type(err).__name__}: {err}"
        say(text.replace("\n", " "))

    return str(as_user(say_outcome, uid=uid).hear())


def test_before_a_drain_begins_only_claims_that_end_in_time_enter(etc: Path, run_here: Any, as_user: Any) -> None:
    claim()  # makes the state directory
    said = run_here("drain", "0-6", "--from", "+2h", "--until", "+1h", "--reason", "new\nfans").stderr
    assert re.fullmatch("safe-gpu: GPU 0-6: reserved by root from .*: new fans\n", said)
    for hold_for, got in ((None, "[7]"), ("1h", "[0]"), ("3h", "[7]"), ("unknown", "[7]")):
        assert outcome_as(as_user, BEN, lambda hold_for=hold_for: claim(hold_for=hold_for)) == got
    for policy, got in (("default_hold = 1h", "[0]"), ("max_hold = 90m", "[0]"), ("default_hold = 3h", "[7]")):
        (etc / "config.ini").write_text(f"[default]\n{policy}\n")
        assert outcome_as(as_user, BEN, claim) == got
    refused = outcome_as(as_user, BEN, lambda: claim(only="0-6", hold_for="3h"))
    assert re.match("NotEnoughGpusError.*reserved by root from .*new fans.*shorter --for", refused)
    assert claim(hold_for="3h") == [0]  # root's


def test_during_a_reservation_only_its_users_can_claim(etc: Path, run_here: Any, as_user: Any, dgx: Any) -> None:
    claim()
    run_here("drain", "--until", "+1h", "--for-group", str(ANNA), "--reason", "course")
    assert outcome_as(as_user, ANNA, lambda: claim(hold_for="5h")) == "[0]"
    refused = outcome_as(as_user, BEN, lambda: claim(hold_for="1s"))
    assert (f"reserved by root for group {ANNA} from" in refused, "shorter --for" in refused) == (True, False)
    assert (outcome_as(as_user, BEN, get_free_gpus), len(get_free_gpus())) == ("[]", 8)
    assert run_here("resume", "3", "--reservation", "course").returncode == 0
    assert outcome_as(as_user, BEN, claim) == "[3]"


def test_a_waiter_whose_gpus_are_reserved_keeps_no_others(etc: Path, run_here: Any, as_user: Any, dgx: Any) -> None:
    claim()
    run_here("drain", "0", "--until", "+1h", "--for-user", str(ANNA))

    def wait(say: Callable[[object], None], listen: Callable[[], str]) -> None:
        api.wait_for_gpus(1, only=0, on_wait=lambda status: say("waits"))

    assert as_user(wait, uid=BEN).hear() == "waits"
    assert outcome_as(as_user, ANNA, lambda: claim(only=0)) == "[0]"
    shown = json.loads(run_here("status", "--json").stdout)
    assert round(shown["queue"][0]["expected_start"] - time.time(), -3) == 4000
    assert [(one["for"], one["by"], one["gpus"]) for one in shown["windows"]] == [
        (f"user:{ANNA}", "root", [dgx.uuids[0]])
    ]
    assert f"GPU 0: reserved by root for user {ANNA} from " in run_here("status").stdout
    assert "reserved by root" in outcome_as(as_user, BEN, api.closed_now)


def test_running_claims_that_overlap_are_told(etc: Path, run_here: Any, dgx: Any) -> None:
    dgx.hold(1, until=time.time() + 7200)
    dgx.hold(2, until=time.time() + 60)
    dgx.hold(3)
    lines = run_here("drain", "0-4", "--from", "+1h", "--until", "+1h").stderr.splitlines()
    assert [line.partition("GPU ")[2][0] for line in lines] == ["0", "1", "3"]
    assert ", whose claim is to end at " in lines[1]
    assert ", whose claim has not said when it ends" in lines[2]


@pytest.mark.parametrize(
    "words",
    [
        "--from +1h", "--for-user root", "--until yesterday", "--until +900d", "--until +1h --wait",
        "--until +1h --for-user no-such-user", "--until +1h --for-group root --for-user root",
        "--timeout 5", "--until +1h --timeout 5",
    ],
)  # fmt: skip
def test_what_makes_no_window(etc: Path, run_here: Any, words: str) -> None:
    assert run_here("drain", "0", *words.split()).returncode == 2
    assert not etc.exists()


def test_the_owner_of_the_state_directory(etc: Path, state_dir: Path, run_here: Any, as_user: Any, dgx: Any) -> None:
    def anna(*words: str) -> str:
        return outcome_as(as_user, ANNA, lambda: api.main([*words]))

    claim()  # makes it
    assert anna("drain", "3") == anna("drain", "3", "--until", "+1h") == "78"
    os.chown(state_dir, ANNA, ANNA)
    assert anna("drain", "2", "--until", "+1h") == anna("drain", "3") == "0"
    assert api.drained_gpus() == {dgx.uuids[3]: "drained by 4711"}
    assert "reserved by 4711 from" in outcome_as(as_user, BEN, lambda: claim(only=2))
    assert api.main(["drain", "3"]) == 0  # root's word comes first
    assert anna("resume") == "0"
    assert api.drained_gpus() == {dgx.uuids[3]: "drained by root"}
    assert "reserved by 4711 from" in outcome_as(as_user, BEN, lambda: claim(only=2))
    assert "(only 4711 can cancel that)" in run_here("resume", "2").stderr
    begin = (state_dir / "closed").read_text().split()[1]
    assert anna("resume", "--reservation", time.strftime("%Y-%m-%d %H:%M", time.localtime(int(begin)))) == "0"
    assert outcome_as(as_user, BEN, lambda: claim(only=2)) == "[2]"


@pytest.mark.parametrize("in_etc", [True, False], ids=["root's", "the owner's"])
@pytest.mark.parametrize(
    ("uid", "text", "why"),
    [(BEN, "{} 1 4e9 -\n", "belongs to "), (0, "{} a fan\n", "has a line that closes no GPU, and is ignored")],
    ids=["of another user", "with a line of an older build"],
)
def test_what_is_ignored_is_told(
    etc: Path, state_dir: Path, run_here: Any, as_user: Any, dgx: Any, uid: int, text: str, why: str, in_etc: bool
) -> None:
    claim()
    etc.mkdir()
    file = (etc if in_etc else state_dir) / "closed"
    file.write_text(text.replace("{}", dgx.uuids[0]))
    file.chmod(0o644)
    os.chown(file, uid, uid)
    assert outcome_as(as_user, ANNA, claim) == "[0]"
    for look in ("status", "doctor"):
        said = " ".join(run_here(look).stdout.split())
        assert all(words in said for words in (f"{file} ", why, "ignored"))
    assert run_here("drain", "0", "--until", "+1h").returncode == 0
    if in_etc:
        assert outcome_as(as_user, ANNA, claim) == "[1]"


def test_a_full_file_takes_no_more(etc: Path, run_here: Any, dgx: Any) -> None:
    """But what is over makes room."""
    etc.mkdir()
    lines = [f"{dgx.uuids[0]} {number} 4e9 - {'a' * 900}\n" for number in range(66)]
    (etc / "closed").write_text("".join([*lines, f"{dgx.uuids[0]} 1 2 - {'a' * 600}\n"]))
    assert run_here("drain", "1", "--until", "+1h", "--reason", "a" * 600).returncode == 0
    kept = (etc / "closed").read_text()
    assert "safe-gpu resume" in run_here("drain", "1", "--reason", "a" * 6000).stderr
    assert (etc / "closed").read_text() == kept


def test_a_drain_and_windows_of_one_gpu_are_kept_beside_each_other(etc: Path, run_here: Any, dgx: Any) -> None:
    run_here("drain", "0-1", "--until", "+1h", "--for-user", str(ANNA))
    run_here("drain", "1", "--reason", "a fan")
    run_here("drain", "1", "--until", "+2h")
    lines = (etc / "closed").read_text().splitlines()
    assert lines[0] == f"{dgx.uuids[1]} - - - a fan"
    assert [line.split()[0] for line in lines[1:]] == [dgx.uuids[number] for number in (0, 1, 1)]
    run_here("resume", "1")
    assert (etc / "closed").read_text().splitlines() == lines[1:]
    assert "this host has no GPU 9" in run_here("resume", "9").stderr


# What a reservation is called when it is cancelled


def test_resume_ends_a_drain_says_what_stays_reserved_and_how_that_is_cancelled(
    etc: Path, run_here: Any, as_user: Any, dgx: Any
) -> None:
    claim()
    run_here("drain", "0-3", "--from", "+5h", "--until", "+1h", "--for-user", str(ANNA), "--reason", "practical course")
    run_here("drain", "3", "--reason", "a fan")
    said = run_here("resume", "3").stderr.splitlines()
    assert said[0] == "safe-gpu: GPU 3: can be claimed"
    assert f"GPU 3: still reserved by root for user {ANNA} from " in said[1]
    assert api.drained_gpus() == {}
    way_out = re.search(r"\(to cancel that: safe-gpu (.*)\)", said[1])
    assert way_out is not None
    assert "GPU 3: no longer reserved by root" in run_here(*shlex.split(way_out[1])).stderr
    assert {uuid for window in api.all_windows() for uuid in window.gpus} == {*dgx.uuids[:3]}
    assert "to cancel that: safe-gpu resume --reservation 'practical course')" in run_here("resume").stderr
    assert "GPU 0-2: no longer reserved by root" in run_here("resume", "--reservation", str(ANNA)).stderr
    assert (etc / "closed").read_text() == ""


def test_who_resumes_what_is_reserved_now_is_not_told_that_it_can_be_claimed(
    etc: Path, run_here: Any, dgx: Any
) -> None:
    claim()
    run_here("drain", "5", "--until", "+1h")
    free, not_drained, reserved = run_here("resume").stderr.splitlines()
    assert free == "safe-gpu: GPU 0-4,6,7: can be claimed"
    assert not_drained == "safe-gpu: GPU 5: not drained"
    assert "GPU 5: still reserved by root from " in reserved


def test_a_name_of_several_reservations_or_of_none_cancels_nothing(etc: Path, run_here: Any, dgx: Any) -> None:
    etc.mkdir()
    first, second = 4_000_000_000, 4_000_604_800
    lines = [f"{dgx.uuids[gpu]} {begin} {begin + 3600} - course" for gpu, begin in ((0, first), (0, second), (1, 1))]
    lines.append(f"{dgx.uuids[1]} {second} {second + 7200} - course")
    (etc / "closed").write_text("".join(f"{line}\n" for line in lines))
    several = run_here("resume", "--reservation", "course")
    assert (several.returncode, "3 reservations are called 'course': name one by its" in several.stderr) == (2, True)
    beginning = time.strftime("%Y-%m-%d %H:%M", time.localtime(second))
    assert run_here("resume", "--reservation", beginning).returncode == 2
    none = run_here("resume", "1", "--reservation", "curse")
    told = f"no reservation 'curse' of these GPUs: there is '{time.strftime('%Y-%m-%d %H:%M', time.localtime(first))}'"
    assert (none.returncode, told in none.stderr) == (2, True)
    assert len((etc / "closed").read_text().splitlines()) == 4
    assert run_here("resume", "0", "--reservation", beginning).returncode == 0
    assert (etc / "closed").read_text().splitlines() == [lines[0], lines[3]]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("3 broken fan", "broken fan"), ("3 4 fan 2 is broken", "fan 2 is broken"),
        ("0-7 a new kernel --timeout 0 --wait", "a new kernel"),
    ],
)  # fmt: skip
def test_words_after_the_gpus_are_the_reason(etc: Path, run_here: Any, dgx: Any, words: str, reason: str) -> None:
    assert run_here("drain", *words.split()).returncode == 0
    assert set(api.drained_gpus().values()) == {f"drained by root: {reason}"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("broken fan", "write safe-gpu drain --reason 'broken fan'"), ("3 until 18:00", "did you mean --until 18:00?"),
        ("3 4,x", "4,x"), ("gpu9", "gpu9"), ("3 fan --reason dust", "are two reasons: write one"),
    ],
)  # fmt: skip
def test_words_that_may_mean_something_else_drain_nothing(etc: Path, run_here: Any, words: str, told: str) -> None:
    done = run_here("drain", *words.split())
    assert (done.returncode, told in done.stderr) == (2, True)
    assert not etc.exists()


def test_nothing_is_written_where_nothing_was_closed(etc: Path, run_here: Any) -> None:
    assert run_here("resume").returncode == 0
    assert not etc.exists()


def test_a_group_whose_name_has_a_blank_is_written_as_its_number(
    etc: Path, run_here: Any, dgx: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blank ends a field of the file."""
    gid_of = api.config.gid_of
    monkeypatch.setattr(api.config, "gid_of", lambda name: BEN if name == "domain users" else gid_of(name))
    run_here("drain", "0", "--until", "+1h", "--for-group", "domain users")
    assert (etc / "closed").read_text().split()[3:] == [f"group:{BEN}"]


# Until nobody holds them


def test_wait_ends_when_nobody_holds_or_uses_them(etc: Path, run_here: Any, command: Any, dgx: Any) -> None:
    """The claim's process ends, and a child that it leaves behind goes on with its GPU."""
    holder = command.start("run", "--", "sh", "-c", "sleep 600 & echo $!; wait")
    orphan = int(holder.stdout.readline())
    try:
        drain = command.start("drain", "0-1", "--wait")
        assert "GPU 0: drained by root; claimed by" in drain.stderr.readline()
        holder.kill()
        holder.wait()
        assert run_here("drain", "0-1", "--wait", "--timeout", "0").returncode == 75
        assert drain.poll() is None
    finally:
        os.kill(orphan, 9)
    assert drain.wait(timeout=60) == 0
    assert run_here("drain", "--wait", "--timeout", "0").returncode == 0


def test_a_process_without_a_claim_is_waited_for(etc: Path, run_here: Any, dgx: Any) -> None:
    dgx.occupy(0)
    assert run_here("drain", "--wait", "--timeout", "0").returncode == 75
    assert "GPU 0 still in use" in run_here("drain", "0", "--wait", "--timeout", "0").stderr
    assert run_here("drain", "1-7", "--wait", "--timeout", "0").returncode == 0


@pytest.mark.parametrize("line", ["{} - - -", "{} 1 4e9 -"])
def test_what_is_closed_while_a_claim_comes_to_the_lock(
    etc: Path, state_dir: Path, as_user: Any, dgx: Any, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """The last look is made under host.lock, so that a GPU is nobody's once it was seen free after a drain."""
    claim()
    os.chown(state_dir, BEN, BEN)
    unoccupied = api.HostView.unoccupied

    def judge_and_close(view: api.HostView) -> Any:
        found = unoccupied(view)
        (state_dir / "closed").write_text("".join(f"{line.format(uuid)}\n" for uuid in dgx.uuids))
        return found

    monkeypatch.setattr(api.HostView, "unoccupied", judge_and_close)
    assert outcome_as(as_user, BEN, claim).startswith("NotEnoughGpusError")


# What applies to the user who asks, as a table and for programs

TEXT = """\
[default]
max_gpus = 4
max_hold = 1d
[group root]
max_wait = 90
[user root]
max_gpus = 2
"""


@pytest.fixture
def path(rules: Any) -> Path:
    return rules(TEXT)


def test_policy_shows_each_value_and_its_section(path: Path, run_here: Any) -> None:
    with made():
        done = run_here("policy")
    assert done.stdout.splitlines() == [
        f"{path}, for root",
        "",
        "max_gpus          2            [user root]",
        "max_hold          1 d          [default]",
        "default_hold      unset",
        "max_wait          90 s         [group root]",
        "idle_report_after unset",
        "weight            unset",
        "",
        "You hold 1 of your 2 GPUs.",
    ]
    assert json.loads(run_here("policy", "--json").stdout) == {
        "schema": 1, "file": str(path), "user": "root", "uid": 0, "exempt": False, "held": 0,
        "max_gpus": 2, "max_hold": 86400.0, "max_wait": 90.0,
        **dict.fromkeys(("default_hold", "idle_report_after", "weight")),
        "sections": {"max_gpus": "[user root]", "max_hold": "[default]", "max_wait": "[group root]"},
    }  # fmt: skip


def test_policy_says_why_nothing_is_limited(path: Path, run_here: Any) -> None:
    path.write_text("[default]\nmax_gpus = 1")
    assert run_here("policy").stdout.startswith("root is exempt: ")
    path.chmod(0o666)
    ignored = run_here("policy")
    assert (ignored.stdout, "mode 0666" in ignored.stderr) == (f"{path} is ignored: nothing is limited\n", True)
    path.unlink()
    assert run_here("policy").stdout == f"there is no {path}: nothing is limited\n"


def test_policy_of_another_user(path: Path, run_here: Any) -> None:
    path.write_text("[default]\nmax_gpus = 4\n[user daemon]\nmax_gpus = 1")
    lines = run_here("policy", "--user", "1").stdout.splitlines()
    assert (lines[0], lines[-1]) == (f"{path}, for daemon", "daemon holds 0 of 1 GPU.")
    assert "max_gpus          1            [user daemon]" in lines
    assert "there is no such user here" in run_here("policy", "--user", "nobody-of-that-name").stderr


def test_policy_of_all_users(path: Path, run_here: Any) -> None:
    path.write_text("[user root]\nmax_gpus = 2\n[user daemon]\nmax_gpus = 3\n[group students-of-nobody]\nmax_gpus = 1")
    with made(2):
        path.write_text(path.read_text().replace("max_gpus = 2", "max_gpus = 1"))  # lowered meanwhile
        done = run_here("policy", "--all")
        mine = run_here("policy").stdout.splitlines()[-1]
        users = json.loads(run_here("policy", "--all", "--json").stdout)["users"]
    assert done.stdout.splitlines() == ["daemon            0 of 3", "root              2 of 1  above the limit"]
    assert "[group students-of-nobody]: there is no such group here" in done.stderr
    assert mine == "You hold 2 of your 1 GPU. The limit has been lowered: no claim ends, and new ones wait."
    assert users[1] == {"user": "root", "held": 2, "max_gpus": 1}


def test_a_draft_of_a_policy_is_checked(path: Path, run_here: Any, tmp_path: Path) -> None:
    draft = tmp_path / "draft.ini"
    draft.write_text("[user nobody-of-that-name]\nmax_gpus = 1")
    draft.chmod(0o644)
    done = run_here("policy", "--check", str(draft))
    assert (done.returncode, done.stdout) == (0, f"{draft} is valid\n")
    assert "[user nobody-of-that-name]: there is no such user here" in done.stderr
    draft.write_text("[default]\nmax_gpus = many")
    done = run_here("policy", "--check", str(draft))
    assert (done.returncode, f"{draft}:2: max_gpus = many" in done.stderr) == (78, True)
    draft.write_text("[default]")
    draft.chmod(0o666)
    assert run_here("policy", "--check", str(draft)).returncode == 1


# The rule of tmpfiles.d that setup writes


def test_the_rule_names_every_directory_and_file() -> None:
    assert api.rule_text("/var/lib/safe-gpu").splitlines() == [
        *(f"d /var/lib/safe-gpu{part} 1777 root root -" for part in ("", *(f"/{name}" for name in api.PARTS))),
        "f /var/lib/safe-gpu/host.lock 0666 root root -",
    ]
    assert "d /srv/100%% 1777" in api.rule_text("/srv/100%"), "tmpfiles.d(5) takes a single one for a specifier"


def test_gpus_of_two_vendors_count_apart(
    path: Path, run_here: Any, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    code = "import safe_gpu\nsafe_gpu.GPUOwner({}, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, vendor='{}')\n"
    for number, vendor in ((2, "nvidia"), (1, "amd")):
        child(code.format(number, vendor) + "say('held'); listen()", says="held")
    assert json.loads(run_here("policy", "--json").stdout)["held"] == 3
    assert run_here("policy").stdout.splitlines()[-1] == "You hold 2 of your 2 NVIDIA GPUs and 1 of your 2 AMD GPUs."
