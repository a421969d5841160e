"""Two minutes of load, reloads, bad input and faults, as a user would start them, with little of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SOAK

ROOT = Path(__file__).parents[2]
SECONDS = 120
COMMAND = [sys.executable, "-m", "benchmarks.soak", "--seconds", str(SECONDS), "--think", "0.05", "--pause", "1", "--json"]
ACTS = (
    "reloads",
    "bad input",
    "poisoned requests",
    "vanished clients",
    "mangled messages",
    "unloaded",
    "broken loads",
    "hangs",
)


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 240)
def test_a_server_is_after_two_minutes_what_it_was() -> None:
    # Threads that spin while they wait would take the cores from the tests beside this one.
    quiet = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(COMMAND, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=SECONDS + 200, check=False)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout)
    assert said["complaints"] == []
    assert done.returncode == 0
    assert (said["wrong"], said["exit_code"]) == (0, 0)
    assert set(said["answered"]) >= {"affine", "flip", "large", "shared memory", "stream"}
    assert all(said["faults"].get(act, 0) > 0 for act in ACTS), said["faults"]


def test_the_command_is_the_one_in_the_documentation() -> None:
    shown = (ROOT / "docs" / "explanation" / "reliability.md").read_text(encoding="utf-8")
    assert " ".join(["python", *COMMAND[1:]]) in shown


@pytest.mark.long
def test_the_soak_begins_before_all_other_tests(request: pytest.FixtureRequest) -> None:
    names = [item.path.name == SOAK for item in request.session.items]
    assert names == sorted(names, reverse=True)
