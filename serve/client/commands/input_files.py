"""Tensors from files and from standard input: numpy's formats, JSON, and bytes as they are."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from serve.client.values.tensors import Array

STDIN = "-"
NUMPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
ARRAY_FILES = (".npy", ".npz", ".json")


class InputArgumentError(ValueError):
    """An --input, or another option, that cannot be read; the text says which and what was expected."""


@dataclass(frozen=True, eq=False)
class RawBytes:
    """The bytes of a tensor, or of one BYTES element, as they stand in a file.

    Attributes:
        source: the file, for error texts.
        content: its bytes.
    """

    source: str
    content: bytes


def read_raw(argument: str, path: str) -> RawBytes:
    """Read a file as it is.

    Raises:
        InputArgumentError: it cannot be read.
    """
    return RawBytes(path, sys.stdin.buffer.read() if path == STDIN else _content(argument, path))


def read_tensors(argument: str, path: str) -> dict[str, Any]:
    """Read named tensors; the one of a .npy file, or of JSON that is no object, has the name "".

    Args:
        argument: the --input, for error texts.
        path: of the file; "-" for standard input, whose format is seen from its first bytes.

    Raises:
        InputArgumentError: there is no such file, or it is in none of the formats.
    """
    content = sys.stdin.buffer.read() if path == STDIN else _content(argument, path)
    if path.endswith(".json") or (path == STDIN and not content.startswith((NUMPY_MAGIC, ZIP_MAGIC))):
        return _from_json(argument, path, content)
    return _from_numpy(argument, path, content)


def tensors_of_json(value: Any, where: str) -> dict[str, Any]:
    """Named tensors of a JSON value: {name: values}, the protocol's {"inputs": [{"name", "data"}]}, or values alone.

    Raises:
        InputArgumentError: an entry of "inputs" has no name or no data.
    """
    if not isinstance(value, dict):
        return {"": value}
    entries = value.get("inputs")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return value
    tensors = {}
    for position, entry in enumerate(entries):
        if "name" not in entry or "data" not in entry:
            raise InputArgumentError(f"{where}: entry {position} of inputs lacks its name or its data")
        tensors[str(entry["name"])] = _shaped(entry, where)
    return tensors


def parsed_json(text: str | bytes, where: str) -> Any:
    """What the text says.

    Raises:
        InputArgumentError: it is no JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputArgumentError(f"{where}: as JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise InputArgumentError(f"{where}: expected JSON in UTF-8") from None
    except (ValueError, RecursionError):
        raise InputArgumentError(f"{where}: as JSON: a number has too many digits, or lists are nested too deeply") from None


def _shaped(entry: dict[str, Any], where: str) -> Any:
    """The protocol's JSON may give data flat beside a shape."""
    data, shape = entry["data"], entry.get("shape")
    if shape is None or not isinstance(data, list) or any(isinstance(element, list) for element in data):
        return data
    try:
        # Objects keep the numbers as they are until the model's datatype is known.
        return np.array(data, dtype=object).reshape(shape).tolist()
    except (ValueError, TypeError):
        raise InputArgumentError(f"{where}: input {entry['name']!r} has {len(data)} values for the shape {shape}") from None


def _from_json(argument: str, path: str, content: bytes) -> dict[str, Any]:
    where = f"--input {argument}: {'standard input' if path == STDIN else path}"
    return tensors_of_json(parsed_json(content, where), where)


def _content(argument: str, path: str) -> bytes:
    if not Path(path).is_file():
        raise InputArgumentError(f"--input {argument}: there is no file {path}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputArgumentError(f"--input {argument}: {path} cannot be read: {error.strerror}") from None


def _from_numpy(argument: str, path: str, content: bytes) -> dict[str, Array]:
    try:
        # Pickles run code when they are read.
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except Exception as error:  # noqa: BLE001  (numpy reads a header as Python's source, and has memory for what it says)
        reason = "it is no such file, or holds Python objects" if "pickle" in str(error) else error
        raise InputArgumentError(f"--input {argument}: {path} cannot be read as numpy arrays: {reason}") from None
