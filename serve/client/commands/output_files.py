"""Outputs as files: .npz for programs that have numpy, .json for the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import numpy as np

from serve.client.commands.atomic_file import checked_output, written_whole
from serve.client.commands.display import answer_json
from serve.client.commands.input_files import InputArgumentError
from serve.client.errors import InferenceClientError
from serve.client.values.answer import InferAnswer
from serve.client.values.tensors import Array

SUFFIXES = (".npz", ".json")


def checked_output_file(path: Path) -> Path:
    """The path as it is, if outputs can be written there.

    Raises:
        InputArgumentError: its name does not end in .npz or .json.
        OSError: nothing can be written there.
    """
    if path.suffix not in SUFFIXES:
        raise InputArgumentError(f"--output-file {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    return checked_output(path, "--output-file")


def write_answer(path: Path, answer: InferAnswer) -> None:
    """Write the outputs; the file is there whole or not at all.

    Raises:
        InferenceClientError: a .npz file cannot keep an output.
        OSError: the file cannot be written.
    """
    if path.suffix == ".npz":
        _write_npz(path, answer.outputs)
    else:
        with written_whole(path) as file:
            file.write(json.dumps(answer_json(answer), allow_nan=False).encode())


def _write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    plain = {name: _storable(name, array) for name, array in arrays.items()}
    # np.savez takes the arrays as keywords, where an output named "file" has no place.
    with written_whole(path) as file, ZipFile(file, "w") as archive:
        for name, array in plain.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _storable(name: str, array: Array) -> Array:
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32)  # numpy's files do not know the dtype; every value of it is one of float32's
    if array.dtype != object:
        return array
    # Objects can only be stored as pickles, which nobody should have to trust; numpy's fixed-width bytes store BYTES instead.
    if any(element.endswith(b"\0") for element in array.ravel()):
        raise InferenceClientError(f"output {name!r} has bytes that end in zero, which a .npz file cannot keep; write .json")
    return array.astype(bytes)
