"""A torch module as a checked ONNX model, in memory or on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
from numpy.typing import NDArray
from torch import Tensor, nn

from halfserve.amp_core.policy import Policy
from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, serialize
from halfserve.export.onnx_files.model_writer import ExternalData, staged_model, write_atomically
from halfserve.export.to_onnx.capture import captured, limits_of, one_line, run
from halfserve.export.to_onnx.dimensions import Dimensions, dimensions
from halfserve.export.to_onnx.forward_call import ForwardCall, call_of, require_python
from halfserve.export.to_onnx.names import name_dimensions, name_values, name_weights, transpose_weights
from halfserve.export.to_onnx.provenance import drop_notes, note_origins, provenance, spread_origins
from halfserve.export.to_onnx.translate import multiply_before_transposing, restore_output_types, simplify, translated

# torch's own translations are written in 18; onnxscript converts upwards to 25, which ONNX Runtime 1.27 and later runs.
# Downwards the conversion is ONNX's old one, which drops metadata and fails silently on what it does not know.
OLDEST, NEWEST = 18, 25

__all__ = ["export_onnx", "serialize"]

SIZES_ROUNDED = frozenset({"AveragePool", "MaxPool", "Resize"})


def export_onnx(
    module: nn.Module,
    inputs: Tensor | NDArray[Any] | Sequence[Any] | Mapping[str, Any],
    path: Path | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    opset_version: int | None = None,
    policy: Policy | str | None = None,
    external_data: ExternalData = "auto",
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> onnx.ModelProto:
    """Convert a module with `torch.export`, and prove that ONNX's full checker accepts the result.

    The same module and inputs give the same bytes. The graph's element types are the module's: export a float32 module and
    convert the result for an fp16 model, or export what `to_half` returns, with floating inputs in float16.

    Args:
        module: A module in evaluation mode. It may return a tensor, or tensors in tuples, lists, dicts, named tuples,
            dataclasses and key-value caches, nested.
        inputs: Example inputs: one for each positional parameter of `forward`, or a dict by name. Tensors or numpy arrays
            (their values do not matter), containers of these, None for what is left out, and plain constants, which become
            part of the model.
        path: The path to write the model to (atomically); its folder must exist. None only returns it.
        kwargs: More inputs by name, beside positional ones.
        dynamic_shapes: The sizes that vary: one entry per input, or a dict by input. An entry is `{axis: name}`, `{axis:
            torch.export.Dim(name, min=..., max=...)}` or None; a name stands for one size wherever it occurs, and "4*name" for
            a multiple of 4. By default the first dimension of every input is "batch". `()` fixes every size to the example's.
        input_names: The names of the inputs; by default those of `forward`'s parameters.
        output_names: The names of the outputs; by default `output`, or the names in the module's result (see `named_tensors`).
        metadata: More entries for the model's metadata, beside `halfserve.*`.
        opset_version: ONNX's default domain, 18 to 25; None is torch's choice.
        policy: The autocast policy of the training run, for the metadata.
        external_data: Whether the weights go into a data file beside `path`: "auto" does so for a model over `limit_bytes`.
        limit_bytes: The size limit of one file; ONNX's format allows 2 GiB.

    Returns:
        The model. Where its weights went into a data file, it refers to that file instead of holding them.

    Raises:
        ExportError: The module is in training mode, fails on the inputs, fixes a size that should vary, uses an operation
            without ONNX form, is over 2 GiB without `path`, or cannot be written.
    """
    model = traced_model(
        module,
        inputs,
        kwargs=kwargs,
        dynamic_shapes=dynamic_shapes,
        input_names=input_names,
        output_names=output_names,
        metadata=metadata,
        opset_version=opset_version,
        policy=policy,
    )
    return write_onnx(model, path, external_data=external_data, limit_bytes=limit_bytes)


def traced_model(
    module: nn.Module,
    inputs: Tensor | NDArray[Any] | Sequence[Any] | Mapping[str, Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    opset_version: int | None = None,
    policy: Policy | str | None = None,
) -> onnx_ir.Model:
    """Convert a module without copying its weights; the arguments are those of `export_onnx`.

    Raises:
        ExportError: As `export_onnx`, except for errors of checking and writing.
    """
    _require_opset(opset_version)
    require_python(module)
    _require_evaluation_mode(module)
    call = call_of(module, inputs, kwargs)
    sizes, tensors = dimensions(call, dynamic_shapes)
    try:
        tensors, results = _run_on_distinct_sizes(module, call, sizes, tensors)
        program = captured(module, call, tensors, sizes)
    except ExportError as error:
        if fixed := sizes.left_out(call):
            raise ExportError(f"{fixed}; or else {error}") from error
        raise
    model = translated(program, inputs=len(tensors), outputs=len(results), opset_version=opset_version)
    note_origins(model)
    transpose_weights(model)
    simplify(model)
    multiply_before_transposing(model)
    restore_output_types(model, [tensor for _, tensor in results])
    spread_origins(model)
    drop_notes(model)
    name_weights(model)
    name_values(model, input_names or call.names, output_names or [name for name, _ in results])
    symbols = name_dimensions(model, sizes)
    # torch's limits for the base of a multiple do not hold.
    limits = {symbols[symbol]: limits for symbol, limits in limits_of(program).items() if symbols.get(symbol) in sizes.dims}
    model.metadata_props.update({**provenance(module, model, limits, policy), **(metadata or {})})
    return model


def _run_on_distinct_sizes(
    module: nn.Module, call: ForwardCall, sizes: Dimensions, tensors: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], list[tuple[str, Tensor]]]:
    """Run the model on examples in which no two sizes are equal, or on the given ones where it refuses those."""
    distinct = sizes.distinct(tensors)
    if all(larger is tensor for larger, tensor in zip(distinct, tensors, strict=True)):
        return tensors, run(module, call, tensors)
    try:
        return distinct, run(module, call, distinct)
    except ExportError:
        return tensors, run(module, call, tensors)


def _require_evaluation_mode(module: nn.Module) -> None:
    if any(part.training for part in module.modules()):
        raise ExportError(
            "the model is in training mode, in which dropout and batch norm answer differently; call .eval() first"
        )


def write_onnx(
    model: onnx_ir.Model,
    path: Path | str | None,
    *,
    external_data: ExternalData = "auto",
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> onnx.ModelProto:
    """Check a model with ONNX's full checker, except for how sizes round, and write it to `path`, if any.

    Torch tensors as weights are copied one at a time into a data file; see `export_onnx` for the arguments.

    Returns:
        The written model. Where the weights went into a data file, it refers to that file.

    Raises:
        ExportError: The model is not valid, is over the limit and has no `path` or may not have a data file, or cannot be
            written.
    """
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if external_data == "no" and size > limit_bytes:
        raise ExportError(f"the weights take {size / 2**30:.1f} GiB, too much for one file; allow external data")
    if external_data == "no" or (external_data == "auto" and size <= limit_bytes):
        return _whole(model, path)
    if path is None:
        raise ExportError(f"the weights take {size / 2**30:.1f} GiB; give a path, beside which they can be stored")
    with staged_model(model, path, external_data="yes", limit_bytes=limit_bytes) as staged:
        _check(str(staged.path))
        staged.publish()
    return onnx.load(path, load_external_data=False)


def _whole(model: onnx_ir.Model, path: Path | str | None) -> onnx.ModelProto:
    proto = onnx_ir.to_proto(model)
    _check(proto)
    if path is not None:
        write_atomically(path, serialize(proto))
    return proto


def _check(model: onnx.ModelProto | str) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
    except onnx.shape_inference.InferenceError as error:
        if not _is_about_rounded_sizes(str(error)):
            raise ExportError(f"the exported model is not valid ONNX: {one_line(error)}") from error
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise ExportError(f"the exported model is not valid ONNX: {one_line(error)}") from error


def _is_about_rounded_sizes(message: str) -> bool:
    """Return whether the checker's only complaint is image sizes that differ by one from those of torch and the runtimes.

    The checker rounds 10 * 0.7 to 6 where they round to 7, and counts windows in the padding that they omit.
    """
    named = re.findall(r"\(op_type:(\w+)", message)
    sizes = re.findall(r"Inferred shape and existing shape differ in dimension [2-9]: \((\d+)\) vs \((\d+)\)", message)
    by_one = all(abs(int(inferred) - int(stated)) == 1 for inferred, stated in sizes)
    return bool(named) and len(named) == len(sizes) and by_one and {*named} <= SIZES_ROUNDED


def _require_opset(version: int | None) -> None:
    newest = min(NEWEST, onnx.defs.onnx_opset_version())
    if version is not None and (not isinstance(version, int) or not OLDEST <= version <= newest):
        raise ExportError(f"opset_version is {version}; expected a whole number from {OLDEST} to {newest}, or None")
