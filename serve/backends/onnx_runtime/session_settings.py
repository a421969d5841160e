"""Session settings from a model's configuration, under Triton's names for its ONNX Runtime backend.

`model_operations { op_library_filename: "..." }` names libraries of custom operators. The package onnxruntime-extensions
(tokenizers, text operators, image decoders) is referred to by its name and is trusted like any installed package. A file in the
repository can run any code as the server's user once it is loaded, so it needs an option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path

from halfserve.installation import install_hint
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.config.model_config import OPERATOR_PACKAGES
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.disk_files import require_regular
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import require_file_name, require_inside

OPTIMIZATION_LEVEL = "halfserve.optimization_level"
# HEURISTIC and EXHAUSTIVE name modes of cuDNN's heuristics, DEFAULT its fallback mode, whose plans are slower. Each Conv keeps
# the plan of its last input shape alone, so that a change of the shape costs a query and a plan, whatever the mode.
CUDA_DEFAULTS = {"cudnn_conv_algo_search": "HEURISTIC"}
# Triton's older form of CUDA options: model parameters, with numbers for names.
CUDA_PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "gpu_mem_limit": {},
    "do_copy_in_default_stream": {},
}
# Triton's names of TensorRT options that differ from the runtime's.
TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TENSORRT_PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "INT8": "trt_int8_enable"}
CUDA_WAYS_KEY, PREFER_NHWC = "halfserve.cuda_ways", "prefer_nhwc"
SWITCHES = {"true": "1", "false": "0"}
# CUDA graphs need fixed buffers, which the server provides for the CUDA provider only.
CUDA_GRAPH, TENSORRT_GRAPH = "enable_cuda_graph", "trt_cuda_graph_enable"
# Prefixes of keys that are passed on: https://onnxruntime.ai/docs/api/c/onnxruntime__session__options__config__keys_8h.html
SESSION_KEYS = ("session.", "optimization.", "mlas.", "ep.")
# Parts of keys that are refused: they name paths that the runtime would read or write, or change the file's format.
NAMING_FILES = ("file", "path", "folder", "session.resource_cuda_partitioning_settings", "session.load_model_format")
MAX_THREADS = 1024  # all threads are started at once, each with a stack
SWITCH = {"0": False, "false": False, "1": True, "true": True}


class OptimizationLevel(Enum):
    """Optimization levels from all rewrites to none; the values are those of the runtime's GraphOptimizationLevel."""

    ALL = 99
    EXTENDED = 2
    BASIC = 1
    DISABLED = 0

    @property
    def label(self) -> str:
        """Name in configurations: "all", "extended", "basic" or "disabled"."""
        return self.name.lower()


# Triton's levels in `optimization { graph { level } }`; an absent one reads as 0, which means all.
TRITON_LEVELS = {-1: OptimizationLevel.BASIC, 1: OptimizationLevel.EXTENDED, 2: OptimizationLevel.DISABLED}


def declared_level(config: ModelConfig, path: Path) -> OptimizationLevel | None:
    """Read the configured level, from halfserve's parameter or Triton's field; None if not configured.
    Raises ModelLoadError: there is no such level.
    """
    own = own_parameter(config, OPTIMIZATION_LEVEL, path)
    if own is not None:
        return OptimizationLevel[str(own).upper()]
    level = config.optimization.graph.level
    if level and level not in TRITON_LEVELS:
        raise ModelLoadError(
            f"{path}: optimization.graph.level is {level}, expected 0 (all), 1 (extended), -1 (basic) or 2 (disabled)"
        )
    return TRITON_LEVELS.get(level)


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """Provider options, in ONNX Runtime's names."""

    cuda: Mapping[str, str] = field(default_factory=lambda: dict(CUDA_DEFAULTS))  # options of the CUDA provider
    tensorrt: Mapping[str, str] | None = None  # options of the TensorRT provider; None if it is not requested
    cuda_graphs: bool | None = None  # whether the CUDA provider records graphs; None if not configured


def read_accelerators(config: ModelConfig, path: Path) -> Accelerators:
    """Read provider options from the accelerators of GPUs in a configuration, with the keys of Triton's ONNX Runtime backend.

    Accelerators of CPUs belong to another runtime: see onnx_models.py. Raises ModelLoadError: an accelerator or precision is
    unknown, or CUDA graphs are requested for TensorRT.
    """
    cuda = {**CUDA_DEFAULTS, **_from_parameters(config)}
    tensorrt = None
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
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


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    level: OptimizationLevel | None = None  # optimization level; None leaves the choice to the server
    intra_op_threads: int | None = None  # threads for one operator on the CPU; None if not configured, 0 for one per core
    inter_op_threads: int = 0  # threads for parallel operators; 0 for one per core
    parallel: bool = False  # whether independent operators run at the same time
    memory_arena: bool = True  # whether CPU memory is kept between batches
    memory_pattern: bool = True  # whether a batch's memory is planned as one block
    arena_shrinkage: str = ""  # devices whose arenas shrink after each run, such as "cpu:0;gpu:0"; "" for none
    session_entries: Mapping[str, str] = field(default_factory=dict)  # the runtime's own keys, which are passed on
    accelerators: Accelerators = field(default_factory=Accelerators)  # options of the CUDA and TensorRT providers
    cuda_graphs: bool | None = None  # whether CUDA graphs are recorded per batch size; None leaves the choice to the server
    cuda_ways: frozenset[str] = frozenset()  # further ways to compute on a CUDA device, of CUDA_WAYS
    operator_libraries: tuple[str, ...] = ()  # paths of libraries with custom operators


