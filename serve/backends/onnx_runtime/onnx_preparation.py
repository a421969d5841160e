"""From an ONNX file to what a session opens: as it is on CUDA, upcast to fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto

from serve.backends.onnx_runtime.border import set_border
from serve.backends.onnx_runtime.external_data import require_no_engine, take_in
from serve.backends.onnx_runtime.onnx_file import OnnxFile, open_onnx
from serve.backends.onnx_runtime.upcast import HALF_TYPES, half_types, upcast_to_fp32
from serve.backends.onnx_runtime.weight_file import large_weights_bytes, move_weights
from serve.engine.disk_files import temporary_folder
from serve.engine.errors import ModelLoadError

# From here on weights go to the runtime through a file; see weight_file.
INLINE_BYTES = 1 << 18
# Without a file: protobuf serializes at most 2 GiB, and half precision becomes twice as large.
MAX_MESSAGE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """What a session opens.

    Attributes:
        source: the model's bytes, or the path of its file.
        precision: what it computes in, in words: "fp16", "fp32", or "fp32 (the fp16 model, upcast)".
        given_names: the session's names of inputs that are called otherwise in the model file.
    """

    source: str | bytes
    precision: str
    given_names: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def prepared(path: Path, *, for_gpu: bool) -> Iterator[PreparedModel]:
    """Prepare a model file; what was made of it is gone afterwards.

    Numpy, and with it the runtime's Python interface, has no bf16: such inputs and outputs are fp32 at the session's border.

    Raises:
        ModelLoadError: the file or its external weights cannot be read, or there is no room for what is made of them.
    """
    with open_onnx(path) as opened:
        model = opened.model
        require_no_engine(model, path)
        halves = half_types(model)
        names = " and ".join(name for number, name in HALF_TYPES.items() if number in halves)
        border = _border(model, for_gpu=for_gpu)
        if not halves or (for_gpu and not border):
            yield PreparedModel(source=str(path), precision=names or "fp32")
            return
        if opened.data_files:
            take_in(model, path)  # all of it: of bytes the runtime would resolve a path against the working directory
        precision = names if for_gpu else f"fp32 (the {names} model, upcast)"
        with _room_for_weights(opened) as folder:
            _settle_weights(opened, folder, upcast=not for_gpu)
            with _must_be_sound(path):
                if not for_gpu:
                    upcast_to_fp32(model)
                given_names = set_border(model, border)
            yield PreparedModel(source=_saved(model, folder, path), precision=precision, given_names=given_names)


@contextmanager
def _must_be_sound(path: Path) -> Iterator[None]:
    """Weights that are not as large as they say, of no type, in pieces: nobody has checked the model before."""
    try:
        yield
    except (ValueError, TypeError, KeyError, onnx.checker.ValidationError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelLoadError(f"{path}: is not a sound ONNX model ({reason}); export it again") from error


@contextmanager
def _room_for_weights(opened: OnnxFile) -> Iterator[Path | None]:
    """A temporary folder for weights that are better off in a file; None where there are none."""
    size = large_weights_bytes(opened)
    if size <= INLINE_BYTES:
        yield None
        return
    try:
        folder = temporary_folder("halfserve-")
    except OSError as error:
        if size > MAX_MESSAGE_BYTES:
            reason = f"needs a temporary folder for its weights, and has none ({error}); set TMPDIR"
            raise ModelLoadError(f"{opened.path}: {reason}") from None
        yield None
        return
    with folder as name:
        yield Path(name)


def _settle_weights(opened: OnnxFile, folder: Path | None, *, upcast: bool) -> None:
    if folder is None:
        opened.take_in()
        return
    with _disk_may_be_full(folder, opened.path):
        move_weights(opened, folder / "weights.bin", upcast=upcast)


def _saved(model: onnx.ModelProto, folder: Path | None, path: Path) -> str | bytes:
    content = model.SerializeToString()
    if folder is None:
        return content
    file = folder / "model.onnx"
    with _disk_may_be_full(folder, path):
        file.write_bytes(content)
    return str(file)


@contextmanager
def _disk_may_be_full(folder: Path, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"{path}: its weights could not be written to {folder.parent} ({error.strerror}); set TMPDIR to a folder with room"
        ) from None


def _border(model: onnx.ModelProto, *, for_gpu: bool) -> dict[str, int]:
    """The types that inputs and outputs must have outside, where it is not the one they get inside."""
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    if for_gpu:
        return {name: TensorProto.FLOAT for name, number in types.items() if number == TensorProto.BFLOAT16}
    return {name: number for name, number in types.items() if number == TensorProto.FLOAT16}
