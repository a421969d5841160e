from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.long
def test_the_step_is_measured_beside_a_backend_that_does_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.python_step", "--elements", "4", "--count", "20", "--rounds", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout
    assert re.search(r"16 bytes, median: nothing \d+ us, process \d+ us; a step costs -?\d+ us more", shown)
