"""The files that a load request brings: ONNX models, their data files, and text. Their content decides, not their names."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Mapping
from itertools import islice
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError
from onnx import ModelProto

from serve.backends.onnx_runtime.external_data import locations
from serve.backends.onnx_runtime.onnx_outline import read_outline
from serve.backends.runtimes import ZIP
from serve.control.names import check_paths
from serve.engine.errors import InvalidArgumentError, ModelLoadError

EXPECTED = "expected an ONNX model, a data file that one names, or text such as labels"
# Of a pickle, one of these at least; they are rare in what merely looks like one.
PICKLED = frozenset({"PROTO", "GLOBAL", "STACK_GLOBAL", "INST"})
PROTOCOL = b"\x80"  # of a pickle's first instruction since protocol 2; one in 20,000 data files looks like an older one
MAX_INSTRUCTIONS = 100_000  # to look at, which takes a tenth of a second


def write_upload(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files that a load request brings below a folder that is theirs alone; all are checked before one is written.

    Args:
        folder: exists and is empty.
        files: contents by path in the model's folder, such as "1/model.onnx".

    Raises:
        InvalidArgumentError: a path leads elsewhere, is hidden, or is both a file and a folder; or a content is none that may
            come with a request.
        OSError: as the system reports it.
    """
    check_paths(files.keys())
    models = {path: model for path, content in files.items() if (model := _model(content)) is not None}
    data = frozenset[str]().union(*(_data_files(model, path) for path, model in models.items()))
    for path, content in files.items():
        if path not in models:
            _require_kind(path, content, is_data=path in data)
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _model(content: bytes) -> ModelProto | None:
    """The graph of an ONNX model; None for anything else."""
    try:
        model = read_outline(io.BytesIO(content), len(content)).model
    except (DecodeError, ValueError):
        return None
    return model if model.HasField("graph") and model.opset_import else None


def _data_files(model: ModelProto, path: str) -> frozenset[str]:
    try:
        found = locations(model, Path(path))
    except ModelLoadError as error:
        raise InvalidArgumentError(str(error)) from None
    return frozenset(str(PurePosixPath(path).parent / location) for location in found)


def _require_kind(path: str, content: bytes, *, is_data: bool) -> None:
    """Check a file that is no ONNX model. What unpickling would read is refused under any name: nothing here is to try it."""
    if content.startswith(ZIP):
        what = "a zip archive, as torch writes them, which can run code when it is loaded"
    elif (not is_data or content[:1] == PROTOCOL) and _is_pickle(content):
        what = "a pickle, which can run code when it is loaded"
    elif is_data or _is_text(content):
        return
    else:
        what = "no ONNX model"
    raise InvalidArgumentError(f"file {path[:200]!r} is {what}; {EXPECTED}; put other files into the repository itself")


def _is_text(content: bytes) -> bool:
    try:
        return b"\0" not in content and bool(content.decode() or True)
    except UnicodeDecodeError:
        return False


def _is_pickle(content: bytes) -> bool:
    """Whether the content begins with instructions of pickle up to a STOP, which is found out without following them."""
    names = set[str]()
    try:
        for instruction, _, _ in islice(pickletools.genops(content), MAX_INSTRUCTIONS):
            names.add(instruction.name)
    except Exception:  # noqa: BLE001  (any; it was no pickle)
        return False
    return not names.isdisjoint(PICKLED)
