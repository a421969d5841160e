"""Options of the CUDA and TensorRT providers, from a configuration's `optimization { execution_accelerators }`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.engine.errors import ModelLoadError

# A new input shape costs milliseconds instead of an exhaustive search's hundreds.
CUDA_DEFAULTS = {"cudnn_conv_algo_search": "HEURISTIC"}
# Triton's older place for CUDA options: the model's parameters, with numbers for names.
CUDA_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "gpu_mem_limit": {},
    "do_copy_in_default_stream": {},
}
# Where Triton's name for a TensorRT option is not the runtime's own.
TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TENSORRT_PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "INT8": "trt_int8_enable"}
SWITCHES = {"true": "1", "false": "0"}
# Replays read and write where the recorded run did, which the server sees to for the CUDA provider: see cuda_graphs.
CUDA_GRAPH, TENSORRT_GRAPH = "enable_cuda_graph", "trt_cuda_graph_enable"


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """Provider options, in ONNX Runtime's names.

    Attributes:
        cuda: of the CUDA provider.
        tensorrt: of the TensorRT provider; None where it is not asked for.
        cuda_graphs: the CUDA provider is to record its work, which is no option of it here; None where nothing is said.
    """

    cuda: Mapping[str, str] = field(default_factory=lambda: dict(CUDA_DEFAULTS))
    tensorrt: Mapping[str, str] | None = None
    cuda_graphs: bool | None = None


def read_accelerators(config: ModelConfig, path: Path) -> Accelerators:
    """The provider options in a configuration; see Triton's ONNX Runtime backend for the keys.

    Args:
        config: of the model.
        path: the model file, for errors.

    Raises:
        ModelLoadError: an accelerator or a precision is not known, or TensorRT is to record CUDA graphs.
    """
    asked = config.optimization.execution_accelerators
    for accelerator in asked.cpu_execution_accelerator:
        raise ModelLoadError(f"{path}: cpu_execution_accelerator {accelerator.name!r} is not supported; remove it")
    cuda = {**CUDA_DEFAULTS, **_from_parameters(config)}
    tensorrt = None
    for accelerator in asked.gpu_execution_accelerator:
        options = dict(accelerator.parameters)
        if accelerator.name == "cuda":
            cuda |= options
        elif accelerator.name == "tensorrt":
            tensorrt = _tensorrt(options, path)
        else:
            raise ModelLoadError(
                f"{path}: gpu_execution_accelerator {accelerator.name!r} is not known, expected 'tensorrt' or 'cuda'"
            )
    graphs = cuda.pop(CUDA_GRAPH, None)
    return Accelerators(cuda=cuda, tensorrt=tensorrt, cuda_graphs=None if graphs is None else _is_on(graphs))


def _from_parameters(config: ModelConfig) -> dict[str, str]:
    found = {}
    for key, names in CUDA_PARAMETERS.items():
        if key in config.parameters:
            value = config.parameters[key].string_value
            found[key] = names.get(value, value)
    return found


def _tensorrt(options: dict[str, str], path: Path) -> dict[str, str]:
    precision = options.pop("precision_mode", "FP32")
    if precision not in TENSORRT_PRECISIONS:
        known = ", ".join(TENSORRT_PRECISIONS)
        raise ModelLoadError(f"{path}: tensorrt's precision_mode is {precision!r}, expected one of {known}")
    switch = TENSORRT_PRECISIONS[precision]
    result = {} if switch is None else {switch: "1"}
    for key, value in options.items():
        result[TENSORRT_NAMES.get(key, key)] = SWITCHES.get(value.lower(), value)
    if _is_on(result.get(TENSORRT_GRAPH, "0")):
        raise ModelLoadError(f"{path}: tensorrt's {TENSORRT_GRAPH} is on, which would answer from an earlier batch; remove it")
    return result


def _is_on(text: str) -> bool:
    return SWITCHES.get(text.lower(), text) == "1"
