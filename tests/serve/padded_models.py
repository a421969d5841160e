"""Small ONNX models whose requests have lengths: a masked mean of token vectors, and the vectors themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, helper

from tests.models import Array, save_model

VOCABULARY, SIZE = 1200, 8
RULE = "tokens[1]=0 mask[1]=0 -> vectors[1]"
node = helper.make_node


def table() -> Array:
    """[VOCABULARY, SIZE] fp32; row 0, of the padding, is not zero."""
    return np.random.default_rng(0).standard_normal((VOCABULARY, SIZE)).astype(np.float32)


def save_masked_mean(folder: Path, *, ignores_mask: bool = False, parameters: dict[str, str] | None = None) -> Path:
    """tokens, mask INT64 [batch, length] -> mean FP32 [batch, 8], vectors FP16 [batch, length, 8]; in a repository's folder.

    `ignores_mask`: the mean is over all places.
    """
    mask: list[NodeProto] = [
        node("Cast", ["mask"], ["m"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["m", "two"], ["column"]),
        node("Mul", ["found", "column"], ["kept"]),
        node("ReduceSum", ["kept", "one"], ["sum"], keepdims=0),
        node("ReduceSum", ["m", "one"], ["count"], keepdims=1),
        node("Div", ["sum", "count"], ["mean"]),
    ]
    if ignores_mask:
        mask = [node("ReduceMean", ["found", "one"], ["mean"], keepdims=0)]
    nodes = [
        node("Gather", ["table", "tokens"], ["found"], axis=0),
        node("Cast", ["found"], ["vectors"], to=TensorProto.FLOAT16),
        *mask,
    ]
    weights = {"table": table(), "one": np.array([1], np.int64), "two": np.array([2], np.int64)}
    used = {name for one in nodes for name in one.input}
    save_model(
        folder / "1" / "model.onnx",
        nodes,
        [("tokens", TensorProto.INT64, ["batch", "length"]), ("mask", TensorProto.INT64, ["batch", "length"])],
        [("mean", TensorProto.FLOAT, ["batch", SIZE]), ("vectors", TensorProto.FLOAT16, ["batch", "length", SIZE])],
        {name: array for name, array in weights.items() if name in used},
    )
    lines = ["max_batch_size: 32"]
    for key, value in (parameters if parameters is not None else {"halfserve.padding": RULE}).items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return folder


def expected(tokens: Array) -> dict[str, Array]:
    """What a row of tokens, int64 (length,), gets."""
    vectors = table()[tokens]
    return {"mean": vectors.mean(0), "vectors": vectors.astype(np.float16)}
