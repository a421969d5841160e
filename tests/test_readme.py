"""Every command and program of the README runs, in order, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.written_blocks import ROOT, Block, blocks_of, run_in_order


def blocks() -> list[Block]:
    return blocks_of("README.md")


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in blocks()} <= {"bash", "python", "text"}


def test_the_set_up_is_the_two_make_commands() -> None:
    commands = [
        line.split("#")[0].strip() for block in blocks() if block.language == "bash" for line in block.text.splitlines()
    ]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = [command.removeprefix("make ") for command in commands if command.startswith("make ")]
    assert used == ["demo", "test"]
    assert set(used) <= set(targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_blocks_run_in_order_beside_a_users_own_modules(own_modules: Path, free_port: int) -> None:
    after_the_set_up = [block for block in blocks() if not block.text.startswith("make ")]
    assert run_in_order(after_the_set_up, own_modules, free_port) >= 5
