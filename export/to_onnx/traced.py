"""A torch module as an `onnx_ir.Model`: its weights are still the module's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir
from torch import Tensor, nn

from amp_core.policy import Policy
from export.errors import ExportError
from export.scripted import require_python
from export.to_onnx.call import Call, call_of
from export.to_onnx.capture import captured, limits_of, run
from export.to_onnx.dimensions import Dimensions, dimensions
from export.to_onnx.opsets import require_opset
from export.to_onnx.origins import drop_notes, note_origins, spread_origins
from export.to_onnx.output_types import restore_output_types
from export.to_onnx.provenance import provenance
from export.to_onnx.safe_products import multiply_before_transposing
from export.to_onnx.translate import simplify, translated
from export.to_onnx.value_names import name_dimensions, name_values
from export.to_onnx.weights import name_weights, transpose_weights


def traced_model(
    module: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
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
        ExportError: As `export_onnx`, except for what concerns checking and writing.
    """
    require_opset(opset_version)
    require_python(module)
    _require_evaluation_mode(module)
    call = call_of(module, inputs, kwargs)
    sizes, tensors = dimensions(call, dynamic_shapes)
    tensors, results = _run(module, call, sizes, tensors)
    program = captured(module, call, tensors, sizes)
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
    # Of what a size is a multiple of, torch tells no limits that hold.
    limits = {symbols[symbol]: limits for symbol, limits in limits_of(program).items() if symbols.get(symbol) in sizes.dims}
    model.metadata_props.update({**provenance(module, model, limits, policy), **(metadata or {})})
    return model


def _run(
    module: nn.Module, call: Call, sizes: Dimensions, tensors: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], list[tuple[str, Tensor]]]:
    """Run the model on the examples, if it can on examples in which no two sizes are the same, else on those given."""
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
