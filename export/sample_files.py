"""Samples from a file: the arrays of an .npz, one per model input."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from export.errors import ExportError
from export.verification.samples import Input, inputs_of

if TYPE_CHECKING:
    from export.onnx_files.model_file import ModelFile

Array = np.ndarray[Any, Any]
UNNAMED = "arr_0"  # what numpy.savez calls an array that is given without a name


def load_samples(path: Path, model: ModelFile) -> list[Array]:
    """Read samples that `numpy.savez(path, input_name=array, ...)` wrote; each array's first dimension counts them.

    Args:
        path: The .npz file; for a model with a single input, one array without a name will do, also as an .npy file.
        model: The model whose inputs they are.

    Returns:
        The arrays in the order of the model's inputs, in their types.

    Raises:
        ExportError: The file cannot be read, holds no such arrays, one does not fit its input, or an input is no tensor.
    """
    inputs = inputs_of(model.outline)
    arrays = _read(path)
    if len(inputs) == 1 and arrays.keys() == {UNNAMED} and inputs[0].name != UNNAMED:
        arrays = {inputs[0].name: arrays[UNNAMED]}
    names = [value.name for value in inputs]
    absent = [name for name in names if name not in arrays]
    if absent:
        raise ExportError(
            f"{path} has no array {absent[0]!r}; it has {', '.join(arrays) or 'none'}, the model takes {', '.join(names)}"
        )
    unknown = [name for name in arrays if name not in names]
    if unknown:
        raise ExportError(f"{path} has an array {unknown[0]!r}, which is no input of the model; it takes {', '.join(names)}")
    return [_fitting(arrays[value.name], value, path) for value in inputs]


def _read(path: Path) -> dict[str, Array]:
    try:
        with path.open("rb") as file:  # numpy leaves it open where it is no archive
            loaded = np.load(file, allow_pickle=False)
            return {UNNAMED: loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise ExportError(f"cannot read the samples {path}: {error.strerror or error}") from error
    except Exception as error:  # numpy reads a header as Python's source, and has memory for what it says
        raise ExportError(f"{path} is no .npz file of numbers; write one with numpy.savez(path, input_name=array)") from error


def _fitting(array: Array, wanted: Input, path: Path) -> Array:
    texts = array.dtype.kind == wanted.dtype.kind == "U"
    if not texts and not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
        raise ExportError(f"{path}: {wanted.name!r} is {array.dtype}, the model takes {wanted.dtype}")
    if wanted.dims is not None:
        fits = len(wanted.dims) == array.ndim and all(
            not isinstance(want, int) or want == have for want, have in zip(wanted.dims[1:], array.shape[1:], strict=True)
        )
        if not fits:
            shown = ", ".join("?" if dim is None else str(dim) for dim in wanted.dims)
            raise ExportError(
                f"{path}: {wanted.name!r} has shape {list(array.shape)}, the model takes [{shown}] (samples first)"
            )
    return array if texts else array.astype(wanted.dtype, copy=False)
