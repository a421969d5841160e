"""Files of samples: arrays and texts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from halfserve.export.export_errors import ExportError
from halfserve.export.verification.samples import UNNAMED, read_array_file


def read_arrays(path: Path, count: int) -> Tensor | dict[str, Tensor]:
    """The first samples of an .npz, by the parameters of forward, or of an .npy, for a single parameter.

    Raises:
        ExportError: It cannot be read, or an array has a type that torch does not have.
    """
    arrays = read_array_file(path)
    try:
        tensors = {name: torch.from_numpy(array[:count].copy()) for name, array in arrays.items() if array.ndim}
    except TypeError as error:
        raise ExportError(
            f"{path} holds an array of another type than numbers; expected floats, whole numbers or booleans"
        ) from error
    if len(tensors) < len(arrays) or not tensors:
        raise ExportError(f"{path} holds a single number, or nothing; expected arrays whose first dimension counts the samples")
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    if not max(lengths.values()):
        raise ExportError(f"{path} holds no samples: each array is empty; expected at least 1 in its first dimension")
    if len(set(lengths.values())) > 1 or not min(lengths.values()):
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ExportError(
            f"{path} holds different numbers of samples: {counts}; expected the same number, at least 1, in each array"
        )
    return tensors[UNNAMED] if tensors.keys() == {UNNAMED} else tensors


def read_sentences(path: Path) -> list[str]:
    """The lines of a text file, empty ones left out.

    Raises:
        ExportError: It cannot be read, is not UTF-8, or has no text.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ExportError(f"cannot read the samples {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ExportError(f"{path} is not UTF-8 text; expected a sentence in each line") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ExportError(f"{path} has no text; expected a sentence in each line")
    return texts
