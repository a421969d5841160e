"""What the page makes of tensors, which takes no browser."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest

MODULE = resources.files("serve.http.page").joinpath("static", "tensors.js")
WIDE = "[9007199254740993, -9223372036854775808, 18446744073709551615, 0.25]"
Run = Callable[[str], str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script that has all of the module as `tensors`, and tells what it prints."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on this machine")
    (tmp_path / "tensors.mjs").write_bytes(MODULE.read_bytes())

    def ran(script: str) -> str:
        program = tmp_path / "script.mjs"
        program.write_text(f'import * as tensors from "./tensors.mjs";\n{script}')
        return subprocess.run([node, program], capture_output=True, check=True, text=True, timeout=60).stdout.strip()

    return ran


def test_what_people_write_is_sent_as_it_is(run: Run) -> None:
    head = '{name: "x", datatype: "INT64", shape: [4]'
    body = run(f"console.log(tensors.request([{head}, data: tensors.written('{WIDE} ', 'x')}}]))")
    assert body == f'{{"inputs":[{{"name":"x","datatype":"INT64","shape":[4],"data":{WIDE}}}]}}'


def test_what_is_no_json_is_said(run: Run) -> None:
    told = run("try { tensors.written('[1', 'x') } catch (error) { console.log(error.message) }")
    assert told.startswith("input x: this is no JSON (")


def test_answers_are_read_as_they_are_where_that_can_be_told(run: Run) -> None:
    """Only newer programs say how a number was written; others round it, as they always did."""
    read = run(f"console.log(tensors.answered('{{\"data\":{WIDE}}}').data.map(String).join(' '))")
    rounded = "9007199254740992 -9223372036854776000 18446744073709552000 0.25"
    assert read in {WIDE.strip("[]").replace(",", ""), rounded}
