"""The runtimes that compute ONNX files on the CPU, for tests of what they have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime
from halfserve.serve.engine.backend import Backend, DevicePlacement, ModelInterface, Runtime


class OnOpenVino:
    """Computes every ONNX file with OpenVINO, except those with texts."""

    def __init__(self) -> None:
        self._onnx = OnnxRuntime()

    def describe(self, path: Path) -> ModelInterface:
        return self._onnx.describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        has_texts = any(spec.datatype.wire == "BYTES" for spec in (*interface.inputs, *interface.outputs))
        runtime: Runtime = self._onnx if has_texts else OpenVinoRuntime()
        return runtime.load(path, interface, placement, config)


RUNTIMES: dict[str, Callable[[], Runtime]] = {"onnx_runtime": OnnxRuntime, "openvino": OnOpenVino}
