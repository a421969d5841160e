"""Errors of ONNX Runtime that a request causes: an index outside a table, or sizes that the model cannot compute.

The graph determines the range of an index if an input goes unchanged into a Gather from a table of weights (an embedding). On
the CPU the runtime fails on other indices; only then are the inputs searched. On a device it answers zeros, so that the inputs
are checked before each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import BackendError, InferenceError, InvalidArgumentError
from halfserve.serve.engine.tensors import ANY_SIZE, Array, Tensors


@dataclass(frozen=True)
class IndexRange:
    """The valid values of an input, both ends included."""

    low: int
    high: int

    def outside(self, array: Array) -> int | None:
        """Return a value of the array that is not in the range; None if all are."""
        if not array.size:
            return None
        least, most = int(array.min()), int(array.max())
        return most if most > self.high else least if least < self.low else None


def check_indices(ranges: Mapping[str, IndexRange], inputs: Tensors) -> None:
    """Check the inputs whose range is known. Raises InvalidArgumentError: an input has a value outside its range."""
    for name, known in ranges.items():
        value = known.outside(inputs[name]) if name in inputs else None
        if value is not None:
            raise InvalidArgumentError(
                f"input {name!r} has the value {value}, expected {known.low} to {known.high}: it is the index of one of "
                f"{known.high + 1} rows"
            )


# Operators whose results have exactly the elements of their first input.
SAME_ELEMENTS = frozenset({"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"})
SAME_SHAPE = frozenset({"Cast", "DequantizeLinear", "Identity"})
# Parts of the runtime's error texts for sizes that do not fit each other or the weights.
SHAPE_SIGNS = (
    "by a dimension other than 1",
    "cannot be reshaped",
    "cannot broadcast",
    "cannot split using values",
    "dimension mismatch",
    "dimensions must match",
    "invalid expand shape",
    "invalid input shape",
    "must match x.shape",
    "out of data bounds",
)
SHOWN_TEXT = 300  # most characters of the runtime's text in an error


def index_ranges(graph: GraphProto) -> dict[str, IndexRange]:
    """Return the range of each input from which a Gather takes its indices, by the input's name. Weights may be left out.

    Gathers in subgraphs do not count, because they may not be computed.
    """
    weights = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    inputs = {
        value.name
        for value in graph.input
        if value.name not in weights and value.type.tensor_type.elem_type in {TensorProto.INT32, TensorProto.INT64}
    }
    found: dict[str, IndexRange] = {}
    for node in graph.node:
        if node.op_type != "Gather" or node.domain not in {"", "ai.onnx"}:
            continue
        table = weights.get(_origin(node.input[0], makers, SAME_SHAPE))
        index = _origin(node.input[1], makers, SAME_ELEMENTS)
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        if table is None or index not in inputs or not -len(table.dims) <= axis < len(table.dims):
            continue
        rows = table.dims[axis]
        known = found.get(index)
        if known is None or rows <= known.high:
            found[index] = IndexRange(-rows, rows - 1)  # negative indices count from the end
    return found


def _origin(name: str, makers: Mapping[str, NodeProto], passing: frozenset[str]) -> str:
    """Return the tensor from which a tensor has its elements."""
    node = makers.get(name)
    while node is not None and node.op_type in passing and node.domain in {"", "ai.onnx"}:
        name = node.input[0]
        node = makers.get(name)
    return name


class RequestErrors:
    """Distinguishes errors of requests from errors of one model. Used by one thread at a time."""

    def __init__(self, ranges: Mapping[str, IndexRange], sizes: tuple[str, ...] = (), *, on_device: bool = False) -> None:
        """`sizes`: the inputs with a free size beside the batch dimension. `on_device`: wrong indices are no errors there."""
        self.checks_first = on_device and bool(ranges)  # whether inputs must be checked before each batch
        # Whether a batch was computed. Before, a size that does not fit may be the model's own defect.
        self.has_computed = False
        self._ranges = ranges
        self._sizes = sizes

    def check(self, inputs: Tensors) -> None:
        check_indices(self._ranges, inputs)

    def explain(self, inputs: Tensors, text: str) -> InferenceError:
        """Return the client's error after a batch failed; `text` is the runtime's."""
        try:
            self.check(inputs)
        except InvalidArgumentError as error:
            return error
        if self._sizes and self.has_computed and any(sign in text.lower() for sign in SHAPE_SIGNS):
            given = ", ".join(f"{name!r} {list(np.shape(inputs[name]))}" for name in self._sizes if name in inputs)
            return InvalidArgumentError(
                f"the model cannot compute inputs of these sizes: {given}; expected sizes that fit each other and the model "
                f"({text[:SHOWN_TEXT]})"
            )
        return BackendError(f"the model failed on this request: {text}")


def free_sizes(interface: ModelInterface, *, batched: bool) -> Iterator[str]:
    """Return the inputs with a free size beside the batch dimension."""
    own = 1 if batched else 0
    return (spec.name for spec in interface.inputs if ANY_SIZE in spec.shape[own:])
