"""Each build that is broken on purpose is caught: by the race, the soak, the explorer or the crash points."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.broken import BROKEN
from support.real import long

ROOT = Path(__file__).parents[2]
RACE = "tests/race/entry_race.py --until-found --seconds 90 --host-lock off"
PIECES_RACE = "tests/race/pieces_race.py --until-found --seconds 90"
SOAK = "tools/soak.py --processes 16 --minutes 2 --seed 1"
EXPLORER = "tools/interleave.py --jobs 1"
CRASH = "tools/crash_points.py"

TWICE = "GPU 0 is booked twice"
CAUGHT = [  # build, what catches it, with these words, and what that says: one of these
    ("no second listing", RACE, "--shares --networks", "violation"),
    ("no second listing", EXPLORER, "--scene unlocked", TWICE),
    ("lower stays", EXPLORER, "--scene unlocked-again --begin 'A B C4 A8'", TWICE),
    ("names come again", RACE, "--shares --networks", "violation"),
    ("names come again", EXPLORER, "--scene unlocked-again --begin 'A B C2'", TWICE),
    ("unlink by number", EXPLORER, "--scene unlocked-dead --begin 'A6 B A7'", TWICE),
    ("not locked", RACE, "--shares --networks", "violation"),
    ("not locked", EXPLORER, "--scene apart", TWICE),
    ("locked after its name", EXPLORER, "--scene unlocked --begin A13", TWICE),
    ("flock", RACE, "--networks", "violation|ghost"),
    ("children unlock", RACE, "--orphans --networks", "violation"),
    ("children keep all", CRASH, "--operation release-forked --how exception --call close", "is held|refused"),
    ("no doors", RACE, "--directories", "violation"),
    ("no doors", SOAK, "--islands", "booked twice|company"),
    ("no doors", EXPLORER, "--scene directories-2", TWICE),
    ("no doors nor locks", RACE, "--work --networks", "violation"),
    ("no doors nor locks", SOAK, "", "booked twice"),
    ("door too early", RACE, "--inside --directories", "violation"),
    ("door too early", EXPLORER, "--scene directories-2", TWICE),
    ("parts not asked", RACE, "--shares --directories", "violation"),
    ("parts not asked", SOAK, "--shares --islands", "a share beside a whole claim"),
    ("parts not asked", EXPLORER, "--scene shares-whole-directories", TWICE),
    ("share without the door", RACE, "--shares --directories", "violation"),
    ("share without the door", SOAK, "--shares --islands", "a share beside a whole claim"),
    ("share without the door", EXPLORER, "--scene shares-whole-directories --begin A3", TWICE),
    ("doors first", EXPLORER, "--scene shares-directories-again --begin 'A A1 C B'", TWICE),
    ("parts known once", EXPLORER, "--scene shares-directories-again --begin 'A B6 A C B'", TWICE),
    ("no door of the token", EXPLORER, "--scene nested-directories --begin 'A A%3'", TWICE),
    ("one door of the token", EXPLORER, "--scene nested-directories --begin 'A A%3'", TWICE),
    ("no part of the GPU", PIECES_RACE, "--directories --vendor intel", "violation"),
    ("no part of the GPU", EXPLORER, "--scene pieces-directories-whole --begin 'A C B'", TWICE),
    ("piece asks first", EXPLORER, "--scene pieces-directories-whole --begin 'A10 C B D'", TWICE),
    ("parts of one kind", PIECES_RACE, "--directories --vendor intel --shares", "violation"),
    ("parts of one kind", EXPLORER, "--scene pieces-directories-share --begin 'A C B'", TWICE),
    ("share asks no pieces", PIECES_RACE, "--directories --vendor intel --shares", "violation"),
    ("share asks no pieces", EXPLORER, "--scene pieces-directories-share --begin 'C B D A'", TWICE),
    ("no modes", PIECES_RACE, "--vendor amd", "violation"),
    ("no modes", EXPLORER, "--scene pieces-modes --begin 'A C B'", TWICE),
    ("no modes", EXPLORER, "--scene pieces-modes-directories --begin 'A C B'", TWICE),
    ("names alone", PIECES_RACE, "--host-lock off --networks --vendor intel", "violation"),
    ("names alone", EXPLORER, "--scene pieces-apart --begin 'A C B'", TWICE),
    ("no second listing", PIECES_RACE, "--host-lock off --networks --vendor intel", "violation"),
    ("no second listing", EXPLORER, "--scene pieces-unlocked --begin 'A6 C B D'", TWICE),
    ("closed read once", EXPLORER, "--scene unlocked-drain", "which was drained and held by nobody"),
    ("directories unfinished", SOAK, "--users --cleaner", "VIOLATION"),
    ("directories unfinished", CRASH, "--operation first --how kill --call mkdir", "says nothing|says refused"),
    ("signals", CRASH, "--operation claim --how exception --call close", "descriptors are left|refused"),
    ("signals", EXPLORER, "--scene interrupt-claim --begin 'A B6 A3'", "it keeps name"),
    ("one poll", SOAK, "--seed 3", "a stranger was there before|company"),
    ("one poll", EXPLORER, "--scene older --begin A4", TWICE),
    ("no queue", SOAK, "", "waiters out of turn"),
    ("no queue", EXPLORER, "--scene queue --begin 'A B C B C B'", "before B, whose ticket is 1"),
    ("ticket stays", CRASH, "--operation wait --how exception --call clock_nanosleep", "the next claimer says nothing"),
    ("backfill", SOAK, "", "a waiter was passed"),
    ("promise", SOAK, "", "an expected start passed.*who said 4.0 s"),
    ("comes back last", EXPLORER, "--scene queue-contended --sample 5", "comes back with ticket"),
    ("comes back late", EXPLORER, "--scene queue-contended --sample 5", "has not made its ticket again"),
    ("old poll", EXPLORER, "--scene queue-stranger --begin 'A B C D C D C D C A'", "before C, whose ticket is 1"),
    ("turns", SOAK, "--order fair", "waiters out of turn"),
    ("limit", SOAK, "--policy", "a user over the limit"),
    ("limit", EXPLORER, "--scene limits --begin A", "beyond the limit"),
    ("limit of others", SOAK, "--policy", "refused within the limit"),
    ("limit of others", EXPLORER, "--scene limits --begin A", "2 could have"),
    ("limit of waiters", SOAK, "--policy", "held up by a waiter at its limit"),
    ("room", SOAK, "--shares", "more promised than there is"),
    ("room", EXPLORER, "--scene shares --begin A", "more promised than there is"),
]


@long
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users and namespaces")
@pytest.mark.parametrize(("build", "tool", "words", "says"), CAUGHT)
def test_a_broken_build_is_caught(build: str, tool: str, words: str, says: str) -> None:
    command = [sys.executable, *tool.split(), *shlex.split(words), "--break", build]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(says, done.stdout), done.stdout


def test_each_broken_build_is_among_those_that_are_caught() -> None:
    assert {build for build, *_ in CAUGHT} == BROKEN.keys()
