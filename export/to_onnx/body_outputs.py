"""Bodies of If and Loop that hand on what an outer graph makes: ONNX wants every output of a body made inside it."""

from __future__ import annotations

import onnx_ir


def make_inside(model: onnx_ir.Model) -> None:
    """Put an Identity into each body before an output that comes from outside, in place.

    A branch that changes nothing (`lambda x: x.clone()`) is such an Identity, which simplifying takes away.
    """
    for graph in list(model.graphs()):
        for index, output in enumerate(graph.outputs):
            maker = output.producer()
            if maker is None or maker.graph is graph:  # the graph's own inputs and initializers have no maker
                continue
            copy = onnx_ir.node("Identity", inputs=[output])
            made = copy.outputs[0]
            made.name, made.type = f"{output.name}_inside", output.type
            made.shape = output.shape.copy() if output.shape is not None else None
            graph.append(copy)
            graph.outputs[index] = made
