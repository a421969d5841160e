"""Networks in files: a ResNet-50, a BERT-base and a MiniLM with random weights, which `exported_networks` has written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from halfserve.serve.engine.tensors import Array

FP32, FP16, BF16 = "fp32", "fp16", "bf16"
SMALL = 1024  # numbers; smaller tensors are constants of the graph, such as sizes, rather than weights
FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network in files."""

    name: str  # name of the network
    folder: Path  # folder with NAME_fp32.onnx and NAME_fp16.onnx
    rows: Callable[[int], Array]  # makes a batch

    def path(self, precision: str) -> Path:
        """Return the model file."""
        return self.folder / f"{self.name}_{precision}.onnx"

    def feeds(self, precision: str, count: int) -> dict[str, Array]:
        """Return a batch in the dtypes of that file."""
        x = self.rows(count)
        return {"x": x.astype(np.float16) if precision == FP16 and x.dtype == np.float32 else x}


def skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """Take the weights out of a model; each tensor keeps its mean and deviation, by which `filled` draws others."""
    empty = onnx.ModelProto()
    empty.CopyFrom(model)
    for tensor in empty.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.size > SMALL and tensor.data_type in FLOATS:
            values = values.astype(np.float32)
            tensor.doc_string = json.dumps([float(values.mean()), float(values.std())])
            tensor.ClearField("raw_data")
    return empty


def filled(model: onnx.ModelProto) -> onnx.ModelProto:
    """Draw the weights of a skeleton, the same ones every time. Files of one network in several types get different weights."""
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.doc_string:
            mean, deviation = json.loads(tensor.doc_string)
            values = random.standard_normal(tuple(tensor.dims), np.float32) * np.float32(deviation) + np.float32(mean)
            tensor.raw_data = values.astype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).tobytes()
    return model


def networks_of(skeletons: Path, folder: Path, names: list[str], *, tiny: bool) -> list[Network]:
    """Fill the skeletons that `benchmarks.cuda_device.bundle` has written, and write the networks of these names."""
    for path in sorted(skeletons.glob("*.onnx")):
        if path.stem.rpartition("_")[0] in names:
            onnx.save(filled(onnx.load(path)), folder / path.name)
    return [network_of(folder, name, tiny=tiny) for name in names]


def network_of(folder: Path, name: str, *, tiny: bool) -> Network:
    random = np.random.default_rng(0)
    side, words, length = (32 if tiny else 224), (100 if tiny else 30_522), {"bert": 128}.get(name, 50)

    def images(count: int) -> Array:
        return random.standard_normal((count, 3, side, side)).astype(np.float32)

    def tokens(count: int) -> Array:
        return random.integers(0, words, (count, length))

    return Network(name=name, folder=folder, rows=images if name == "resnet" else tokens)
