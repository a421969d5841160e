"""What ONNX Runtime's CUDA provider would not compute in float16, told without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import onnx

from export.files.model_file import ModelFile, ModelSource, open_model
from export.placement.cuda_kernels import RUNTIME_VERSION, cuda_kernels
from export.placement.kernel_registry import Kernel, Registry
from export.placement.value_types import typed_graphs

Kind = Literal["on the CPU", "no float16 kernel", "broken up"]

_LETTERS: dict[int, str] = {
    onnx.TensorProto.FLOAT16: "h",
    onnx.TensorProto.FLOAT: "f",
    onnx.TensorProto.DOUBLE: "d",
    onnx.TensorProto.BFLOAT16: "b",
}
_FOLDED = frozenset({"Constant"})  # becomes an initializer when the session opens


@dataclass(frozen=True, kw_only=True)
class CudaWarning:
    """A node that CUDA would not compute as it is.

    Attributes:
        node: Its name, or its first output's.
        op_type: Its operator.
        kind: "on the CPU": there is no kernel at all, so its inputs and outputs are copied over the bus. "no float16 kernel":
            there are kernels, but not for its float16; it goes to the CPU as well, in float32 between casts. "broken up": there
            is no kernel, but the operator is defined by smaller ones, which take its place.
        text: The same in a sentence.
    """

    node: str
    op_type: str
    kind: Kind
    text: str


def predict_cuda(model: ModelSource | ModelFile) -> tuple[CudaWarning, ...]:
    """Warn of nodes that ONNX Runtime's CUDA provider has no kernel for, at the model's opsets and in its types.

    The table is that of one release (`export.placement.cuda_kernels`). Model-local functions are not looked into: the runtime
    inlines them.

    Raises:
        ExportError: The model cannot be read.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    opsets = {_domain(entry.domain): entry.version for entry in opened.outline.opset_import}
    functions = {(_domain(function.domain), function.name) for function in opened.outline.functions}
    return tuple(
        warning
        for graph, types in typed_graphs(opened)
        for node in graph.node
        if (_domain(node.domain), node.op_type) not in functions
        and node.op_type not in _FOLDED
        and (warning := _warning(node, types, opsets)) is not None
    )


def _warning(node: onnx.NodeProto, types: Mapping[str, int], opsets: Mapping[str, int]) -> CudaWarning | None:
    domain = _domain(node.domain)
    schema = _schema(node.op_type, domain, opsets.get(domain, 1))
    since = schema.since_version if schema is not None else 1
    kernel = _kernel(cuda_kernels(), domain, node.op_type, since)
    floats = {_LETTERS[types[name]] for name in (*node.input, *node.output) if types.get(name) in _LETTERS}
    if kernel is not None and ("h" not in floats or "h" in kernel.types or not set(kernel.types) & set("hfd")):
        return None
    where = (
        f"ONNX Runtime {RUNTIME_VERSION} has no {'float16 ' if kernel else ''}CUDA kernel for {node.op_type} of opset {since}"
    )
    if schema is not None and "h" in floats and _is_defined_by_others(schema):
        kind: Kind = "broken up"
        text = f"{where}; its definition by smaller operators takes its place"
    elif kernel is None:
        kind = "on the CPU"
        text = f"{where}; it runs on the CPU, and its inputs and outputs are copied there and back"
    else:
        kind = "no float16 kernel"
        text = f"{where}; it runs on the CPU in float32, between casts and copies"
    return CudaWarning(node=node.name or next(iter(node.output), ""), op_type=node.op_type, kind=kind, text=text)


def _is_defined_by_others(schema: Any) -> bool:
    # Any: onnx's stub does not know these attributes.
    return bool(schema.function_opset_versions or schema.context_dependent_function_opset_versions)


def _kernel(registry: Registry, domain: str, op_type: str, since: int) -> Kernel | None:
    kernels = registry.get((domain, op_type), ())
    return next((kernel for kernel in kernels if kernel.first <= since <= kernel.last), None)


def _schema(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain
