"""What a model's configuration says about its ONNX Runtime session, under the names that Triton's backend has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from protos.model_config_pb2 import ModelConfig
from serve.backends.onnx_runtime.accelerators import Accelerators, read_accelerators
from serve.backends.onnx_runtime.optimization_level import OptimizationLevel, declared_level
from serve.engine.config.parameters import own_parameter
from serve.engine.errors import ModelLoadError

# https://onnxruntime.ai/docs/api/c/onnxruntime__session__options__config__keys_8h.html: handed on as they are.
SESSION_KEYS = ("session.", "optimization.", "mlas.", "ep.")
# Of these, keys whose value is a path, which the runtime would read from or write to, wherever it leads; and the one that has a
# file read in another format than the one that was checked.
NAMING_FILES = ("file", "path", "folder", "session.resource_cuda_partitioning_settings", "session.load_model_format")
MAX_THREADS = 1024  # they are started at once, and each has a stack
SWITCH = {"0": False, "false": False, "1": True, "true": True}


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How to open a session.

    Attributes:
        level: the optimization level that the configuration asks for; None leaves the choice to the server.
        intra_op_threads: of one operator on the CPU; None where the configuration does not say, 0 for one a core.
        inter_op_threads: for operators side by side, where `parallel`; 0 for one a core.
        parallel: run operators that do not need each other at the same time.
        memory_arena: keep the CPU memory that a batch needed.
        memory_pattern: plan the memory of a batch in one piece.
        arena_shrinkage: devices whose arenas give memory back after each run, such as "cpu:0;gpu:0"; "" for none.
        session_entries: the runtime's own keys, handed on.
        accelerators: options of the CUDA and TensorRT providers.
        cuda_graphs: record the device's work per batch size, and replay it.
    """

    level: OptimizationLevel | None = None
    intra_op_threads: int | None = None
    inter_op_threads: int = 0
    parallel: bool = False
    memory_arena: bool = True
    memory_pattern: bool = True
    arena_shrinkage: str = ""
    session_entries: Mapping[str, str] = field(default_factory=dict)
    accelerators: Accelerators = field(default_factory=Accelerators)
    cuda_graphs: bool = False


def read_settings(config: ModelConfig, path: Path) -> SessionSettings:
    """The settings in a configuration.

    Args:
        config: of the model.
        path: the model file, for errors.

    Raises:
        ModelLoadError: a value is not what its key takes.
    """
    parameters = {key: value.string_value.strip() for key, value in config.parameters.items()}
    graphs, accelerators = own_parameter(config, "halfserve.cuda_graphs", path), read_accelerators(config, path)
    if graphs is None:
        graphs = config.optimization.cuda.graphs if accelerators.cuda_graphs is None else accelerators.cuda_graphs
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
        cuda_graphs=bool(graphs),
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
