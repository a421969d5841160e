"""The nodes of a session on CUDA that the CPU computes for lack of a kernel, with copies over the bus in every batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
from onnx import GraphProto, NodeProto, TensorProto

from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx

CPU = "CPUExecutionProvider"
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
_READ_NO_NUMBERS = frozenset({"Shape", "Size"})
_NAMED = 3  # nodes in the text


def floats_on_cpu(session: ort.InferenceSession, path: Path) -> str | None:
    """Return what to log of float nodes that the CPU computes; None if there are none.

    Integer nodes do not count: the runtime leaves arithmetic on sizes to the CPU on purpose. The parts of an operator that the
    runtime breaks up have no names and are not found. The session must be opened with `session.RECORD_ENTRY`.
    """
    parts = session.get_provider_graph_assignment_info()
    on_cpu = Counter((str(node.name), str(node.op_type)) for part in parts if part.ep_name == CPU for node in part.get_nodes())
    if not on_cpu:
        return None
    with open_onnx(path) as file:
        found = [node for node in _float_nodes(file.model) if (node.name, node.op_type) in on_cpu]
    if not found:
        return None
    named = [f"{node.op_type} {node.name or next(iter(node.output), '')!r}" for node in found[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (
        f"CUDA has no kernel for {len(found)} of its nodes, which run on the CPU, and their inputs and outputs are copied "
        f"there and back for each batch: {', '.join(named)}{more}; convert the float32 model again, with "
        "`halfserve convert SOURCE TARGET --target cuda`, which replaces some operators, and lists those it cannot replace"
    )


def _float_nodes(model: onnx.ModelProto) -> Iterator[NodeProto]:
    """Yield the nodes, bodies included, that read or make floats, and those of other domains, whose types are unknown."""
    try:
        typed = onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        typed = model  # the model's own declarations alone
    yield from _within(typed.graph, {})


def _within(graph: GraphProto, outer: Mapping[str, int]) -> Iterator[NodeProto]:
    types = dict(outer)
    for value in (*graph.input, *graph.value_info, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
    for node in graph.node:
        computes = any(types.get(name) in _FLOATS for name in (*node.input, *node.output))
        if (computes and node.op_type not in _READ_NO_NUMBERS) or node.domain not in ("", "ai.onnx"):
            yield node
        for attribute in node.attribute:
            bodies: list[Any] = [attribute.g] if attribute.HasField("g") else list(attribute.graphs)
            for body in bodies:
                yield from _within(body, types)
