"""Checks whether a model can compute inputs of given sizes, before OpenVINO's plugin computes them.

A try with the plugin is not possible: a batch whose sizes do not fit breaks the compiled model, and if a Reshape has a fixed
size, OpenVINO 2026.4.1 writes beyond its memory (400 numbers for a Reshape to [2, 2]). The shapes of all tensors are inferred
instead, once for each new combination of sizes: 1.7 ms for a MiniLM. `ov.Model.reshape` would take 13 ms, because it also
looks for patterns to rewrite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import openvino as ov
from openvino import opset13

from halfserve.serve.backends.onnx_runtime.request_errors import free_sizes
from halfserve.serve.backends.openvino.plugin import reason_of
from halfserve.serve.engine.backend import ModelInterface
from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.tensors import Tensors

# Number of rows for which sizes are inferred: no graph has it as a constant size. If it fits, other numbers do too.
ROWS = 7
MOST_KNOWN = 4096  # most combinations of sizes that are remembered
FEW = 16  # most elements of a constant that may be a size
Sizes = tuple[tuple[int, ...], ...]


class SizeCheck:
    """Infers shapes in a copy of a model's graph that holds no weights. Used by one thread at a time."""

    def __init__(self, model: ov.Model, interface: ModelInterface, places: Mapping[str, int]) -> None:
        """`places`: numbers of the inputs in the model, by their names. Raises InvalidArgumentError: all of the model's sizes
        are known except the number of rows, and it cannot compute any number.
        """
        self._graph = _without_weights(model)
        self._places = places
        self._batched = interface.batched
        self._known: set[Sizes] = set()
        self._is_open = any(free_sizes(interface, batched=interface.batched))
        if interface.batched and not self._is_open:
            self._infer(tuple((ROWS, *spec.shape[1:]) for spec in interface.inputs if spec.name in self._places))

    def check(self, inputs: Tensors) -> None:
        """Check the sizes of a batch. Raises InvalidArgumentError: the model cannot compute these sizes."""
        if not self._is_open:
            return
        shapes = tuple(inputs[name].shape for name in self._places)
        if self._batched and len({shape[:1] for shape in shapes}) == 1:
            shapes = tuple((ROWS, *shape[1:]) for shape in shapes)
        if shapes in self._known:
            return
        try:
            self._infer(shapes)
        except InvalidArgumentError as error:
            given = ", ".join(f"{name!r} {list(inputs[name].shape)}" for name in self._places)
            raise InvalidArgumentError(
                f"the model cannot compute inputs of these sizes: {given}; expected sizes that fit each other and the model "
                f"({error})"
            ) from None
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(shapes)

    def _infer(self, shapes: Sizes) -> None:
        parameters = self._graph.get_parameters()
        try:
            for place, shape in zip(self._places.values(), shapes, strict=True):
                parameters[place].set_partial_shape(ov.PartialShape(list(shape)))
            self._graph.validate_nodes_and_infer_types()
        except Exception as error:
            # The bindings raise RuntimeErrors and others, without a common base class.
            raise InvalidArgumentError(reason_of(error)) from error


def _without_weights(model: ov.Model) -> ov.Model:
    """Copy a graph, with an input in place of each constant from which no size is computed."""
    graph = model.clone()
    added = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "Constant" or not node.get_output_element_type(0).is_real():
            continue
        shape = list(node.get_output_shape(0))
        if math.prod(shape) > FEW:
            weight = opset13.parameter(shape, node.get_output_element_type(0))
            for taker in node.output(0).get_target_inputs():
                taker.replace_source_output(weight.output(0))
            added.append(weight)
    graph.add_parameters(added)
    return graph
