"""The commands and programs that a document shows, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tests.ports import unused_port

ROOT = Path(__file__).parent.parent

# Blocks in another terminal: started, and left running until the next server or the last block.
SERVER = ("halfserve serve ", "halfserve triton ")
# Blocks of Python that follow each other share a process, and with it the time that imports take; nothing else.
EACH_BY_ITSELF = "import sys\nfor text in sys.argv[1:]: exec(compile(text, 'block', 'exec'), {'__name__': '__main__'})"


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks_of(document: str) -> list[Block]:
    """The fenced blocks of a document with a language, in order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [Block(language, text) for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def run_in_order(blocks: list[Block], folder: Path, port: int, *modules: Path) -> int:
    """Run the blocks of shell and Python, as their reader would who stands in `folder`.

    They can import what lies in `modules`. Servers run on this port, each until the next one or the
    last block. Fails when a block fails, or a server ends badly.

    Returns:
        How many blocks were run beside the servers.
    """
    http_port = unused_port()
    # `halfserve` and `python` of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *modules])), "COLUMNS": "120"}
    ran = 0
    with ExitStack() as servers:
        for text, command in _commands(blocks, port, http_port):
            if text.startswith(SERVER):
                servers.close()
                servers.enter_context(_serving(command, folder, environment, port, http_port))
                continue
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            ran += 1
    return ran


def _commands(blocks: list[Block], port: int, http_port: int) -> Iterator[tuple[str, list[str]]]:
    """Text, or "" for Python's, and the command."""
    chosen = [block for block in blocks if block.language in ("bash", "python")]
    for language, together in groupby(chosen, lambda block: block.language):
        texts = [_as_tested(block.text, port, http_port) for block in together]
        if language == "python":
            yield "", [sys.executable, "-c", EACH_BY_ITSELF, *texts]
            continue
        for text in texts:
            yield text, ["bash", "-euo", "pipefail", "-c", text]


def _as_tested(text: str, port: int, http_port: int) -> str:
    """The block as it stands, but on a port of the test's, and in fewer epochs; test_digits.py tries what all of them give."""
    whole = r"(?:.*\\\n)*.*"  # a command with the lines that continue it
    asks = rf"^(halfserve (?:models|infer|bench)\b{whole})$"
    text = re.sub(asks, rf"\1 --address 127.0.0.1:{port}", text, flags=re.MULTILINE)
    text = re.sub(rf"^(halfserve train\b{whole} --epochs )\d+$", r"\g<1>4", text, flags=re.MULTILINE)
    return text.replace("127.0.0.1:8001", f"127.0.0.1:{port}").replace("127.0.0.1:8000", f"127.0.0.1:{http_port}")


@contextmanager
def _serving(command: list[str], folder: Path, environment: dict[str, str], port: int, http_port: int) -> Iterator[None]:
    # exec, so that the signal at the end reaches the server and not the shell around it.
    exact = [*command[:-1], f"exec {command[-1].strip()} --grpc-port {port} --http-port {http_port} --metrics-port 0"]
    server = subprocess.Popen(exact, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        while "gRPC on" not in (line := server.stdout.readline()):
            assert line, "the server ended before it was ready"
        yield
    finally:
        server.terminate()
        server.communicate(timeout=500)
    assert server.returncode == 0
