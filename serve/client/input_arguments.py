"""Tensors given on the command line: `--input x=FILE.npy`, `--input x=FILE.npz`, `--input x=[1, 2, 3]`, `--input FILE.npz`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from serve.client.errors import InvalidRequest
from serve.client.tensors import Array, as_input, converted, datatype_named

if TYPE_CHECKING:
    from protos.inference_pb2 import ModelMetadataResponse

ARRAY_FILES = (".npy", ".npz")


class InputArgumentError(ValueError):
    """An --input that cannot be read; the text says which and what was expected."""


def read_inputs(arguments: Sequence[str]) -> dict[str, Any]:
    """Read every --input.

    Returns:
        name -> array from a file, or what JSON made of a literal.

    Raises:
        InputArgumentError: a file is missing or is no such file, the text is not JSON, or a name is given twice.
    """
    inputs: dict[str, Any] = {}
    for argument in arguments:
        for name, value in _read(argument).items():
            if name in inputs:
                raise InputArgumentError(f"--input {name}: given twice")
            inputs[name] = value
    return inputs


def fitted_inputs(inputs: dict[str, Any], metadata: ModelMetadataResponse) -> tuple[dict[str, Array], list[str]]:
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
        try:
            array = as_input(value, datatype, where)
        except InvalidRequest:
            array = converted(value, datatype, where)
            notes.append(f"{name}: converted from {np.asarray(value).dtype} to {datatype.wire}")
        fitted[name] = _with_batch_dimension(array, tensors[name].shape, where)
        if fitted[name].ndim > array.ndim:
            notes.append(f"{name}: added the batch dimension, {list(array.shape)} is sent as {list(fitted[name].shape)}")
    return fitted, notes


def _read(argument: str) -> dict[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals and argument.endswith(".npz"):
        return _load(argument, argument)
    if not equals or not name:
        raise InputArgumentError(f"--input {argument}: expected NAME=FILE.npy, NAME=FILE.npz, NAME=JSON or FILE.npz")
    if not text.endswith(ARRAY_FILES):
        return {name: _literal(argument, text)}
    arrays = _load(argument, text)
    if name in arrays:
        return {name: arrays[name]}
    if len(arrays) != 1:
        raise InputArgumentError(
            f"--input {argument}: the file holds {', '.join(arrays) or 'nothing'}, expected an array {name}"
        )
    return {name: next(iter(arrays.values()))}


def _literal(argument: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputArgumentError(
            f"--input {argument:.80}: expected a .npy or .npz file or JSON like [1, 2.5]; as JSON: {error.msg} at {error.pos}"
        ) from None


def _load(argument: str, path: str) -> dict[str, Array]:
    """The arrays of a file by name; the one of a .npy file has the name ""."""
    if not Path(path).is_file():
        raise InputArgumentError(f"--input {argument}: there is no file {path}")
    try:
        # Opened here, because numpy leaves a broken archive open. Pickles run code when they are read.
        with Path(path).open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except (ValueError, OSError, EOFError, BadZipFile) as error:
        reason = "it is no such file, or holds Python objects" if "pickle" in str(error) else error
        raise InputArgumentError(f"--input {argument}: {path} cannot be read as numpy arrays: {reason}") from None


def _with_batch_dimension(array: Array, shape: Sequence[int], where: str) -> Array:
    if _matches(array.shape, shape):
        return array
    if shape and shape[0] in (-1, 1) and _matches(array.shape, shape[1:]):
        return array[np.newaxis]
    raise InvalidRequest(f"{where} has the shape {list(array.shape)}, expected {list(shape)} (-1: any size)")


def _matches(given: Sequence[int], expected: Sequence[int]) -> bool:
    return len(given) == len(expected) and all(e in (-1, g) for g, e in zip(given, expected, strict=True))
