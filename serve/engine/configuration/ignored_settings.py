"""Which settings of a config.pbtxt have no effect here: nothing that a user wrote is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from google.protobuf.message import Message

from protos.model_config_pb2 import ModelConfig
from serve.engine.model_kinds import ONNX, ModelKind

# What this server acts on, by path; anything else in a config.pbtxt is kept, shown to clients and named in a warning.
# "*" stands for whatever is below.
HONOURED = frozenset(
    {
        *("name", "platform", "backend", "version_policy.*", "max_batch_size", "default_model_filename", "parameters.*"),
        "model_warmup.*",
        *("input.name", "input.data_type", "input.dims", "input.reshape.*", "input.format"),
        *("output.name", "output.data_type", "output.dims", "output.reshape.*", "output.label_filename"),
        *("instance_group.name", "instance_group.kind", "instance_group.count", "instance_group.gpus"),
        *("optimization.graph.level", "optimization.cuda.graphs", "optimization.execution_accelerators.*"),
        *("dynamic_batching.preferred_batch_size", "dynamic_batching.max_queue_delay_microseconds"),
        *("dynamic_batching.priority_levels", "dynamic_batching.default_priority_level"),
        *("dynamic_batching.default_queue_policy.*", "dynamic_batching.priority_queue_policy.*"),
    }
)
# What ONNX Runtime alone acts on: settings by path, parameters by key, and by how their keys begin.
ONNX_ONLY = frozenset({"optimization.graph.level", "optimization.cuda.graphs", "optimization.execution_accelerators"})
ONNX_ONLY_PARAMETERS = frozenset(
    {
        *("halfserve.optimization_level", "halfserve.cuda_graphs"),
        *("inter_op_thread_count", "execution_mode", "enable_mem_arena", "enable_mem_pattern"),
        *("memory.enable_memory_arena_shrinkage", "cudnn_conv_algo_search", "arena_extend_strategy", "gpu_mem_limit"),
        "do_copy_in_default_stream",
    }
)
ONNX_ONLY_PREFIXES = ("session.", "optimization.", "mlas.", "ep.")
# What a CUDA device alone is told.
DEVICE_ONLY = frozenset({"optimization.cuda.graphs", "optimization.execution_accelerators"})
DEVICE_ONLY_PARAMETERS = frozenset(
    {
        *("halfserve.cuda_graphs", "cudnn_conv_algo_search", "arena_extend_strategy", "gpu_mem_limit"),
        "do_copy_in_default_stream",
    }
)
# Parameters are free for anyone's use; this one is known to mean something to Triton.
UNKNOWN_HERE = frozenset({"share_session_between_instances"})


def ignored_settings(config: ModelConfig, kind: ModelKind, *, on_device: bool) -> list[str]:
    """Paths of the settings in a config.pbtxt that this server does not act on, for a warning.

    Args:
        config: as read.
        kind: of the model file.
        on_device: the model, or a copy of it, computes on a CUDA device.
    """
    dropped, parameters, prefixes = frozenset[str](), UNKNOWN_HERE, tuple[str, ...]()
    if not on_device:
        dropped, parameters = DEVICE_ONLY, parameters | DEVICE_ONLY_PARAMETERS
    if kind is not ONNX:
        dropped, parameters, prefixes = dropped | ONNX_ONLY, parameters | ONNX_ONLY_PARAMETERS, ONNX_ONLY_PREFIXES
    keys = (key for key in config.parameters if key in parameters or key.startswith(prefixes))
    return sorted({*_ignored(config, "", dropped), *(f"parameters.{key}" for key in keys)})


def _ignored(message: Message, prefix: str, dropped: AbstractSet[str]) -> Iterator[str]:
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if path in dropped:
            yield path
            continue
        if path in HONOURED or f"{path}.*" in HONOURED:
            continue
        if not any(known.startswith(f"{path}.") for known in HONOURED):
            yield path
            continue
        for part in value if field.is_repeated else [value]:
            yield from _ignored(part, f"{path}.", dropped)
