"""fp16 models whose activations overflow on a GPU and not on a CPU, where ONNX Runtime computes chains in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper, parser

from export.verification.metrics import Array

HEADER = '<ir_version: 8, opset_import: ["": 17]>\n'


@dataclass(frozen=True, kw_only=True)
class Example:
    """A model in float32 with fp16 twin, and samples on which the twin overflows inside while its answer would fit."""

    text: str
    inputs: dict[str, Array]
    weights: dict[str, Array]

    def float32(self) -> onnx.ModelProto:
        return self._model("float")

    def float16(self) -> onnx.ModelProto:
        return self._model("float16")

    def _model(self, kind: str) -> onnx.ModelProto:
        model = parser.parse_model(HEADER + self.text.replace("T[", f"{kind}["))
        dtype = np.float16 if kind == "float16" else np.float32
        model.graph.initializer.extend(
            numpy_helper.from_array(array.astype(dtype) if array.dtype.kind == "f" else array, name)
            for name, array in self.weights.items()
        )
        for node in model.graph.node:
            node.name = node.name or f"{node.op_type}:{node.output[0]}"
        return model


def _normal(*shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


ROWS = _normal(8, 64)
EXAMPLES = {
    "scale pair": Example(
        text="g (T[N,64] x) => (T[N,64] y) { a = Mul(x, c)  b = Mul(a, c)  d = Div(b, c)  y = Div(d, c) }",
        inputs={"x": ROWS},
        weights={"c": np.array([300.0])},
    ),
    "a norm's squares": Example(
        text="""g (T[N,64] x) => (T[N,64] y) {
            m = ReduceMean<axes=[-1]>(x)  d = Sub(x, m)  s = Mul(d, d)  v = ReduceMean<axes=[-1]>(s)  r = Sqrt(v)  y = Div(d, r)
        }""",
        inputs={"x": ROWS * 200},
        weights={},
    ),
    "attention logits": Example(
        text="""g (T[N,4,64] q, T[N,4,64] k) => (T[N,4,4] y) {
            t = Transpose<perm=[0,2,1]>(k)  p = MatMul(q, t)  s = Mul(p, c)  y = Softmax(s)
        }""",
        inputs={"q": _normal(6, 4, 64, scale=60), "k": _normal(6, 4, 64, scale=60)},
        weights={"c": np.array([0.00001])},
    ),
    "residual sum": Example(
        text="g (T[N,64] x) => (T[N,64] y) {"
        + "".join(f" h{i} = Add({'x' if i == 0 else f'h{i - 1}'}, w)" for i in range(12))
        + " m = ReduceMean<axes=[-1]>(h11)  d = Sub(h11, m)  y = Mul(d, c) }",
        inputs={"x": ROWS},
        weights={"w": np.full(64, 6000.0), "c": np.array([0.5])},
    ),
    "sum of squares": Example(
        text="g (T[N,64] x) => (T[N,1] y) { s = ReduceSumSquare<axes=[-1]>(x)  y = Mul(s, c) }",
        inputs={"x": ROWS * 300},
        weights={"c": np.array([1e-6])},
    ),
    "logarithm of a sum": Example(
        text="g (T[N,64] x) => (T[N,1] y) { y = ReduceLogSum<axes=[-1]>(x) }",
        inputs={"x": np.abs(ROWS) * 4000},
        weights={},
    ),
}
