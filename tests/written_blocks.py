"""The commands and programs that a document shows, as they stand there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent

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


def commands_of(blocks: list[Block]) -> Iterator[tuple[str, list[str]]]:
    """The blocks that can be run as (text, or "" for Python's, and the command)."""
    chosen = [block for block in blocks if block.language in ("bash", "python")]
    for language, together in groupby(chosen, lambda block: block.language):
        texts = [block.text for block in together]
        if language == "python":
            yield "", [sys.executable, "-c", EACH_BY_ITSELF, *texts]
            continue
        for text in texts:
            yield text, ["bash", "-euo", "pipefail", "-c", text]


def readers_environment() -> dict[str, str]:
    """Where a document's reader stands: `halfserve` and `python` of this environment on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
