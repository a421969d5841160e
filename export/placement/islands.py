"""Islands: nodes that compute in float32 amid a float16 model, in connected groups, each with its shore of casts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx

from export.placement.value_types import typed_graphs

if TYPE_CHECKING:
    from export.files.model_file import ModelFile

_CONVERSIONS = frozenset({"Cast", "CastLike"})


@dataclass(frozen=True, kw_only=True)
class Island:
    """One connected group of float32 nodes.

    Attributes:
        nodes: Names of its nodes, in the graph's order.
        op_types: How many of each operator.
        reasons: Why they are float32, where a conversion said so; each once.
    """

    nodes: tuple[str, ...]
    op_types: dict[str, int]
    reasons: tuple[str, ...]


def find_islands(model: ModelFile, reasons: Mapping[str, str] | None = None) -> tuple[Island, ...]:
    """The connected groups of nodes that take or give float32, casts aside, the largest first.

    Nodes belong together when one's output is the other's input in the same graph.

    Args:
        model: Any model.
        reasons: Why a node was kept in float32, by its name.
    """
    islands = [
        _island(group, reasons or {})
        for graph, types in typed_graphs(model)
        for group in _groups([node for node in graph.node if _computes_in_fp32(node, types)])
    ]
    return tuple(sorted(islands, key=lambda island: -len(island.nodes)))


def _computes_in_fp32(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    if node.op_type in _CONVERSIONS or node.op_type == "Constant":
        return False
    fp32 = onnx.TensorProto.FLOAT
    return any(types.get(name) == fp32 for name in (*node.output, *node.input) if name) and not _only_parameters(node, types)


def _only_parameters(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    """Whether float32 is only what an operator demands beside its data, such as the scales of a Resize in float16."""
    data = [types.get(name, 0) for name in (*node.output[:1], *node.input[:1]) if name]
    return onnx.TensorProto.FLOAT not in data and onnx.TensorProto.FLOAT16 in data


def _groups(nodes: list[onnx.NodeProto]) -> list[list[onnx.NodeProto]]:
    makers = {output: index for index, node in enumerate(nodes) for output in node.output if output}
    parents = list(range(len(nodes)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    for index, node in enumerate(nodes):
        for name in node.input:
            if name in makers:
                parents[root(index)] = root(makers[name])
    groups: dict[int, list[onnx.NodeProto]] = {}
    for index, node in enumerate(nodes):
        groups.setdefault(root(index), []).append(node)
    return list(groups.values())


def _island(nodes: list[onnx.NodeProto], reasons: Mapping[str, str]) -> Island:
    names = tuple(node.name or next(iter(node.output), node.op_type) for node in nodes)
    return Island(
        nodes=names,
        op_types=dict(Counter(node.op_type for node in nodes)),
        reasons=tuple(dict.fromkeys(reasons[name] for name in names if name in reasons)),
    )
