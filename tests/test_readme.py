"""Every command and program of the README runs, in order, as it stands there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfserve.compiled_build import SWITCH
from tests.written_blocks import ROOT, Block, blocks_of, run_in_order


def blocks() -> list[Block]:
    return blocks_of("README.md")


def first_screen() -> list[str]:
    """The blocks before the first heading."""
    start = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    return re.findall(r"^```bash\n(.*?)^```$", start, re.MULTILINE | re.DOTALL)


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {block.language for block in blocks()} <= {"bash", "python", "text"}


def test_the_set_up_is_made_by_make() -> None:
    commands = [
        line.split("#")[0].strip() for block in blocks() if block.language == "bash" for line in block.text.splitlines()
    ]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = [command.removeprefix("make ") for command in commands if command.startswith("make ")]
    assert used == ["install", "demo", "test"]
    assert set(used) <= set(targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_first_screen_runs_word_for_word_in_a_fresh_clone(tmp_path: Path, free_port: int) -> None:
    """In two terminals; only the ports are the test's."""
    clone = tmp_path / "halfserve"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=clone, check=True)
    *first, second = first_screen()
    hidden = {"VIRTUAL_ENV", "PYTHONPATH", SWITCH}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    path = [folder for folder in environment["PATH"].split(os.pathsep) if Path(folder) != Path(sys.executable).parent]
    environment |= {"PATH": os.pathsep.join(path), "HALFSERVE_SERVE_GRPC_PORT": str(free_port)}
    environment |= {"HALFSERVE_SERVE_HTTP_PORT": "0", "HALFSERVE_SERVE_METRICS_PORT": "0"}
    environment |= {"HALFSERVE_BENCH_ADDRESS": f"127.0.0.1:{free_port}"}
    shell = ["bash", "-euo", "pipefail", "-c"]
    terminal = subprocess.Popen(
        [*shell, "\n".join(first)], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert terminal.stdout is not None
        while "gRPC on" not in (line := terminal.stdout.readline()):
            assert line, "the server ended before it was ready"
        done = subprocess.run(
            [*shell, second], cwd=clone, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
    finally:
        os.killpg(terminal.pid, signal.SIGINT)
        terminal.communicate(timeout=500)
    assert (done.returncode, terminal.returncode) == (0, 0), done.stderr
    assert "half" in done.stdout
    left = subprocess.run(["git", "ls-files", "--others", "--exclude-standard"], cwd=clone, check=True, capture_output=True)
    assert left.stdout == b"", "git ignores what the first screen writes"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_blocks_run_in_order_beside_a_users_own_modules(own_modules: Path, free_port: int) -> None:
    after_the_set_up = [block for block in blocks() if not block.text.startswith("make ")]
    assert run_in_order(after_the_set_up[len(first_screen()) - 1 :], own_modules, free_port) >= 5
