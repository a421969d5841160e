"""Model folders for ensembles: tiny ONNX models, and configurations in short."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from tests.models import save_model
from tests.serve.engine.ensembles.configurations import ensemble, step

CHAIN = ensemble(step("one", "x=x", "y=t"), step("ten", "x=t", "y=out"), input="x:FP32:4", output="out:FP32:4")


def save_add(folder: Path, number: float, *, size: int = 4, version: int = 1, batched: bool = True) -> None:
    """x FP32 [batch, size] -> y FP32 [batch, size]: x + number."""
    shape: list[int | str] = ["batch", size] if batched else [size]
    nodes = [helper.make_node("Add", ["x", "number"], ["y"])]
    fp32 = TensorProto.FLOAT
    weights = {"number": np.array(number, np.float32)}
    save_model(folder / str(version) / "model.onnx", nodes, [("x", fp32, shape)], [("y", fp32, shape)], weights)


def save_cast(folder: Path) -> None:
    """x FP32 [batch, any] -> y FP16 [batch, any]."""
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)]
    given, made = ("x", TensorProto.FLOAT, ["batch", "n"]), ("y", TensorProto.FLOAT16, ["batch", "n"])
    save_model(folder / "1" / "model.onnx", nodes, [given], [made])  # type: ignore[list-item]  # (str is a part of int | str)


def save_texts(folder: Path) -> None:
    """x BYTES [batch, any] -> y BYTES, the same; twice INT64 [batch, 1], the number of texts in a row."""
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "from", "to"], ["n"]),
        helper.make_node("Slice", ["shape", "zero", "from"], ["rows"]),
        helper.make_node("Concat", ["rows", "from"], ["wanted"], axis=0),
        helper.make_node("Expand", ["n", "wanted"], ["count"]),
    ]
    text, whole = TensorProto.STRING, TensorProto.INT64
    weights = {"zero": np.array([0]), "from": np.array([1]), "to": np.array([2])}
    outputs: list[tuple[str, int, list[int | str]]] = [("y", text, ["batch", "n"]), ("count", whole, ["batch", 1])]
    save_model(folder / "1" / "model.onnx", nodes, [("x", text, ["batch", "n"])], outputs, weights)


def save_ensemble(folder: Path, text: str, *, max_batch_size: int = 8, has_version: bool = True) -> None:
    """A configuration, and the empty version folder that Triton wants."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(f"{text} max_batch_size: {max_batch_size}")
    if has_version:
        (folder / "1").mkdir(exist_ok=True)
