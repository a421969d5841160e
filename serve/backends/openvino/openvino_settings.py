"""The settings of an OpenVINO model in its configuration: the documented parameters of Triton's OpenVINO backend.

Some of them are checked but have no effect: batches of every size are computed as they are, so that a model needs no padding to
one size (ENABLE_BATCH_PADDING) and keeps its own batch dimension (SKIP_OV_DYNAMIC_BATCHSIZE), and the CPU plugin compiles on
its caller's thread (COMPILATION_NUM_THREADS).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.session_settings import library_path
from halfserve.serve.engine.config.model_config import EXTENSION
from halfserve.serve.engine.config.parameters import PREFIX
from halfserve.serve.engine.errors import ModelLoadError

MAX_THREADS = 1024  # all threads are started at once, each with a stack
HINTS = frozenset({"LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT"})
Check = Callable[[str], bool]


def _is_count(value: str) -> bool:
    return re.fullmatch("0*[0-9]{1,4}", value) is not None and int(value) <= MAX_THREADS


def _is_switch(value: str) -> bool:
    return value in {"YES", "NO"}


# Parameter name -> (function that checks a value in capitals, description of the valid values).
PARAMETERS: dict[str, tuple[Check, str]] = {
    "COMPILATION_NUM_THREADS": (_is_count, f"a whole number of 0 to {MAX_THREADS}"),
    EXTENSION: (bool, "the name of a library in the model's folder"),
    "ENABLE_BATCH_PADDING": (_is_switch, "YES or NO"),
    "HINT_BF16": (lambda value: value == "YES", "YES"),
    "INFERENCE_NUM_THREADS": (_is_count, f"a whole number of 0 (one a core) to {MAX_THREADS}"),
    "NUM_STREAMS": (lambda value: value in {"AUTO", "NUMA"} or _is_count(value), "AUTO, NUMA or a whole number"),
    "PERFORMANCE_HINT": (lambda value: value in HINTS, ", ".join(sorted(HINTS))),
    "RESHAPE_IO_LAYERS": (lambda value: value == "NO", "NO: reshape the model when you convert it (ov.Model.reshape)"),
    "SKIP_OV_DYNAMIC_BATCHSIZE": (_is_switch, "YES or NO"),
    "TARGET_DEVICE": (lambda value: value == "CPU", "CPU"),
}


@dataclass(frozen=True, kw_only=True)
class OpenVinoSettings:
    threads: int | None = None  # number of threads for one batch; None if not configured, 0 for one per core
    streams: str | None = None  # NUM_STREAMS; None for one, because a copy of a model computes one batch at a time
    performance_hint: str | None = None  # PERFORMANCE_HINT; None if not configured
    hint_bf16: bool = False  # whether float32 parts of the graph are computed in bf16
    extension: str | None = None  # path of a library of operators; None for none


def read_openvino_settings(config: ModelConfig, path: Path, *, trusted: bool) -> OpenVinoSettings:
    """Read the settings in a model's configuration; `trusted`: whether libraries of the repository may be loaded.

    Raises ModelLoadError: a parameter is not known, has an invalid value, or names a library that is not trusted or not there.
    """
    given = {key: value.string_value.strip() for key, value in config.parameters.items() if not key.startswith(PREFIX)}
    for key, value in given.items():
        if key not in PARAMETERS:
            raise ModelLoadError(
                f"{path}: parameter {key!r} is not one of an OpenVINO model, expected {', '.join(PARAMETERS)}; remove it"
            )
        is_valid, expected = PARAMETERS[key]
        if not is_valid(value.upper()):
            raise ModelLoadError(f"{path}: parameter {key!r} is {value!r}, expected {expected}")
    upper = {key: value.upper() for key, value in given.items()}
    return OpenVinoSettings(
        threads=_number(upper, "INFERENCE_NUM_THREADS"),
        streams=upper.get("NUM_STREAMS"),
        performance_hint=upper.get("PERFORMANCE_HINT"),
        hint_bf16="HINT_BF16" in upper,
        extension=library_path(given[EXTENSION], path, EXTENSION, trusted=trusted) if EXTENSION in given else None,
    )


def _number(given: dict[str, str], key: str) -> int | None:
    return int(given[key]) if key in given else None
