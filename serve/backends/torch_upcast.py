"""Turn a half-precision torch program into one that computes in fp32, from the same weights: what upcast.py does for ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

HALF_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# Each says that a tensor has the dtype and the device that it had when the program was exported.
ASSERTION = torch.ops.aten._assert_tensor_metadata.default  # noqa: SLF001  (an operator's public name)
# It reads bits, which are others in fp32.
REINTERPRETATION = torch.ops.aten.view.dtype


def half_dtypes(program: ExportedProgram) -> str:
    """The half-precision types that the program computes with, in words: "fp16", "fp16 and bf16", or "" for none."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    tensors += [node.meta.get("val") for node in _nodes(program.graph_module)]
    found = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return " and ".join(name for dtype, name in HALF_DTYPES.items() if dtype in found)


def can_upcast(program: ExportedProgram) -> bool:
    """Whether the program means the same in fp32: not where it reads bits, and not where operators are none of torch's own."""
    calls = [node.target for node in _nodes(program.graph_module) if node.op == "call_function"]
    return not any(target is REINTERPRETATION or _is_foreign(target) for target in calls)


def upcast_graph(graph_module: GraphModule) -> None:
    """Change every half-precision dtype that an operator is told to fp32, in place, subgraphs included."""
    for module in graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.target is ASSERTION:
                module.graph.erase_node(node)
                continue
            node.args = map_aggregate(node.args, _upcast_dtype)
            node.kwargs = map_aggregate(node.kwargs, _upcast_dtype)
        module.recompile()


def upcast_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32 where it is fp16 or bf16, and as it is otherwise."""
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def _nodes(graph_module: GraphModule) -> Iterator[Node]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def _is_foreign(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001  (torch has no public name for the class)
        return target.namespace not in {"aten", "prims", "prim"}
    # Arithmetic on sizes is Python's. Higher-order operators run subgraphs, all but this one in the dtypes that it is given.
    return isinstance(target, torch._ops.HigherOrderOperator) and "autocast" in str(target)  # noqa: SLF001  (see above)


def _upcast_dtype(argument: Any) -> Any:
    return torch.float32 if argument in HALF_DTYPES and isinstance(argument, torch.dtype) else argument
