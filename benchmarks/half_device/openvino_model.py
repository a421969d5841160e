"""ONNX models in OpenVINO as the server runs them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_interface import read_interface
from halfserve.serve.backends.openvino.plugin import MOVING, PRECISIONS
from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime
from halfserve.serve.engine.backend import CpuPrecision, DevicePlacement
from tests.export.conversions.cases import Value


class OpenVinoModel:
    """A model loaded like in the server, with the interface of `tests.export.conversions.runtime.Session`.

    Args:
        model: The serialized ONNX model.
        precision: The precision of the nodes that have a half-precision type; float32 widens them.
        threads: Number of threads of a run.

    Raises:
        ModelLoadError: OpenVINO refuses the model.
    """

    def __init__(self, model: bytes, precision: CpuPrecision, threads: int = 1) -> None:
        placement = DevicePlacement(use_gpu=False, threads=threads)
        with tempfile.TemporaryDirectory(prefix="halfserve-openvino-") as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(model)
            self._interface = read_interface(path)
            self._backend = OpenVinoRuntime().load_onnx(path, self._interface, placement, ModelConfig(), precision)

    def run(self, inputs: Mapping[str, Value]) -> list[Value]:
        """Run once; floating inputs are cast to the type that the model takes.

        Raises:
            InvalidArgumentError: The server refuses such sizes or integers.
            InstanceLostError: OpenVINO fails.
        """
        names = [spec.name for spec in self._interface.inputs]
        answers = self._backend.run({name: np.asarray(inputs[name], self._backend.compute_dtype(name)) for name in names})
        return [answers[spec.name] for spec in self._interface.outputs]

    @property
    def precisions(self) -> list[str]:
        """The precision ("fp32", "fp16", "bf16") of each layer that computes floating-point numbers, not only moves them."""
        layers = [node.get_rt_info() for node in self._backend.compiled.get_runtime_model().get_ordered_ops()]
        found = [layer["runtimePrecision"].astype(str) for layer in layers if layer["layerType"].astype(str) not in MOVING]
        return [PRECISIONS[precision] for precision in found if precision in PRECISIONS]
