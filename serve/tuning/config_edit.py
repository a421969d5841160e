"""Changes of a config.pbtxt that keep its other fields as they are written, comments included."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from halfserve.files.atomic_files import atomic_file, write_and_sync
from halfserve.protos.model_config_pb2 import ModelConfig

PARAMETERS = "parameters"
_TOKEN = re.compile(
    r"(?P<space>(?:\s|#[^\n]*|[,;])+)"
    r"|(?P<text>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<sign>[{}<>\[\]:])"
    r"|(?P<word>[^\s#\"'{}<>\[\],;:]+)"
)


@dataclass(frozen=True, kw_only=True)
class ConfigEdit:
    """New text for a config.pbtxt."""

    path: Path
    before: str | None  # its present text; None if there is no file
    after: str

    @property
    def diff(self) -> str:
        """A unified diff; empty if nothing changes."""
        old, new = (self.before or "").splitlines(keepends=True), self.after.splitlines(keepends=True)
        name = str(self.path)
        lines = difflib.unified_diff(old, new, "/dev/null" if self.before is None else name, name)
        return "".join(line if line.endswith("\n") else line + "\n" for line in lines)

    def write(self) -> Path | None:
        """Replace the file; return the path of the copy of the earlier one, which is beside it, or None if there was none.

        Raises:
            OSError: the file or its copy cannot be written; the file stays as it was.
        """
        backup = None
        if self.path.exists():
            names = (self.path.with_name(f"{self.path.name}.bak{number or ''}") for number in itertools.count())
            backup = next(name for name in names if not name.exists())
            write_and_sync(backup, self.path.read_bytes())
        with atomic_file(self.path) as file:
            file.write(self.after.encode())
        return backup


def edited(path: Path, wanted: ModelConfig) -> ConfigEdit:
    """Return the change of a valid config.pbtxt to a configuration: only fields that differ are written in another way."""
    before = path.read_bytes().decode() if path.exists() else None
    after = _changed(before or "", wanted)
    if _parsed(after) != wanted:
        after = text_format.MessageToString(wanted)
    return ConfigEdit(path=path, before=before, after=after)


def _changed(text: str, wanted: ModelConfig) -> str:
    """Replace the fields, and the elements of `parameters`, that are not as wanted; append those that are missing."""
    old, missing = _parsed(text), ModelConfig()
    missing.CopyFrom(wanted)
    result, done = "", 0
    for name, start, end in _spans(text):
        result += text[done:start]
        done = end
        new = ModelConfig()
        if name == PARAMETERS:
            entry = _parsed(text[start:end])
            for key in entry.parameters:
                if key in missing.parameters:
                    new.parameters[key].CopyFrom(missing.parameters[key])
                    del missing.parameters[key]
            is_kept = entry == new
        else:
            is_kept = getattr(old, name) == getattr(wanted, name)
            if not is_kept:
                new.MergeFrom(_only(missing, name))
            missing.ClearField(name)
        piece = text[start:end] if is_kept else text_format.MessageToString(new).strip()
        result += piece
        if not piece and text[end : end + 1] == "\n":
            done += 1
    result += text[done:]
    appended = text_format.MessageToString(missing)
    return result + ("\n" if appended and result and not result.endswith("\n") else "") + appended


def _only(config: ModelConfig, name: str) -> ModelConfig:
    """Return one field of a configuration."""
    result = ModelConfig()
    result.CopyFrom(config)
    for field, _ in config.ListFields():
        if field.name != name:
            result.ClearField(field.name)
    return result


def _parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def _spans(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, start and end of each entry on the top level; ends at what is not understood."""
    depth, name, start, end = 0, "", 0, 0
    is_value = False  # whether the last token was, or ended, a value
    for token in _TOKEN.finditer(text):
        kind, word = token.lastgroup, token[0]
        if kind == "space":
            continue
        if depth == 0 and is_value and kind != "text":  # adjacent texts are one value
            yield name, start, end
            name, is_value = "", False
        if word in ("{", "<", "["):
            depth += 1
        elif word in ("}", ">", "]"):
            depth -= 1
            is_value = depth == 0
        elif depth == 0 and not name:
            name, start = word, token.start()
        elif depth == 0 and word != ":":
            is_value = True
        end = token.end()
    if is_value:
        yield name, start, end
