"""The ways in which a candidate is run: simulated, and as ONNX Runtime takes it, level by level."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper

from export.certificate.risk import Risk
from export.errors import ExportError
from export.files.external_data import external_tensors, location_of
from export.files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile, serialize
from export.verification.accumulators import with_checks
from export.verification.children import CPU, CUDA, Answer, Children, StagedFeed, Value
from export.verification.simulate import round_every_node

# Folds constants, and fuses nothing across nodes: a fused node would round once where a GPU rounds twice.
ROUNDED_LEVEL = "ORT_ENABLE_BASIC"
LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL")
# Above this, weights are not taken into the simulated model, but stay where they are.
INLINE_LIMIT_BYTES = min(PROTOBUF_LIMIT_BYTES // 4, 256 << 20)
MAPPABLE = frozenset(
    {TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.UINT8}
    | {TensorProto.INT32, TensorProto.INT64}
)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A candidate's answers with every node rounded, the sums that outgrow float16 in it, and nodes not asked for theirs."""

    answer: Answer
    risks: tuple[Risk, ...]
    unasked: tuple[str, ...]


def on_disk(model: ModelFile, children: Children) -> Path:
    """The model's own file, or one written for the children to read.

    Raises:
        ExportError: The disk is full.
    """
    return model.path if model.path is not None else _written(model.content, children)


def run_simulated(
    candidate: ModelFile, children: Children, batches: Sequence[StagedFeed], *, usual: int, products: bool
) -> Simulated:
    """Run the candidate with every node rounded; see `export.verification.simulate` and `export.verification.accumulators`.

    Args:
        candidate: The fp16 model.
        children: Where it runs.
        batches: The batches.
        usual: How many of them, from the first, are the user's: sums on others say nothing about the model in use.
        products: Whether to look into matrix products and convolutions too.

    Raises:
        ExportError: It cannot be simulated.
    """
    rounded = round_every_node(_simulable(candidate))
    own = len(rounded.graph.output)
    checks = with_checks(rounded, products=products)
    answer = _run_simulation(checks.model, candidate, children, batches)
    failed = answer.trouble is not None or any(isinstance(batch, str) for batch in answer.batches)
    if failed and checks.risks:  # a check may fail where the model does not, such as on an empty tensor
        checks = checks.given_up(rounded)
        answer = _run_simulation(rounded, candidate, children, batches)
    reaches = [_reaches(batch[own:]) for batch in answer.batches[:usual] if not isinstance(batch, str)]
    largest = [max(column) for column in zip(*reaches, strict=True)]
    cut = tuple(batch if isinstance(batch, str) else batch[:own] for batch in answer.batches)
    risks = tuple(checks.over(largest)) if largest else ()
    answer = Answer(batches=cut, crash=answer.crash, refusal=answer.refusal, providers=answer.providers)
    return Simulated(answer=answer, risks=risks, unasked=checks.unasked)


def gpu_is_there() -> bool:
    """Whether it is worth asking ONNX Runtime for a GPU: it has the provider, and the system has the device.

    The GPU build of ONNX Runtime names the provider on every machine, and opens the model on the CPU where there is no GPU.
    """
    device = sys.platform == "win32" or Path("/dev/nvidiactl").exists()
    return device and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and CUDA in onnxruntime.get_available_providers()


def open_reference(
    path: Path, children: Children, batches: Sequence[StagedFeed], levels: Sequence[str] = LEVELS
) -> tuple[list[Value] | str, ...]:
    """The reference's answers, at the first of these levels at which it opens.

    Raises:
        ExportError: It opens at none.
    """
    troubles = []
    for level in levels:
        answer = children.run(path, batches, level=level, provider=CPU)
        if answer.trouble is None or answer.batches:
            return answer.batches
        troubles.append(f"{level}: {answer.trouble}")
        if answer.refusal is not None:
            raise ExportError(f"ONNX Runtime cannot open the reference: {answer.refusal}")
    raise ExportError(f"ONNX Runtime {onnxruntime.__version__} crashes when it opens the reference ({'; '.join(troubles)})")


def _reaches(values: list[Value]) -> list[float]:
    return [0.0 if value is None or isinstance(value, list) else float(value) for value in values]


def _simulable(candidate: ModelFile) -> onnx.ModelProto:
    return candidate.proto if candidate.size_bytes <= INLINE_LIMIT_BYTES else candidate.outline


def _run_simulation(model: onnx.ModelProto, candidate: ModelFile, children: Children, batches: Sequence[StagedFeed]) -> Answer:
    """Run a simulated model. The runtime takes data files from the model's own folder only, so weights are mapped for it."""
    weights: list[dict[str, Any]] = []
    mappable = {id(tensor) for tensor in model.graph.initializer if tensor.data_type in MAPPABLE}
    for tensor in list(external_tensors(model)):
        file, offset, length = _place(tensor, candidate)
        if id(tensor) in mappable:
            dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type).str
            place = {"file": str(file), "offset": offset, "shape": list(tensor.dims)}
            weights.append({"name": tensor.name, "dtype": dtype, **place})
        else:
            _take_in(tensor, file, offset, length)
    return children.run(_written(serialize(model), children), batches, level=ROUNDED_LEVEL, weights=weights)


def _place(tensor: onnx.TensorProto, candidate: ModelFile) -> tuple[Path, int, int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    folder = (candidate.path or Path()).absolute().parent
    file = folder / location_of(tensor)  # an absolute location stays as it is
    offset = int(entries.get("offset", 0))
    return file, offset, int(entries.get("length", file.stat().st_size - offset))


def _take_in(tensor: onnx.TensorProto, file: Path, offset: int, length: int) -> None:
    with file.open("rb") as data:
        data.seek(offset)
        tensor.raw_data = data.read(length)
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


def _written(content: bytes, children: Children) -> Path:
    path = children.new_folder() / "model.onnx"
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ExportError(f"cannot write a copy of the model to {path.parent}: {error.strerror or error}") from error
    return path
