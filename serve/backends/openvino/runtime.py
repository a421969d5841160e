"""OpenVINO behind the engine's backend interface: reads model.xml and compiles it for the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import openvino as ov

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.crash_probe import CrashProbe, ProbedLoad
from halfserve.serve.backends.onnx_runtime.onnx_file import open_onnx
from halfserve.serve.backends.onnx_runtime.onnx_preparation import BF16_AS_FP16, FP16_AS_BF16, UPCAST, prepared
from halfserve.serve.backends.onnx_runtime.request_errors import index_ranges
from halfserve.serve.backends.onnx_runtime.session_settings import OptimizationLevel, read_settings, stamp
from halfserve.serve.backends.openvino.compiled_model import OpenVinoBackend
from halfserve.serve.backends.openvino.ir_file import read_ir_interface
from halfserve.serve.backends.openvino.plugin import (
    Compilation,
    OpenVinoSettings,
    compiled_with,
    in_words,
    properties,
    read_openvino_settings,
)
from halfserve.serve.engine.backend import ALLOW_CPU, ONNX, OPENVINO_BACKEND, CpuPrecision, DevicePlacement, ModelInterface
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.errors import ModelLoadError

# Replacements of the file's types, by the precision in which a graph is computed.
TYPES: Mapping[CpuPrecision, Mapping[int, int]] = {CpuPrecision.BFLOAT16: FP16_AS_BF16, CpuPrecision.FLOAT16: BF16_AS_FP16}


class OpenVinoRuntime:
    """Loads OpenVINO's own files, and ONNX files whose configuration asks for OpenVINO."""

    def __init__(self, probe: CrashProbe | None = None, *, trust_custom_operators: bool = False) -> None:
        """`probe` loads models in another process first; None loads them without a trial. `trust_custom_operators`: see
        `OnnxRuntime`.
        """
        self._probe = probe
        self._trust_custom_operators = trust_custom_operators

    def describe(self, path: Path) -> ModelInterface:
        """Read the interface of an OpenVINO file without its weights.
        Raises ModelLoadError: a file is missing or unreadable, is no OpenVINO graph, or has inputs without a wire type.
        """
        return read_ir_interface(path)

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> OpenVinoBackend:
        """Load one copy on the CPU. An OpenVINO graph is computed in the types in which it is written.
        Raises ModelLoadError: a setting is invalid, OpenVINO refuses the model, it crashes its process, or a GPU is required.
        """
        if interface.kind is ONNX:
            return self.load_onnx(path, interface, placement, config, placement.cpu_precision)
        _require_cpu(path, placement)
        settings = read_openvino_settings(config, path, trusted=self._trust_custom_operators)
        return OpenVinoBackend.of(self._compiled(path, str(path), settings, placement), interface, config, {}, {})

    def load_onnx(
        self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig, precision: CpuPrecision
    ) -> OpenVinoBackend:
        """Load one copy of an ONNX file; see `Runtime.load`. The `precision` AUTO means float32.

        Nodes of a half-precision type are computed in `precision`, and float32 nodes in float32.

        Raises:
            ModelLoadError: see `load`.
        """
        _require_cpu(path, placement)
        if config.backend == OPENVINO_BACKEND:
            settings = read_openvino_settings(config, path, trusted=self._trust_custom_operators)
        else:
            settings = OpenVinoSettings(threads=read_settings(config, path).intra_op_threads)
        types = TYPES.get(precision, UPCAST)
        with prepared(path, for_gpu=False, types=types) as model:
            compilation, names = self._compiled(path, model.source, settings, placement, str(precision)), model.given_names
            compilation = replace(compilation, precision=in_words(compilation.nodes, model.halves))
        with open_onnx(path) as file:
            ranges = index_ranges(file.model.graph)
        return OpenVinoBackend.of(compilation, interface, config, ranges, names)

    def _compiled(
        self, path: Path, source: str | bytes, settings: OpenVinoSettings, placement: DevicePlacement, prepared_for: str = ""
    ) -> Compilation:
        if self._probe is not None:
            extension = settings.extension or ""
            trial = ProbedLoad(
                path=path,
                request={"openvino": properties(settings, 1), "extension": extension},
                circumstances=[ov.__version__, prepared_for, stamp(extension)],
                levels=(OptimizationLevel.ALL,),  # OpenVINO has no switch for its optimizations
            )
            _require_survival(self._probe, trial, source)
        pause()
        return compiled_with(source, path, settings, placement.threads)


def _require_survival(probe: CrashProbe, trial: ProbedLoad, source: str | bytes) -> None:
    verdict = probe.verdict(trial, source)
    if verdict is not None and verdict.level is None:
        raise ModelLoadError(
            f"{trial.path}: the model ends OpenVINO {ov.__version__}'s process ({', '.join(verdict.crashes.values())}); "
            "convert it in another way, or serve its ONNX file with ONNX Runtime"
        )


def _require_cpu(path: Path, placement: DevicePlacement) -> None:
    if placement.require_gpu:
        raise ModelLoadError(
            f"{path}: a GPU is required, but OpenVINO runs models on the CPU here, not on CUDA device {placement.device_id}; "
            f"{ALLOW_CPU}"
        )
