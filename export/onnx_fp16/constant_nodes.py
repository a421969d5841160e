"""Constant nodes in one form: a tensor, whichever of ONNX's ways they were written in."""

from __future__ import annotations

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

from export.onnx_fp16.graph_walk import all_nodes


def unify_constants(model: onnx_ir.Model) -> None:
    """Write `value_float` and `value_floats` of Constant nodes as `value`: those have no float16 form of their own."""
    for node in all_nodes(model):
        if node.op_type != "Constant" or node.domain:
            continue
        for name, kind in (("value_float", AttributeType.FLOAT), ("value_floats", AttributeType.FLOATS)):
            attribute = node.attributes.get(name)
            if attribute is not None and attribute.type == kind and not attribute.is_ref():
                del node.attributes[name]
                tensor = onnx_ir.tensor(np.asarray(attribute.value, np.float32), name=node.outputs[0].name)
                node.attributes["value"] = onnx_ir.AttrTensor("value", tensor, attribute.doc_string)
