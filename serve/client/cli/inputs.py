"""Tensors given on the command line.

`--input x=FILE.npy`, `x=FILE.npz`, `x=FILE.json`, `x=[1, 2, 3]`, `x=@FILE` (raw bytes), `x=-` (standard input); and for several
inputs at once `FILE.npz`, `FILE.json` or `-`.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.protos.datatypes import Datatype
from halfserve.protos.inference_pb2 import ModelMetadataResponse
from halfserve.serve.client.array_conversion import Array, as_input, converted, datatype_named, fits
from halfserve.serve.client.errors import InvalidRequest

STDIN = "-"
NUMPY_MAGIC, ZIP_MAGIC = b"\x93NUMPY", b"PK\x03\x04"
ARRAY_FILES = (".npy", ".npz", ".json")
FORMS = "NAME=FILE.npy, NAME=FILE.npz, NAME=FILE.json, NAME=@FILE, NAME=JSON, NAME=-, FILE.npz, FILE.json or -"


class InputArgumentError(ValueError):
    """An --input or another option that cannot be read; the text names it and the expected form."""


@dataclass(frozen=True, eq=False)
class RawBytes:
    """The raw bytes of a tensor, or of one BYTES element, from a file."""

    source: str  # the file, for error texts
    content: bytes  # its bytes


def read_tensors(argument: str, path: str) -> dict[str, Any]:
    """Read named tensors; the tensor of a .npy file, or of JSON that is not an object, has the name "".

    The format of standard input, the path "-", is detected from its first bytes.

    Raises InputArgumentError: there is no such file, or it is in none of the formats; the text has `argument`, the --input.
    """
    content = _content(argument, path)
    if path.endswith(".json") or (path == STDIN and not content.startswith((NUMPY_MAGIC, ZIP_MAGIC))):
        where = f"--input {argument}: {'standard input' if path == STDIN else path}"
        return tensors_of_json(parsed_json(content, where), where)
    return _from_numpy(argument, path, content)


def tensors_of_json(value: Any, where: str) -> dict[str, Any]:
    """Named tensors of a JSON value: {name: values}, the protocol's {"inputs": [{"name", "data"}]}, or values alone.
    Raises InputArgumentError: an entry of "inputs" has no name or no data.
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
    """Parse JSON. Raises InputArgumentError: the text is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputArgumentError(f"{where}: as JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeDecodeError:
        raise InputArgumentError(f"{where}: expected JSON in UTF-8") from None
    except (ValueError, RecursionError):
        raise InputArgumentError(f"{where}: as JSON: a number has too many digits, or lists are nested too deeply") from None


def _shaped(entry: dict[str, Any], where: str) -> Any:
    """Return the data of an entry, which the protocol's JSON may give as a flat list with a shape."""
    data, shape = entry["data"], entry.get("shape")
    if shape is None or not isinstance(data, list) or any(isinstance(element, list) for element in data):
        return data
    try:
        # dtype=object keeps the numbers unchanged until the model's datatype is known.
        return np.array(data, dtype=object).reshape(shape).tolist()
    except (ValueError, TypeError):
        raise InputArgumentError(f"{where}: input {entry['name']!r} has {len(data)} values for the shape {shape}") from None


def _content(argument: str, path: str) -> bytes:
    if path == STDIN:
        return sys.stdin.buffer.read()
    if not Path(path).is_file():
        raise InputArgumentError(f"--input {argument}: there is no file {path}")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputArgumentError(f"--input {argument}: {path} cannot be read: {error.strerror}") from None


def _from_numpy(argument: str, path: str, content: bytes) -> dict[str, Array]:
    try:
        # Loading a pickle would run its code.
        loaded = np.load(io.BytesIO(content), allow_pickle=False)
        return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except Exception as error:  # noqa: BLE001  (numpy evaluates a header as Python source and allocates the size in it)
        reason = "it is no such file, or holds Python objects" if "pickle" in str(error) else error
        raise InputArgumentError(f"--input {argument}: {path} cannot be read as numpy arrays: {reason}") from None


def read_inputs(arguments: Sequence[str]) -> dict[str, Any]:
    """Read every --input: name -> array from a file, bytes of a file, or Python value of a JSON literal.
    Raises InputArgumentError: a file is missing or malformed, the text is not JSON, or a name is given twice.
    """
    if sum(_reads_stdin(argument) for argument in arguments) > 1:
        raise InputArgumentError("--input -: standard input can be read once; give all its tensors as one .npz or JSON object")
    inputs: dict[str, Any] = {}
    for argument in arguments:
        for name, value in _read(argument).items():
            if name in inputs:
                raise InputArgumentError(f"--input {name}: given twice")
            inputs[name] = value
    return inputs


