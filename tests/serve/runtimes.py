"""The runtimes that compute ONNX files on the CPU, for tests of what they have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import Backend, DevicePlacement, ModelInterface, Runtime


class OnOpenVino:
    """Computes every ONNX file with OpenVINO, except those with texts."""

    def __init__(self) -> None:
        self._onnx = OnnxRuntime()

    def describe(self, path: Path) -> ModelInterface:
        return self._onnx.describe(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> Backend:
        has_texts = any(spec.datatype.wire == "BYTES" for spec in (*interface.inputs, *interface.outputs))
        if has_texts:
            return self._onnx.load(path, interface, placement, config)
        from halfserve.serve.backends.openvino.runtime import OpenVinoRuntime  # noqa: PLC0415  (not where a GPU is tested)

        return OpenVinoRuntime().load(path, interface, placement, config)


RUNTIMES: dict[str, Callable[[], Runtime]] = {"onnx_runtime": OnnxRuntime, "openvino": OnOpenVino}
