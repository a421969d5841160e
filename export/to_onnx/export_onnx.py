"""A torch module as an ONNX model: checked, named, with a batch of any size and its provenance inside."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.atomic_write import write_atomically
from export.errors import ExportError
from export.to_onnx import signature
from export.to_onnx.output_types import restore_output_types
from export.to_onnx.silence import silenced
from export.to_onnx.value_names import name_values, placeholders

PROTOBUF_LIMIT_BYTES = 2**31 - 1


def export_onnx(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    path: Path | str | None = None,
    *,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    opset_version: int | None = None,
) -> onnx.ModelProto:
    """Convert a module with `torch.export`, and prove that ONNX's full checker accepts the result.

    The same module and inputs give the same bytes. The graph's element types are the module's: export what `to_half` returns,
    with floating inputs in float16, for an fp16 model.

    Args:
        module: A module in evaluation mode.
        inputs: Example inputs, one tensor per parameter of `forward`; their values do not matter.
        path: Where to write the model too (whole or not at all); its folder must exist.
        dynamic_shapes: One entry per input, `{dimension: name}` or None; a name stands for one size wherever it occurs. By
            default the first dimension of every input is "batch". `()` fixes every size to the example's.
        input_names: By default the names of `forward`'s parameters.
        output_names: By default `output`, or the keys of the dict that the module returns (see `export.to_onnx.signature`).
        metadata: More entries for the model's metadata, beside `halfserve.*`.
        opset_version: ONNX's default domain; None is what torch recommends.

    Raises:
        ExportError: The module is in training mode, fails on the inputs, fixes a size that should vary, uses what ONNX does
            not have, is over 2 GB, or cannot be written.
    """
    examples = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    _require_exportable(module, examples)
    if dynamic_shapes is None:
        examples, dynamic_shapes = signature.at_least_two(examples), signature.dynamic_batch(examples)
    result = _run(module, examples)
    program = _captured(module, examples, signature.as_dims(dynamic_shapes) or None)
    inputs_called = list(input_names or signature.input_names(module, len(examples)))
    outputs_called = list(output_names or signature.output_names(result))
    results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    model = _converted(
        program,
        input_names=placeholders("input", len(examples)),
        output_names=placeholders("output", len(results)),
        opset_version=opset_version,
    )
    restore_output_types(model, results)
    name_values(model, inputs_called, outputs_called)
    _name_dimensions(model, dynamic_shapes)
    _write_metadata(model, module, metadata or {})
    _check(model)
    if path is not None:
        write_atomically(path, serialize(model))
    return model


def serialize(model: onnx.ModelProto) -> bytes:
    """The model's bytes, the same ones for equal models."""
    return model.SerializeToString(deterministic=True)


def _require_exportable(module: nn.Module, examples: tuple[Tensor, ...]) -> None:
    if any(part.training for part in module.modules()):
        raise ExportError(
            "the model is in training mode, in which dropout and batch norm answer differently; call .eval() first"
        )
    if not examples or not all(isinstance(example, Tensor) for example in examples):
        raise ExportError("inputs: expected an example tensor for each parameter of forward")
    size = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    if size > PROTOBUF_LIMIT_BYTES:
        raise ExportError(f"the weights take {size / 2**30:.1f} GiB; an ONNX file holds at most 2 GiB")


def _run(module: nn.Module, examples: tuple[Tensor, ...]) -> Any:
    try:
        with torch.no_grad():
            return module(*examples)
    except Exception as error:
        given = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in examples)
        raise ExportError(f"the model fails on inputs {given}: {_one_line(error)}") from error


def _captured(module: nn.Module, examples: tuple[Tensor, ...], dynamic_shapes: Any) -> torch.export.ExportedProgram:
    try:
        with silenced(), torch.no_grad():
            return torch.export.export(module, examples, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        fixed = re.search(r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)", str(error))
        if fixed:
            raise ExportError(
                f"the model's code fixes dimension {fixed[1]!r} at {fixed[2]}; make it follow the input's shape, or leave it "
                "out of dynamic_shapes"
            ) from error
        raise ExportError(f"torch.export cannot capture the model: {_one_line(error)}") from error


def _converted(program: torch.export.ExportedProgram, **options: Any) -> onnx.ModelProto:
    try:
        with silenced():
            converted = torch.onnx.export(program, dynamo=True, verbose=False, **options)
    except Exception as error:
        raise ExportError(f"torch.onnx cannot express the model: {_one_line(_root(error))}") from error
    if converted is None:
        raise ExportError("torch.onnx gave no model back; upgrade torch to 2.11 or later")
    return converted.model_proto


def _name_dimensions(model: onnx.ModelProto, dynamic_shapes: Any) -> None:
    """Give the symbols that `torch.export` made up (s40) the names that were asked for (batch), everywhere."""
    entries = dynamic_shapes.values() if isinstance(dynamic_shapes, Mapping) else dynamic_shapes
    names: dict[str, str] = {}
    for value, entry in zip(model.graph.input, entries, strict=False):
        for axis, dim in entry.items() if isinstance(entry, Mapping) else ():
            symbol = value.type.tensor_type.shape.dim[axis].dim_param
            if symbol and dim is not None:
                names[symbol] = dim if isinstance(dim, str) else getattr(dim, "__name__", symbol)
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info]:
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                dimension.dim_param = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), dimension.dim_param)


def _write_metadata(model: onnx.ModelProto, module: nn.Module, extra: Mapping[str, str]) -> None:
    for node in model.graph.node:
        # The module path stays, for later diagnosis; source texts and paths of the machine that exported do not travel.
        kept = [entry for entry in node.metadata_props if entry.key in ("namespace", "pkg.torch.onnx.name_scopes")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    del model.metadata_props[:]
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    provenance = {
        "halfserve.version": _version("halfserve"),
        "halfserve.torch": torch.__version__,
        "halfserve.onnx": onnx.__version__,
        "halfserve.opset": str(opset),
        "halfserve.source": f"{type(module).__module__}.{type(module).__qualname__}",
    }
    onnx.helper.set_model_props(model, {**provenance, **extra})


def _check(model: onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise ExportError(f"the exported model is not valid ONNX: {_one_line(error)}") from error


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