def fitted_inputs(inputs: Mapping[str, Any], metadata: ModelMetadataResponse) -> tuple[dict[str, Array], list[str]]:
    """Convert the inputs to the model's datatypes, and add the batch dimension where only that is missing.

    Returns name -> array to send, and one line for each change made to an input. Raises InvalidRequest: a name is unknown,
    values do not fit the datatype, or the shape does not fit the model.
    """
    tensors = {tensor.name: tensor for tensor in metadata.inputs}
    fitted: dict[str, Array] = {}
    notes: list[str] = []
    for name, value in inputs.items():
        if name not in tensors:
            raise InvalidRequest(f"model {metadata.name!r} has no input {name!r}; its inputs are: {', '.join(tensors)}")
        datatype, where = datatype_named(tensors[name].datatype), f"input {name!r} of model {metadata.name!r}"
        if isinstance(value, RawBytes):
            fitted[name] = _from_bytes(value, datatype, tensors[name].shape, where)
            continue
        try:
            array = as_input(value, datatype, where)
        except InvalidRequest:
            array = converted(value, datatype, where)
            notes.append(f"{name}: converted from {np.asarray(value).dtype} to {datatype.wire}")
        fitted[name] = _with_batch_dimension(array, tensors[name].shape, where)
        if fitted[name].ndim > array.ndim:
            notes.append(f"{name}: added the batch dimension, {list(array.shape)} is sent as {list(fitted[name].shape)}")
    return fitted, notes


def _reads_stdin(argument: str) -> bool:
    return argument == STDIN or argument.partition("=")[2] in (STDIN, f"@{STDIN}")


def _read(argument: str) -> dict[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals and (argument == STDIN or argument.endswith((".npz", ".json"))):
        tensors = read_tensors(argument, argument)
        if "" in tensors:
            raise InputArgumentError(f"--input {argument}: holds a tensor without a name; give NAME={argument}")
        return tensors
    if not equals or not name:
        raise InputArgumentError(f"--input {argument}: expected {FORMS}")
    if text.startswith("@"):
        return {name: RawBytes(text[1:], _content(argument, text[1:]))}
    if text != STDIN and not text.endswith(ARRAY_FILES):
        return {name: _literal(argument, text)}
    tensors = read_tensors(argument, text)
    if name in tensors:
        return {name: tensors[name]}
    if len(tensors) != 1:
        raise InputArgumentError(
            f"--input {argument}: the file holds {', '.join(tensors) or 'nothing'}, expected an array {name}"
        )
    return {name: next(iter(tensors.values()))}


def _literal(argument: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        trouble = f"{error.msg} at {error.pos}"
    except (ValueError, RecursionError):
        trouble = "a number has too many digits, or lists are nested too deeply"
    raise InputArgumentError(
        f"--input {argument:.80}: expected a .npy, .npz or .json file, @FILE, - or JSON like [1, 2.5]; as JSON: {trouble}"
    )


def _from_bytes(raw: RawBytes, datatype: Datatype, shape: Sequence[int], where: str) -> Array:
    """Return an array in the model's shape: one element of BYTES, or as many rows of numbers as the bytes make."""
    if datatype.itemsize is None:
        element = np.empty((), object)
        element[()] = raw.content
        return element.reshape([1] * len(shape))
    # BF16 is read as bit patterns.
    array = np.frombuffer(raw.content, datatype.numpy or "<u2") if not len(raw.content) % datatype.itemsize else None
    unknown = sum(size == -1 for size in shape)
    row_bytes = math.prod(size for size in shape if size != -1) * datatype.itemsize
    if unknown > 1:
        raise InvalidRequest(f"{where} has the shape {list(shape)} with {unknown} unknown sizes; give a .npy file, not bytes")
    if array is None or len(raw.content) % row_bytes or (not unknown and len(raw.content) != row_bytes):
        several = "a multiple of " if unknown else ""
        raise InvalidRequest(
            f"{where}: {raw.source} has {len(raw.content)} bytes, expected {several}{row_bytes} "
            f"for {datatype.wire} {list(shape)}"
        )
    return array.reshape(tuple(shape))


def _with_batch_dimension(array: Array, shape: Sequence[int], where: str) -> Array:
    if fits(array.shape, shape):
        return array
    if shape and shape[0] in (-1, 1) and fits(array.shape, shape[1:]):
        return array[np.newaxis]
    raise InvalidRequest(f"{where} has the shape {list(array.shape)}, expected {list(shape)} (-1: any size)")
