"""Whether a model's nodes have what ONNX's own operators cannot do without: inputs, outputs, attributes and bodies."""

from __future__ import annotations

from collections.abc import Callable

import onnx
from onnx.defs import OpSchema

from export.errors import ExportError
from export.files.proto_walk import all_graphs

_OWN_DOMAINS = ("", "ai.onnx")
_BODIES = {"Loop": ("body",), "Scan": ("body",), "SequenceMap": ("body",), "If": ("then_branch", "else_branch")}


def require_complete_nodes(model: onnx.ModelProto, name: str, schema_of: Callable[[str], OpSchema | None]) -> None:
    """Check the nodes of the graph and of its bodies. Those of functions may be for another opset.

    Args:
        model: Its nodes are of operators that exist.
        name: The model, as errors call it.
        schema_of: Finds an operator by its type; None where it is the model's own.

    Raises:
        ExportError: A node lacks something; the text says what.
    """
    for graph in all_graphs(model):
        for node in graph.node:
            schema = schema_of(node.op_type) if node.domain in _OWN_DOMAINS else None
            reason = None if schema is None else _lack(node, schema) or _body_fault(node)
            if reason is not None:
                called = f"node {node.name or next(iter(node.output), '')!r} ({node.op_type})"
                raise ExportError(f"{name} is not a valid ONNX model: {called} {reason}; export it again")


def _lack(node: onnx.NodeProto, schema: OpSchema) -> str | None:
    for what, found, least in (("inputs", node.input, schema.min_input), ("outputs", node.output, schema.min_output)):
        if len(found) < least:
            return f"has {len(found)} {what}, expected {least} or more"
    given = {attribute.name: attribute for attribute in node.attribute}
    for key, wanted in schema.attributes.items():
        attribute = given.get(key)
        if attribute is None:
            if wanted.required:
                return f"lacks its attribute {key!r}"
        elif not attribute.ref_attr_name and attribute.type != wanted.type.value:  # type: ignore[attr-defined]  # (not in its stubs)
            return f"has the attribute {key!r} of another type than its operator's"
    return None


def _body_fault(node: onnx.NodeProto) -> str | None:
    """What a body takes and gives must be there, on the node."""
    for attribute in node.attribute:
        if attribute.name not in _BODIES.get(node.op_type, ()):
            continue
        takes = len(attribute.g.input)
        gives = len(attribute.g.output) - (node.op_type == "Loop")  # whose first one says whether to go on
        if node.op_type != "If" and takes > len(node.input):
            return f"has {len(node.input)} inputs, but its body takes {takes}"
        if gives < len(node.output):
            return f"has {len(node.output)} outputs, but its {attribute.name!r} gives {max(gives, 0)}"
    return None
