"""docs/reliability.md names a test for each fault, and commands: they exist."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
NAMED = re.findall(r"^\|.*\| (tests/\S+\.py)::(\w+) \|$", TEXT, re.MULTILINE)


def test_every_fault_names_a_test() -> None:
    faults = TEXT.partition("## Faults")[2].partition("## ")[0]
    rows = [line for line in faults.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(re.findall(r"^\|.*\| tests/\S+\.py::\w+ \|$", faults, re.MULTILINE)) >= 20


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_the_named_tests_exist(file: str) -> None:
    names = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name for named, name in NAMED if named == file} <= names


def test_the_commands_exist() -> None:
    programs = set(re.findall(r"python -m (benchmarks\.\w+)", TEXT))
    assert {"benchmarks.soak", "benchmarks.million", "benchmarks.malformed"} <= programs
    assert [program for program in programs if find_spec(program) is None] == []
