"""Small ONNX models whose requests have lengths: a masked mean of token vectors, and the vectors themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import NodeProto, TensorProto, helper

from tests.models import Array, nodes_of, save_model

VOCABULARY, SIZE = 1200, 8
RULE = "tokens[1]=0 mask[1]=0 -> vectors[1]"
node = helper.make_node


def table() -> Array:
    """[VOCABULARY, SIZE] fp32; row 0, of the padding, is not zero."""
    return np.random.default_rng(0).standard_normal((VOCABULARY, SIZE)).astype(np.float32)


def masked_mean(result: str) -> list[NodeProto]:
    """Nodes that make `result`, the mean of found where mask is 1, from them."""
    return [
        node("Cast", ["mask"], ["m"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["m", "two"], ["column"]),
        node("Mul", ["found", "column"], ["kept"]),
        node("ReduceSum", ["kept", "one"], ["sum"], keepdims=0),
        node("ReduceSum", ["m", "one"], ["marked"], keepdims=1),
        node("Div", ["sum", "marked"], [result]),
    ]


def save_masked_mean(folder: Path, *, ignores_mask: bool = False, parameters: dict[str, str] | None = None) -> Path:
    """tokens, mask INT64 [batch, length] -> mean FP32 [batch, 8], vectors FP16 [batch, length, 8]; in a repository's folder.

    `ignores_mask`: the mean is over all places.
    """
    mask = [node("ReduceMean", ["found", "one"], ["mean"], keepdims=0)] if ignores_mask else masked_mean("mean")
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
    write_config(folder, parameters if parameters is not None else {"halfserve.padding": RULE})
    return folder


def write_config(folder: Path, parameters: dict[str, str], warm_ups: str = "") -> None:
    lines = ["max_batch_size: 32"]
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (folder / "config.pbtxt").write_text("\n".join([*lines, warm_ups]))


def save_pooled(
    folder: Path,
    text: str,
    *,
    inputs: Sequence[str] = ("mask",),
    output: int = TensorProto.FLOAT,
    shape: Sequence[int | str] = ("batch", SIZE),
    weights: dict[str, Array] | None = None,
    buckets: str = "",
) -> Path:
    """tokens INT64 [batch, length], and the inputs of these names -> y; in a repository's folder.

    mask is INT64 [batch, length]; count and kind are INT64 [batch, 1]. The nodes in `text` make y of
    found [batch, length, 8], the vectors of the tokens; right [batch, 8], their mean where mask is 1; wrong [batch, 8], their
    mean over all places; size, their number; place [length], their numbers from 0, all in FP32 beside place, in INT64.
    `buckets`: of the padding.
    """
    given, nodes = ["tokens", *inputs], nodes_of(text)
    ready = [
        node("Gather", ["table", "tokens"], ["found"], axis=0),
        node("ReduceMean", ["found", "one"], ["wrong"], keepdims=0),
        node("Shape", ["tokens"], ["long"], start=1),
        node("Squeeze", ["long"], ["n"]),
        node("Cast", ["n"], ["size"], to=TensorProto.FLOAT),
        node("Range", ["zero", "n", "step"], ["place"]),
    ]
    if "mask" in given:
        ready += masked_mean("right")
    known = {"table": table(), "one": np.array([1], np.int64), "two": np.array([2], np.int64)}
    known |= {"zero": np.array(0, np.int64), "step": np.array(1, np.int64), **(weights or {})}
    used = {name for one in [*ready, *nodes] for name in one.input}
    sizes: dict[str, list[int | str]] = {"tokens": ["batch", "length"], "mask": ["batch", "length"]}
    save_model(
        folder / "1" / "model.onnx",
        [*ready, *nodes],
        [(name, TensorProto.INT64, sizes.get(name, ["batch", 1])) for name in given],
        [("y", output, list(shape))],
        {name: array for name, array in known.items() if name in used},
    )
    rule = " ".join(f"{name}[1]=0" for name in given if name in sizes)
    write_config(folder, {"halfserve.padding": rule, **({"halfserve.padding_buckets": buckets} if buckets else {})})
    return folder


def expected(tokens: Array) -> dict[str, Array]:
    """What a row of tokens, int64 (length,), gets."""
    vectors = table()[tokens]
    return {"mean": vectors.mean(0), "vectors": vectors.astype(np.float16)}
