"""Why a node has to stay float32, in words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import onnx

from export.search.blame import Edge
from export.search.half_path import BROKEN
from export.search.measurement import Measurement
from export.search.searched_model import SearchedModel
from export.weight_ledger import FP16_MAX

_MUCH = 0.005  # of its result: ten roundings
_SMALLEST = 2.0**-25  # what is below becomes 0


class Reasons:
    """Says what float16 would do to nodes of one model.

    Args:
        searched: The model.
        measured: What was measured in it.
        edges: Roundings with their blame, without the weight that is put on NaN and infinities.
        constants: Scalar constants by name.
    """

    def __init__(
        self, searched: SearchedModel, measured: Measurement, edges: Sequence[Edge], constants: dict[str, float]
    ) -> None:
        self._nodes = {node.name: node for node in searched.prepared.graph.node}
        self._takers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in searched.prepared.graph.node:
            for value in dict.fromkeys(node.input):
                self._takers[value].append(node)
        self._measured, self._edges, self._constants = measured, edges, constants

    def of(self, name: str) -> str:
        """The strongest reason there is for a node."""
        return next(self._all(self._nodes[name]), "the budget breaks without it")

    def _all(self, node: onnx.NodeProto) -> Iterator[str]:
        for value in node.output:
            if self._measured.scale.get(value, 0.0) > FP16_MAX:
                yield f"its output overflows: {self._measured.scale[value]:.2g}"
        for value in node.input:
            if self._measured.scale.get(value, 0.0) > FP16_MAX:
                yield f"its input {value!r} overflows: {self._measured.scale[value]:.2g}"
        for value in node.input:
            if 0 < abs(self._constants.get(value, 1.0)) <= _SMALLEST:
                yield f"its constant {self._constants[value]:.2g} becomes 0"
        yield from self._breaks(node)
        yield from self._errs(node)
        share = sum(edge.blame for edge in self._edges if node.name in (edge.maker, edge.taker))
        if share >= 0.005:
            yield f"roundings beside it make {min(share, 1.0):.0%} of the outputs' error"

    def _breaks(self, node: onnx.NodeProto) -> Iterator[str]:
        for value in node.output:
            for source, error in self._measured.brought.get(value, {}).items():
                if error >= BROKEN:
                    yield f"gives NaN or infinity when {source!r} is rounded" if source else "gives NaN or infinity"
        for taker, value, error in self._onward(node):
            if error == math.inf:
                yield f"{taker!r} gives NaN or infinity when {value!r}, made here, is rounded"

    def _errs(self, node: onnx.NodeProto) -> Iterator[str]:
        local = self._measured.local_error(list(node.output))
        if local is not None and local > _MUCH:
            yield f"rounding what it takes and gives changes its result by {local:.1%}"
        worst = max(self._onward(node), key=lambda found: found[2], default=None)
        if worst is not None and worst[2] > _MUCH:
            yield f"{worst[0]!r} changes by {worst[2]:.1%} when {worst[1]!r}, made here, is rounded"

    def _onward(self, node: onnx.NodeProto) -> Iterator[tuple[str, str, float]]:
        """What a node's results bring into the nodes that take them: (node, value, relative error)."""
        for value in node.output:
            for taker in self._takers.get(value, ()):
                for result in taker.output:
                    error = self._measured.brought.get(result, {}).get(value, 0.0)
                    scale = self._measured.scale.get(result, 0.0)
                    yield taker.name, value, math.inf if error >= BROKEN else error / scale if scale else error


def scalar_constants(model: onnx.ModelProto) -> dict[str, float]:
    """Constants of one float element, by name: initializers and Constant nodes."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    found = {}
    for name, tensor in tensors.items():
        if tensor.data_type == onnx.TensorProto.FLOAT and all(size == 1 for size in tensor.dims):
            found[name] = float(onnx.numpy_helper.to_array(tensor).ravel()[0])
    return found