def read_settings(config: ModelConfig, path: Path) -> SessionSettings:
    """Read the settings in a model's configuration; `path` is the model file, for errors.
    Raises ModelLoadError: a value is invalid.
    """
    parameters = {key: value.string_value.strip() for key, value in config.parameters.items()}
    graphs, accelerators = own_parameter(config, "halfserve.cuda_graphs", path), read_accelerators(config, path)
    if graphs is None:
        graphs = accelerators.cuda_graphs
    if graphs is None and config.optimization.HasField("cuda"):
        graphs = config.optimization.cuda.graphs
    ways = own_parameter(config, CUDA_WAYS_KEY, path) or frozenset()
    if "nhwc" in ways:
        accelerators = replace(accelerators, cuda={PREFER_NHWC: "1", **accelerators.cuda})
    return SessionSettings(
        level=declared_level(config, path),
        intra_op_threads=_count(parameters, "intra_op_thread_count", path),
        inter_op_threads=_count(parameters, "inter_op_thread_count", path) or 0,
        parallel=_switch(parameters, "execution_mode", path, default=False),
        memory_arena=_switch(parameters, "enable_mem_arena", path, default=True),
        memory_pattern=_switch(parameters, "enable_mem_pattern", path, default=True),
        arena_shrinkage=parameters.get("memory.enable_memory_arena_shrinkage", ""),
        session_entries=_entries(parameters, path),
        accelerators=accelerators,
        cuda_graphs=graphs,
        cuda_ways=ways,
    )


def _entries(parameters: Mapping[str, str], path: Path) -> dict[str, str]:
    entries = {key: value for key, value in parameters.items() if key.startswith(SESSION_KEYS)}
    for key in entries:
        if any(word in key for word in NAMING_FILES):
            raise ModelLoadError(f"{path}: parameter {key!r} has the runtime use files, which no model decides; remove it")
    return entries


def _count(parameters: Mapping[str, str], key: str, path: Path) -> int | None:
    value = parameters.get(key)
    if value is None:
        return None
    number = re.fullmatch("0*([0-9]{1,4})", value)
    if number is None or int(number[1]) > MAX_THREADS:
        raise ModelLoadError(
            f"{path}: parameter {key!r} is {value!r}, expected a whole number of 0 (one a core) to {MAX_THREADS}"
        )
    return int(number[1])


def _switch(parameters: Mapping[str, str], key: str, path: Path, *, default: bool) -> bool:
    value = parameters.get(key)
    if value is None:
        return default
    if value.lower() not in SWITCH:
        raise ModelLoadError(f"{path}: parameter {key!r} is {value!r}, expected '0' or '1'")
    return SWITCH[value.lower()]


TRUST_OPTION = "--trust-custom-operators"
PACKAGE = "onnxruntime_extensions"
LIBRARY = "_extensions_pydll"  # name of the library in the package
FOLDERS = 3  # number of folders to search: a version's, the fp32 twin's below it, and the model's above


def operator_libraries(config: ModelConfig, path: Path, *, trusted: bool) -> tuple[str, ...]:
    """Return the paths of the libraries that a model's sessions register, from the folder of its version or of its model.

    `trusted`: whether libraries of the repository may be loaded. Raises ModelLoadError: see `library_path`; or the package is
    not installed.
    """
    return tuple(_library(name, path, trusted=trusted) for name in config.model_operations.op_library_filename)


def _library(name: str, path: Path, *, trusted: bool) -> str:
    if name in OPERATOR_PACKAGES:
        found = packaged_library()
        if found is None:
            raise ModelLoadError(
                f"{path}: needs the operators of onnxruntime-extensions, which is not installed; {install_hint('extensions')}"
            )
        return found
    hint = f". The package {PACKAGE!r} needs no option"
    return library_path(name, path, "model_operations", trusted=trusted, hint=hint)


def library_path(name: str, path: Path, setting: str, *, trusted: bool, hint: str = "") -> str:
    """Return the path of a library in a version's folder, or in its model's; `setting` is the setting that names it.

    Raises ModelLoadError: the library is not trusted (the text ends in `hint`), not there, or not in the model's folder.
    """
    if not trusted:
        raise ModelLoadError(
            f"{path}: {setting} names the library {name!r}, which can run any code as the server's user when it is "
            f"loaded; start the server with {TRUST_OPTION} if you trust everybody who writes files there{hint}"
        )
    require_file_name(name, f"{path}: {setting} is")
    folders = path.absolute().parents[:FOLDERS]
    library = next((folder / name for folder in folders if (folder / name).exists()), None)
    if library is None:
        raise ModelLoadError(f"{path}: the library {name!r} of {setting} is not in the model's folder; copy it there")
    require_inside(folders[-1], library)
    try:
        require_regular(library)
    except OSError as error:
        raise ModelLoadError(f"{path}: the library {name!r} cannot be read: {error.strerror}") from None
    return str(library)


@cache
def packaged_library() -> str | None:
    """Return the path of the package's library; None if it is not installed."""
    # The library is found without import: the package would import torch, and make later processes use protobuf's slow version.
    package = PathFinder.find_spec(PACKAGE)
    module = PathFinder.find_spec(LIBRARY, package.submodule_search_locations) if package else None
    return module.origin if module else None


def stamp(library: str) -> str:
    """Return a text that changes when a library changes; "" if it is gone."""
    try:
        status = Path(library).stat()
    except OSError:
        return ""
    return f"{library} {status.st_size} {status.st_mtime_ns}"
