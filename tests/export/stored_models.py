"""Small ONNX models written by hand, as files (whole, with data files, damaged) and in sessions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

from halfserve.export.onnx_files.model_file import serialize


def parse(text: str, *, opset: int = 20, ir: int = 9, imports: str = "", **weights: ArrayLike) -> onnx.ModelProto:
    """A model from ONNX's text form; weights by name, and nodes without a name named after their first output."""
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["": {opset}{imports}]>\n{text}')
    for name, values in weights.items():
        array = np.asarray(values)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for node in model.graph.node:
        node.name = node.name or node.output[0]
        if not node.domain:  # as onnx's own helpers leave it, and not written as ""
            node.ClearField("domain")
    return model


def both(text: str, **weights: np.ndarray[Any, Any]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A model in float32 and in float16, by its text with `T` for the type and `NUMBER` for what ONNX calls it."""

    def typed(kind: str, number: int) -> onnx.ModelProto:
        of_kind: dict[str, Any] = {
            name: array.astype(kind) if array.dtype.kind == "f" else array for name, array in weights.items()
        }
        written = text.replace("T[", f"{kind.replace('32', '')}[").replace("NUMBER", str(number))
        return parse(written, opset=17, ir=8, **of_kind)

    return typed("float32", TensorProto.FLOAT), typed("float16", TensorProto.FLOAT16)


def sums(
    count: int = 4, size: int | tuple[int, ...] = 512, *, dtype: type[np.generic] = np.float32, opset: int = 20
) -> onnx.ModelProto:
    """x [*size] -> y = x + w0 + w1 + ...: `count` weights of that size, all different; then one scalar factor."""
    kind = TensorProto.DataType.Name(helper.np_dtype_to_tensor_dtype(np.dtype(dtype))).lower()
    values = np.random.default_rng(0).normal(size=size).astype(np.float32)
    names = ["x", *(f"a{i}" for i in range(count))]
    steps = " ".join(f"[add{i}] a{i} = Add ({names[i]}, w{i})" for i in range(count))
    value = f"{kind}{list(values.shape)}"
    model = parse(f"sums ({value} x) => ({value} y) {{ {steps} [scale] y = Mul ({names[-1]}, factor) }}", opset=opset, ir=10)
    weights = {**{f"w{i}": values / (i + 1) for i in range(count)}, "factor": np.array(0.5)}
    model.graph.initializer.extend(numpy_helper.from_array(array.astype(dtype), name) for name, array in weights.items())
    return model


def with_a_body(size: int = 512) -> onnx.ModelProto:
    """An If whose branches hold an initializer, and a Constant node, each of `size` elements."""
    model = parse(
        f"""with_a_body (float[{size}] x, bool flag) => (float[{size}] y) {{
        [constant] k = Constant ()
        [if] y = If (flag) <
            then_branch = then () => (float[{size}] out) {{ [inner_add] out = Add (x, inner) }},
            else_branch = else () => (float[{size}] out) {{ [other] out = Identity (k) }}
        > }}""",
        ir=10,
    )
    ones, inner = np.ones(size, np.float32), np.arange(size, dtype=np.float32)
    model.graph.node[0].attribute.append(helper.make_attribute("value", numpy_helper.from_array(ones, "value")))
    model.graph.node[1].attribute[0].g.initializer.append(numpy_helper.from_array(inner, "inner"))
    return model


def in_one_file(model: onnx.ModelProto, path: Path) -> Path:
    """Write the model in one piece."""
    path.write_bytes(serialize(model))
    return path


def with_data_files(model: onnx.ModelProto, path: Path, *, files: int = 1) -> Path:
    """Write the model with its weights dealt out to `files` data files beside it, as onnx itself does."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    large = [tensor for tensor in copied.graph.initializer if len(tensor.raw_data) >= 1024]
    for index, tensor in enumerate(large):
        onnx.external_data_helper.set_external_data(tensor, f"{path.stem}.{index * files // len(large)}.bin")
    onnx.save_model(copied, path)
    return path


def chain(operations: list[str], constant: float, *, batch: int | str = "batch") -> onnx.ModelProto:
    """x FP16 [batch, 1] -> y: one node after the other, each with the constant as its second operand."""
    names = ["x", *(f"v{index}" for index in range(len(operations) - 1)), "y"]
    steps = " ".join(f"[{op}_{at}] {names[at + 1]} = {op} ({names[at]}, c)" for at, op in enumerate(operations))
    text = f"chain (float16[{batch}, 1] x) => (float16[{batch}, 1] y) {{ {steps} }}"
    return parse(text, ir=10, c=np.array([constant], np.float16))


def open_session(content: bytes, level: str) -> Any:
    """An `onnxruntime.InferenceSession`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def answers(
    model: onnx.ModelProto | bytes, feeds: Mapping[str, np.ndarray[Any, Any]], level: str = "ORT_ENABLE_BASIC"
) -> dict[str, np.ndarray[Any, Any]]:
    """What ONNX Runtime answers on the CPU, by output."""
    session = open_session(model if isinstance(model, bytes) else serialize(model), level)
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, dict(feeds)), strict=True))
