"""Checks that memory suffices for a model before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from halfserve.serve.backends.onnx_runtime.onnx_file import data_bytes, open_onnx
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.resource_limits import available_bytes

MB = 1e6


def require_memory(model: Path, copies: int) -> None:
    """Check that memory suffices for a model file and its data files, once per copy, which is the least that the model takes.

    Raises:
        ModelLoadError: memory does not suffice.
    """
    available = available_bytes()
    if available is None:
        return
    needed = _weights_bytes(model) * max(1, copies)
    if needed > available:
        raise ModelLoadError(
            f"{model}: not enough memory: it takes at least {needed / MB:.0f} MB, {available / MB:.0f} MB are available; "
            "unload another model, or ask for fewer copies (instance_group)"
        )


def _weights_bytes(model: Path) -> int:
    """Return the size of the model file, its data files, and files beside it that begin with its name (model.onnx.data)."""
    beside = {path for path in model.parent.iterdir() if path.name.startswith(model.name)}
    if model.suffix == ".xml":  # OpenVINO's weights
        beside.add(model.with_suffix(".bin"))
    locations, read = _data(model)
    named = {model.parent / name for name in locations}
    return _size(beside - named) + max(_size(named), read)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data(model: Path) -> tuple[frozenset[str], int]:
    """Return the data files, and the bytes that tensors read from them: more than the files' size if several read the same
    bytes.
    """
    try:
        with open_onnx(model) as opened:
            return opened.data_files, data_bytes(opened.model, model)
    except ModelLoadError:  # or it is another kind of model; loading it reports the error
        return frozenset(), 0
