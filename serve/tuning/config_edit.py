"""Changes of a config.pbtxt that keep its other lines, comments included."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from halfserve.files.atomic_files import atomic_file, write_and_sync
from halfserve.protos.model_config_pb2 import ModelConfig

PARAMETERS = "parameters"


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
    """Return the change of a valid config.pbtxt to a configuration: only lines with fields that differ change."""
    before = path.read_bytes().decode() if path.exists() else None
    after = _changed(before or "", wanted)
    with suppress(text_format.ParseError):
        if _parsed(after) == wanted:
            return ConfigEdit(path=path, before=before, after=after)
    # A text that is split over lines, or a field that is written with its default, needs the whole file in another form.
    return ConfigEdit(path=path, before=before, after=text_format.MessageToString(wanted))


def _changed(text: str, wanted: ModelConfig) -> str:
    """Replace the fields and the elements of `parameters` that differ from `wanted`, and append the missing ones."""
    old, missing = _parsed(text), _copied(wanted)
    result = ""
    for lines in _chunks(text):
        entry, new = _parsed(lines), ModelConfig()
        for field, _ in entry.ListFields():
            if field.name != PARAMETERS:
                is_same = getattr(old, field.name) == getattr(wanted, field.name)
                new.MergeFrom(_only(entry if is_same else missing, field.name))
                missing.ClearField(field.name)
        for key in entry.parameters:
            if key in missing.parameters:
                new.parameters[key].CopyFrom(missing.parameters[key])
                del missing.parameters[key]
        result += lines if entry == new else text_format.MessageToString(new)
    appended = text_format.MessageToString(missing)
    return result + ("\n" if appended and result and not result.endswith("\n") else "") + appended


def _chunks(text: str) -> Iterator[str]:
    """Yield the text by as few lines at a time as are whole fields, or comments."""
    lines = ""
    for line in text.splitlines(keepends=True):
        lines += line
        with suppress(text_format.ParseError):
            _parsed(lines)
            yield lines
            lines = ""


def _only(config: ModelConfig, name: str) -> ModelConfig:
    """Return one field of a configuration."""
    result = _copied(config)
    for field, _ in config.ListFields():
        if field.name != name:
            result.ClearField(field.name)
    return result


def _copied(config: ModelConfig) -> ModelConfig:
    result = ModelConfig()
    result.CopyFrom(config)
    return result


def _parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())
