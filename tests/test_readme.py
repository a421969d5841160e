"""Every command and program of the README runs, in order, as it stands there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.written_blocks import ROOT, Block, blocks_of, commands_of, readers_environment

# Blocks in another terminal: started, and left running until the last block is done.
SERVER = "halfserve serve "


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


def runnable() -> Iterator[tuple[bool, list[str]]]:
    """The blocks after the set-up as (whether it is a server, command)."""
    for text, command in commands_of([block for block in blocks() if not block.text.startswith("make ")]):
        yield text.startswith(SERVER), command


def as_tested(text: str, port: int) -> str:
    """The block as it stands, but on a port of this test's, and in fewer epochs; test_digits.py tries what all of them give."""
    text = re.sub(r"^(halfserve (?:models|infer|bench)\b.*)$", rf"\1 --address 127.0.0.1:{port}", text, flags=re.MULTILINE)
    text = re.sub(r"^(halfserve train\b.* --epochs )\d+$", r"\g<1>4", text, flags=re.MULTILINE)
    return text.replace("127.0.0.1:8001", f"127.0.0.1:{port}")


@pytest.mark.timeout(300)
def test_the_blocks_run_in_order(tmp_path: Path, free_port: int) -> None:
    servers: list[subprocess.Popen[str]] = []
    ran, environment = 0, readers_environment()
    try:
        for is_server, written in runnable():
            command = [as_tested(part, free_port) for part in written]
            if is_server:
                # exec, so that the signal at the end reaches the server and not the shell around it.
                command[-1] = f"exec {command[-1].strip()} --grpc-port {free_port} --http-port 0 --metrics-port 0"
                process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
                servers.append(process)
                assert process.stdout is not None
                while "gRPC on" not in (line := process.stdout.readline()):
                    assert line, "the server ended before it was ready"
                continue
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            ran += 1
    finally:
        for process in servers:
            process.terminate()
            process.communicate(timeout=30)
    assert ran >= 5
    assert all(process.returncode == 0 for process in servers)
