"""Changes of a config.pbtxt that keep its other fields as they are written, comments included."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.message import Message

from halfserve.files.atomic_files import atomic_file, write_and_sync
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.tuning import TuningError

BACKUP = ".bak"
_TOKEN = re.compile(
    r"(?P<space>(?:\s|#[^\n]*|[,;])+)"
    r"|(?P<text>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<sign>[{}<>\[\]:])"
    r"|(?P<word>[^\s#\"'{}<>\[\],;:]+)"
)


@dataclass(frozen=True, kw_only=True)
class ConfigEdit:
    """New text for a config.pbtxt.

    Attributes:
        path: the file.
        before: its present text; None if there is no file.
        after: its new text.
        loses_comments: whether the file is written in a form whose comments cannot be kept.
    """

    path: Path
    before: str | None
    after: str
    loses_comments: bool = False

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
            TuningError: the file was changed meanwhile.
            OSError: the file or its copy cannot be written; the file stays as it was.
        """
        if read_text(self.path) != self.before:
            raise TuningError(f"{self.path}: was changed during the tuning; nothing was written, compare and run it again")
        backup = None if self.before is None else _kept(self.path, self.before)
        with atomic_file(self.path) as file:
            file.write(self.after.encode())
        return backup


def read_text(path: Path) -> str | None:
    """Return the text of a file as it is; None if there is none."""
    return path.read_bytes().decode() if path.exists() else None


def edited(path: Path, before: str | None, wanted: ModelConfig) -> ConfigEdit:
    """Return the change of a valid config.pbtxt to a configuration: only what differs is written in another way."""
    text = before or ""
    after = _changed(text, wanted)
    if _parsed(after) == wanted:
        return ConfigEdit(path=path, before=before, after=after)
    return ConfigEdit(path=path, before=before, after=text_format.MessageToString(wanted), loses_comments="#" in text)


def _changed(text: str, wanted: ModelConfig) -> str:
    """Replace the entries of a text that are not wanted by those of the same field that are missing."""
    missing = list(_units(wanted))
    pieces: list[str] = []
    places: dict[str, int] = {}  # index of the piece after which the missing entries of a field belong
    done = 0
    for name, start, end in _spans(text):
        pieces.append(text[done:start])
        units = list(_units(_parsed(text[start:end]) or ModelConfig()))
        is_kept = bool(units) and all(unit in missing for unit in units)
        if is_kept:
            missing = [unit for unit in missing if unit not in units]
        else:
            places.setdefault(name, len(pieces))
        pieces.append(text[start:end] if is_kept else "")
        done = end
    rest = text[done:]
    for name in dict.fromkeys(name for name, _ in missing):
        fresh = "\n".join(entry for field, entry in missing if field == name)
        if name in places:
            pieces[places.pop(name)] = fresh
        else:
            rest += ("\n" if (rest or pieces) and not rest.endswith("\n") else "") + fresh + "\n"
    for index in places.values():  # nothing comes in place of these
        after = pieces[index + 1] if index + 1 < len(pieces) else rest
        if after.startswith("\n") and index + 1 < len(pieces):
            pieces[index + 1] = after[1:]
    return "".join(pieces) + rest


def _units(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each field, and of each element of a repeated one."""
    for field, value in config.ListFields():
        one = ModelConfig()
        if not field.is_repeated:
            one.CopyFrom(config)
            for other, _ in config.ListFields():
                if other.name != field.name:
                    one.ClearField(other.name)
            yield field.name, text_format.MessageToString(one).strip()
            continue
        for element in value:
            one.Clear()
            if not isinstance(value, Mapping):
                getattr(one, field.name).append(element)
            elif isinstance(value[element], Message):
                getattr(one, field.name)[element].CopyFrom(value[element])
            else:
                getattr(one, field.name)[element] = value[element]
            yield field.name, text_format.MessageToString(one).strip()


def _parsed(text: str) -> ModelConfig | None:
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError:
        return None


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


def _kept(path: Path, text: str) -> Path:
    """Write a copy beside a file, under the first name that is free."""
    for number in itertools.count(1):
        backup = path.with_name(f"{path.name}{BACKUP}{number if number > 1 else ''}")
        try:
            write_and_sync(backup, text.encode())
        except FileExistsError:
            continue
        return backup
    raise AssertionError
