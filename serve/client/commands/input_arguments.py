"""Tensors given on the command line.

`--input x=FILE.npy`, `x=FILE.npz`, `x=FILE.json`, `x=[1, 2, 3]`, `x=@FILE` (bytes as they are), `x=-` (standard input); and for
several inputs at once `FILE.npz`, `FILE.json` or `-`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from serve.client.checks import fits
from serve.client.commands.input_files import ARRAY_FILES, STDIN, InputArgumentError, RawBytes, read_raw, read_tensors
from serve.client.errors import InvalidRequest
from serve.client.values.tensors import Array, as_input, converted, datatype_named

if TYPE_CHECKING:
    from protos.datatypes import Datatype
    from protos.inference_pb2 import ModelMetadataResponse

__all__ = ["InputArgumentError", "fitted_inputs", "read_inputs"]

FORMS = "NAME=FILE.npy, NAME=FILE.npz, NAME=FILE.json, NAME=@FILE, NAME=JSON, NAME=-, FILE.npz, FILE.json or -"


def read_inputs(arguments: Sequence[str]) -> dict[str, Any]:
    """Read every --input.

    Returns:
        name -> array from a file, bytes of a file, or what JSON made of a literal.

    Raises:
        InputArgumentError: a file is missing or is no such file, the text is not JSON, or a name is given twice.
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
    """Make the inputs what the model takes: its datatype, and its batch dimension where exactly that one is missing.

    Returns:
        name -> array to send, and a line for each change that was made to an input.

    Raises:
        InvalidRequest: unknown name, values that do not fit the datatype, or another shape than the model takes.
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
        return _all_named(argument, read_tensors(argument, argument))
    if not equals or not name:
        raise InputArgumentError(f"--input {argument}: expected {FORMS}")
    if text.startswith("@"):
        return {name: read_raw(argument, text[1:])}
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


def _all_named(argument: str, tensors: dict[str, Any]) -> dict[str, Any]:
    if "" in tensors:
        raise InputArgumentError(f"--input {argument}: holds a tensor without a name; give NAME={argument}")
    return tensors


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
    """An array in the model's shape: one element of BYTES, or as many rows of numbers as there are bytes for."""
    if datatype.itemsize is None:
        element = np.empty((), object)
        element[()] = raw.content
        return element.reshape([1] * len(shape))
    # BF16 comes as the bit patterns that it is.
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
