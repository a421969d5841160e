"""Networks with planted nodes that float16 breaks, among layers that it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from halfserve.export.verification.samples import Array

WIDTH = 8


class Net:
    """Builds a network of layers, MatMul and Min, between plants: `Net().layers(3).plant("overflow").layers(2).model()`."""

    def __init__(self, seed: int = 0) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.x = "x"
        self._random = np.random.default_rng(seed)
        self._count = 0

    def constant(self, value: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        return name

    def add(self, operation: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        self._count += 1
        output = f"v{self._count}"
        node = helper.make_node(operation, inputs, [output], name=name or f"{operation}_{self._count}", **attributes)
        node.metadata_props.add(key="halfserve.module", value=name.partition("/")[0] or "trunk")
        self.nodes.append(node)
        return output

    def layers(self, count: int) -> Net:
        for _ in range(count):
            rotation = np.linalg.qr(self._random.normal(size=(WIDTH, WIDTH)))[0]  # neither signals nor errors grow or vanish
            self.x = self.add("Min", self.add("MatMul", self.x, self.constant(rotation)), self.constant(4.0))
        return self

    def plant(self, kind: str, name: str = "") -> Net:
        getattr(self, f"_{kind}")(name or kind)
        return self

    def model(self, opset: int = 17, outputs: Sequence[str] = ()) -> onnx.ModelProto:
        self.nodes.append(helper.make_node("Identity", [self.x], ["y"], name="out"))
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs or ("y",)]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH])]
        graph = helper.make_graph(self.nodes, "net", inputs, infos, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)

    def _overflow(self, name: str) -> None:
        up = self.add("Mul", self.x, self.constant(3e3), name=f"{name}/up")
        far = self.add("Mul", up, self.constant(1e3), name=f"{name}/far")
        back = self.add("Mul", far, self.constant(1e-3), name=f"{name}/back")
        self.x = self.add("Mul", back, self.constant(1 / 3e3), name=f"{name}/down")

    def _cancel(self, name: str) -> None:
        offset = self.constant(3e3)
        self.x = self.add("Sub", self.add("Add", self.x, offset, name=f"{name}/add"), offset, name=f"{name}/sub")

    def _variance(self, name: str) -> None:
        z = self.add("Add", self.x, self.constant(30.0), name=f"{name}/shift")
        squares = self.add("ReduceMean", self.add("Mul", z, z, name=f"{name}/square"), axes=[1], name=f"{name}/mean_square")
        mean = self.add("ReduceMean", z, axes=[1], name=f"{name}/mean")
        variance = self.add("Sub", squares, self.add("Mul", mean, mean, name=f"{name}/square_mean"), name=f"{name}/variance")
        centred = self.add("Sub", z, mean, name=f"{name}/centred")
        deviation = self.add("Sqrt", self.add("Add", variance, self.constant(1e-5), name=f"{name}/eps"), name=f"{name}/sqrt")
        self.x = self.add("Tanh", self.add("Div", centred, deviation, name=f"{name}/div"), name=f"{name}/tanh")

    def _epsilon(self, name: str) -> None:
        small = self.add("Mul", self.x, self.constant(1e-5), name=f"{name}/small")
        square = self.add("ReduceMean", self.add("Mul", small, small, name=f"{name}/square"), axes=[1], name=f"{name}/mean")
        root = self.add("Sqrt", self.add("Add", square, self.constant(1e-12), name=f"{name}/eps"), name=f"{name}/sqrt")
        self.x = self.add("Tanh", self.add("Div", small, root, name=f"{name}/div"), name=f"{name}/tanh")

    def _exponential(self, name: str) -> None:
        powers = self.add("Exp", self.add("Mul", self.x, self.constant(15.0), name=f"{name}/mul"), name=f"{name}/exp")
        self.x = self.add("Mul", self.add("Log", powers, name=f"{name}/log"), self.constant(1 / 15.0), name=f"{name}/div")

    def _sum(self, name: str) -> None:
        parts = self.add(
            "Add", self.add("Mul", self.x, self.constant(2e4), name=f"{name}/mul"), self.constant(3e4), name=f"{name}/add"
        )
        total = self.add("ReduceSum", parts, self.shape([1]), keepdims=1, name=f"{name}/sum")
        self.x = self.add("Tanh", self.add("Div", parts, total, name=f"{name}/div"), name=f"{name}/tanh")

    def shape(self, value: int | Sequence[int]) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.int64), name))
        return name


def planted(layers: int, plants: Mapping[int, str], seed: int = 0) -> onnx.ModelProto:
    """A net of `layers` layers with plants after some of them, named after kind and place, such as "overflow_3"."""
    net = Net(seed)
    for index in range(layers):
        net.layers(1)
        if index in plants:
            net.plant(plants[index], f"{plants[index]}_{index}")
    return net.model()


def samples(count: int = 16, seed: int = 1) -> list[Array]:
    return [np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)]
