"""Texts about a session on CUDA: its errors, and the nodes that the CPU computes for lack of a kernel."""

from __future__ import annotations

import re
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

# CUDA's message is surrounded by a C++ signature, the host name and paths of the build machine:
# "... CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=a ; file=/b/c.cc ; line=1 ; expr=d();".
OF_CUDA = re.compile(r"\b(?:CUDA|CUBLAS|CUDNN\w*|CUFFT|CURAND|CUSPARSE|NCCL) failure \d+: [^;\n]*[^;\s]")
# "/onnxruntime_src/a/b.cc:1 void c::D::E(int, const f::G&) ", from checks inside the runtime.
WHERE = re.compile(r"/onnxruntime_src/\S+:\d+ [^()\n]*\([^()\n]*\) (?:const )?")
# The runtime places no node for which neither CUDA nor the CPU has a kernel; it adds casts around float16 alone.
OF_KERNEL = re.compile(r"Provider type for (?P<operator>\w+) node with name '(?P<node>[^'\n]*)' is not set")
OF_CUDNN = re.compile(r"cuDNN is unavailable", re.IGNORECASE)
OF_OPTION = re.compile(r"(?:Unknown|Failed to parse) provider option[^\n]*")


def reason_of(error: Exception) -> str:
    """Return the essential line of a runtime's exception, safe to show to clients."""
    text = str(error).strip() or type(error).__name__
    found = OF_OPTION.search(text) or OF_CUDA.search(text)
    return WHERE.sub("", text.splitlines()[0]) if found is None else found[0]


def missing_kernel(error: Exception) -> str | None:
    """Return which node has no kernel on CUDA and on the CPU, and what to do; None if the refusal has another reason."""
    found = OF_KERNEL.search(str(error))
    if found is None:
        return None
    return (
        f"node {found['node']!r}: neither its CUDA provider nor its CPU provider has a {found['operator']} kernel for the "
        "node's types, such as bfloat16; convert the float32 model again, with "
        "`halfserve convert SOURCE TARGET --dtype bfloat16 --target any`, which keeps such nodes in float32"
    )


def is_about_cudnn(error: Exception) -> bool:
    """Return whether a session could not be opened because cuDNN is not there."""
    return OF_CUDNN.search(str(error)) is not None


def is_about_an_option(error: Exception) -> bool:
    """Return whether a provider rejects an option."""
    return OF_OPTION.search(str(error)) is not None


def floats_on_cpu(session: ort.InferenceSession, path: Path) -> str | None:
    """Return what to log of float nodes that the CPU computes; None if there are none.

    Each such node costs copies over the bus in every batch. Integer nodes do not count: the runtime leaves arithmetic on sizes
    to the CPU on purpose. The parts of an operator that the runtime breaks up have no names and are not found. The session must
    be opened with `session.RECORD_ENTRY`.
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
