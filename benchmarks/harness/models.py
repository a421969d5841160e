"""The models of a soak, with exactly known answers: whole numbers that fp16 represents without rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

Shape = list[int | str]
Array = np.ndarray[Any, Any]
HALF, FLOAT, INT64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT64
STEPS = "steps"  # the model that counts, and hangs if the number is large
PICKY = "picky"  # the model that fails for some inputs
LARGE_ROWS = 8  # rows in one batch of the model with the large rows
SPINNING_S = 2.0  # time limit of the counting model, which busy machines keep too


def save_models(repository: Path) -> None:
    """Write all models as a repository.

    affine: x FP16 [batch, 64] -> y = 2 x + 1.
    flip: x FP16 [batch, length] -> y = -x, of any length, so that requests wait in many queues.
    large: x FP32 [batch, 65536] -> y = x + x, 256 KiB a row.
    picky: i INT64 [batch, 1] -> y FP32: a table's element, of which there are two.
    steps: n INT64 [1] -> y: counts to n, about a microsecond a step.
    """
    x = helper.make_node("Mul", ["x", "two"], ["double"]), helper.make_node("Add", ["double", "one"], ["y"])
    _save(repository, "affine", [*x], ("x", HALF, ["batch", 64]), ("y", HALF, ["batch", 64]), _halves(one=1, two=2))
    flip = [helper.make_node("Neg", ["x"], ["y"])]
    _save(repository, "flip", flip, ("x", HALF, ["batch", "length"]), ("y", HALF, ["batch", "length"]))
    large = [helper.make_node("Add", ["x", "x"], ["y"])]
    _save(repository, "large", large, ("x", FLOAT, ["batch", 65_536]), ("y", FLOAT, ["batch", 65_536]))
    (repository / "large" / "config.pbtxt").write_text(f"max_batch_size: {LARGE_ROWS}")
    picky = [helper.make_node("Gather", ["table", "i"], ["g"], axis=0), helper.make_node("Identity", ["g"], ["y"])]
    table = {"table": np.array([10, 20], np.float32)}
    _save(repository, PICKY, picky, ("i", INT64, ["batch", 1]), ("y", FLOAT, ["batch", 1]), table)
    _save_steps(repository)


def save_shift(repository: Path, name: str, shift: int, hidden: int) -> None:
    """Write a model with weights of its own: x FP16 [batch, 64] -> y = 2 x + shift, through `hidden` values per row.

    The weights take 256 bytes for each of these values.
    """
    wide, narrow = np.zeros((64, hidden), np.float16), np.zeros((hidden, 64), np.float16)
    wide[:, -64:], narrow[-64:] = np.eye(64), 2 * np.eye(64)
    nodes = [
        helper.make_node("MatMul", ["x", "wide"], ["h"]),
        helper.make_node("MatMul", ["h", "narrow"], ["double"]),
        helper.make_node("Add", ["double", "shift"], ["y"]),
    ]
    weights = {"wide": wide, "narrow": narrow, "shift": np.array(shift, np.float16)}
    _save(repository, name, nodes, ("x", HALF, ["batch", 64]), ("y", HALF, ["batch", 64]), weights)


def _save_steps(repository: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["count", "one"], ["next"])],
        "body",
        [_tensor("step", INT64, []), _tensor("go", TensorProto.BOOL, []), _tensor("count", INT64, [1])],
        [_tensor("go_on", TensorProto.BOOL, []), _tensor("next", INT64, [1])],
    )
    nodes = [helper.make_node("Squeeze", ["n"], ["times"]), helper.make_node("Loop", ["times", "", "zero"], ["y"], body=body)]
    weights = {"one": np.array([1], np.int64), "zero": np.array([0], np.int64)}
    _save(repository, STEPS, nodes, ("n", INT64, [1]), ("y", INT64, [1]), weights)
    config = f'parameters {{ key: "halfserve.max_compute_s" value {{ string_value: "{SPINNING_S}" }} }}'
    (repository / STEPS / "config.pbtxt").write_text(config)


def _halves(**values: float) -> dict[str, Array]:
    return {name: np.array(value, np.float16) for name, value in values.items()}


def _tensor(name: str, number: int, shape: Shape) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, number, shape)


def _save(
    repository: Path,
    name: str,
    nodes: list[NodeProto],
    given: tuple[str, int, Shape],
    answered: tuple[str, int, Shape],
    weights: Mapping[str, Array] | None = None,
) -> None:
    constants = [numpy_helper.from_array(array, key) for key, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, name, [_tensor(*given)], [_tensor(*answered)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
