"""True classes from a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.errors import ExportError
from export.verification.metrics import Array


def load_labels(path: Path) -> Array:
    """Read whole numbers that `numpy.save(path, array)` wrote; an .npz with one array will do too.

    Raises:
        ExportError: The file cannot be read, or holds anything else.
    """
    try:
        with path.open("rb") as file:  # numpy leaves it open where it is no archive
            loaded = np.load(file, allow_pickle=False)
            arrays = [loaded] if isinstance(loaded, np.ndarray) else [loaded[name] for name in loaded.files]
    except OSError as error:
        raise ExportError(f"cannot read the labels {path}: {error.strerror or error}") from error
    except Exception as error:  # numpy reads a header as Python's source, and has memory for what it says
        raise ExportError(f"{path} is no .npy file of numbers; write one with numpy.save(path, labels)") from error
    if len(arrays) != 1 or not np.issubdtype(arrays[0].dtype, np.integer):
        found = ", ".join(f"{array.dtype} {list(array.shape)}" for array in arrays) or "nothing"
        raise ExportError(f"{path} holds {found}; expected one array of whole numbers, the class of every sample")
    array: Array = arrays[0]
    return array
