"""Which of ONNX's own operators a model can import that imports only others'."""

from __future__ import annotations

import onnx


def format_opset(ir_version: int) -> int:
    """The newest version of ONNX's operators that came out with a format no newer than this one."""
    fitting = [opset for _, version, opset, *_ in onnx.helper.VERSION_TABLE if version <= ir_version]
    return max(fitting, default=onnx.defs.onnx_opset_version())
