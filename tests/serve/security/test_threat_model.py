"""docs/security.md names a test for each threat: they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.findall(r"^\|.*\| (tests/\S+\.py)::(\w+) \|$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)


def test_every_threat_names_a_test() -> None:
    text = (ROOT / "docs" / "security.md").read_text().partition("## Threats")[2].partition("## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(NAMED) > 30


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_the_named_tests_exist(file: str) -> None:
    names = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name for named, name in NAMED if named == file} <= names
