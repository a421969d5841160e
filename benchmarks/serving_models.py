"""The models used to compare servers, with random weights.

python -m benchmarks.serving_models FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnx
import typer
from onnx import TensorProto, helper, numpy_helper

HALF = TensorProto.FLOAT16
Shape = list[int | str]


class Net:
    """Builds an fp16 graph from input "x" to output "y"."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self.end = "x"

    def weight(self, *shape: int) -> str:
        """Return a random weight, scaled so that activations keep their size."""
        name = f"w{len(self._weights)}"
        scale = float(np.prod(shape[1:])) ** -0.5
        values = (self._random.standard_normal(shape) * scale).astype(np.float16)
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append a node, whose output becomes the current end."""
        output = f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], **attributes))
        self.end = output
        return output

    def convolution(self, channels: int, kept: int, stride: int = 1) -> None:
        """Add a 3x3 convolution with padding, then Relu."""
        self.add("Conv", self.end, self.weight(channels, kept, 3, 3), pads=[1, 1, 1, 1], strides=[stride, stride])
        self.add("Relu", self.end)

    def linear(self, inputs: int, outputs: int) -> None:
        """Add a matrix product."""
        self.add("Gemm", self.end, self.weight(outputs, inputs), transB=1)

    def model(self, input_shape: Shape, output_shape: Shape) -> onnx.ModelProto:
        """Return the finished model."""
        self.add("Identity", self.end)
        self._nodes[-1].output[0] = "y"
        graph = helper.make_graph(
            self._nodes,
            "net",
            [helper.make_tensor_value_info("x", HALF, input_shape)],
            [helper.make_tensor_value_info("y", HALF, output_shape)],
            self._weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model


def mlp() -> onnx.ModelProto:
    """64-256-10: so little compute that the server itself is measured."""
    net = Net()
    net.linear(64, 256)
    net.add("Relu", net.end)
    net.linear(256, 10)
    return net.model(["batch", 64], ["batch", 10])


def image() -> onnx.ModelProto:
    """3x224x224, which are 301,056 bytes a row, and little work."""
    net = Net()
    net.add("GlobalAveragePool", net.end)
    net.add("Flatten", net.end)
    net.linear(3, 10)
    return net.model(["batch", 3, 224, 224], ["batch", 10])


def resnet() -> onnx.ModelProto:
    """3x32x32 through ten convolutions with shortcuts: nearly all of the time is spent in the model."""
    net = Net()
    net.convolution(64, 3)
    for _ in range(3):
        shortcut = net.end
        net.convolution(64, 64)
        net.convolution(64, 64)
        net.add("Add", net.end, shortcut)
    net.convolution(128, 64, stride=2)
    net.convolution(128, 128)
    net.convolution(128, 128)
    net.add("GlobalAveragePool", net.end)
    net.add("Flatten", net.end)
    net.linear(128, 10)
    return net.model(["batch", 3, 32, 32], ["batch", 10])


def cnn() -> onnx.ModelProto:
    """3x224x224, which are 301,056 bytes a row, through four convolutions of stride 2: some 10 ms a row."""
    net = Net()
    for kept, channels in ((3, 32), (32, 64), (64, 128), (128, 256)):
        net.convolution(channels, kept, stride=2)
    net.add("GlobalAveragePool", net.end)
    net.add("Flatten", net.end)
    net.linear(256, 10)
    return net.model(["batch", 3, 224, 224], ["batch", 10])


MODELS = {"mlp": mlp, "image": image, "resnet": resnet, "cnn": cnn}


def main(folder: Annotated[Path, typer.Argument(help="Where <name>.onnx are written.")]) -> None:
    """Write all models."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, build in MODELS.items():
        onnx.save(build(), folder / f"{name}.onnx")
        print(folder / f"{name}.onnx")


if __name__ == "__main__":
    typer.run(main)
