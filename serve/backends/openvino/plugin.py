"""OpenVINO's CPU plugin: its settings in a model's configuration, compiled graphs, and the type in which each node ran.

With INFERENCE_PRECISION_HINT=dynamic a graph is computed in the types in which it is written, where the processor has them:
https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference/precision-control.html
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.session_settings import library_path
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.model_config import EXTENSION
from halfserve.serve.engine.config.parameters import PREFIX
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.resource_limits import fewer_cores

MAX_THREADS = 1024  # all threads are started at once, each with a stack
HINTS = frozenset({"LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT"})
Check = Callable[[str], bool]


def _is_count(value: str) -> bool:
    return re.fullmatch("0*[0-9]{1,4}", value) is not None and int(value) <= MAX_THREADS


def _is_switch(value: str) -> bool:
    return value in {"YES", "NO"}


# The documented parameters of Triton's OpenVINO backend, with a function that checks a value in capitals, and the valid values.
# Some have no effect: batches of every size are computed as they are, so that a model needs no padding to one size
# (ENABLE_BATCH_PADDING) and keeps its own batch dimension (SKIP_OV_DYNAMIC_BATCHSIZE), and the CPU plugin compiles on its
# caller's thread (COMPILATION_NUM_THREADS).
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


DEVICE = "CPU"
HALVES = ("fp16", "bf16")
PRECISIONS = {"bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64"}  # halfserve's names of precisions, by OpenVINO's
# Layers of a compiled graph that move numbers, or change their type, and do not compute.
MOVING = frozenset(
    {
        *("Input", "Output", "Const", "Convert", "Reorder", "Reshape", "Transpose", "Concatenation", "Split", "StridedSlice"),
        *("Gather", "Broadcast", "Tile", "Pad", "ShapeOf", "MemoryInput", "MemoryOutput"),
    }
)
PREFIX_LINE = re.compile(r"^(Exception from|Check ').*|^\s*$")


@dataclass(frozen=True, kw_only=True)
class Compilation:
    model: ov.Model  # the model before its compilation
    compiled: ov.CompiledModel  # the compiled model
    nodes: Mapping[str, int]  # number of computing nodes by the type in which they are computed; see `precisions`
    precision: str  # precision of the computation, in words

    @property
    def nodes_in_words(self) -> str:
        """Node counts such as "OpenVINO bf16=12, OpenVINO fp32=3", most first."""
        return ", ".join(f"OpenVINO {name}={count}" for name, count in sorted(self.nodes.items(), key=lambda item: -item[1]))


@cache
def core() -> ov.Core:
    """Return the process's only core: its plugin keeps one pool of threads for all models."""
    return ov.Core()


@cache
def properties(settings: OpenVinoSettings, threads: int) -> dict[str, Any]:
    """Return OpenVINO's properties for compiling a graph in the types in which it is written.

    `threads`: number of threads of a batch; 0 for one per usable core.
    """
    threads = (threads if settings.threads is None else settings.threads) or fewer_cores()
    chosen: dict[str, Any] = {
        # Without this hint, weights in 8 bits would have activations rounded to 8 bits too.
        "EXECUTION_MODE_HINT": "ACCURACY",
        "INFERENCE_PRECISION_HINT": "bf16" if settings.hint_bf16 else "dynamic",
        "NUM_STREAMS": settings.streams or "1",
        # Threads that are bound to cores would compete with the event loop's for one of them.
        "ENABLE_CPU_PINNING": False,
        # A file that is truncated while it is mapped would end the process.
        "ENABLE_MMAP": False,
    }
    if threads:
        chosen["INFERENCE_NUM_THREADS"] = threads
    if settings.performance_hint is not None:
        chosen["PERFORMANCE_HINT"] = settings.performance_hint
    return chosen


def compiled_with(source: str | bytes, path: Path, settings: OpenVinoSettings, threads: int) -> Compilation:
    """Compile a model: its bytes, or the file of that path. `path` is the original file, for errors; `threads`: see
    `properties`. Raises ModelLoadError: OpenVINO refuses the model, or its library of operators.
    """
    try:
        own = core()
        if settings.extension is not None:
            own = ov.Core()  # a separate core, because operators of one model are not for others
            own.add_extension(settings.extension)
        model = own.read_model(model=source)
        pause()
        written = {PRECISIONS[name] for op in model.get_ops() for out in op.outputs() if (name := _type(out)) in PRECISIONS}
        compiled = own.compile_model(model, DEVICE, properties(settings, threads))
    except Exception as error:
        # The bindings raise RuntimeErrors and others, without a common base class.
        raise ModelLoadError(f"{path}: OpenVINO refuses the model: {reason_of(error)}") from error
    nodes = precisions(compiled)
    return Compilation(model=model, compiled=compiled, nodes=nodes, precision=in_words(nodes, written))


def in_words(nodes: Mapping[str, int], written: AbstractSet[str]) -> str:
    """Describe the precision of a computation in words, such as "bf16", "fp32" or "fp32 (the fp16 model, upcast)".

    `nodes` counts nodes by the type in which they are computed; `written` are the floating types before the compilation.
    """
    ran = " and ".join(half for half in HALVES if nodes.get(half))
    given = " and ".join(half for half in HALVES if half in written)
    if ran:
        return ran if ran == given else f"{ran} (the {given or 'fp32'} model)"
    return f"fp32 (the {given} model, upcast)" if given else "fp32"


def _type(output: ov.Output) -> str:
    return str(output.get_element_type().get_type_name())


def place_of(ports: Sequence[Any], name: str) -> int | None:
    """Return the number of an input or output, by one of its tensor's names or by its layer's; None if it is absent."""
    by_name = [number for number, port in enumerate(ports) if name in port.names]
    by_layer = [number for number, port in enumerate(ports) if name == port.node.get_friendly_name()]
    return next(iter([*by_name, *by_layer]), None)


def input_places(ports: Sequence[Any], names: Sequence[str]) -> dict[int, int]:
    """Return each input's number in the compiled model, by its place in `names`.

    The compiled model lacks inputs that it does not use. An input that is also an output may have lost its name; it is then
    identified by its order among the remaining ones.

    Raises:
        ModelLoadError: an input cannot be identified.
    """
    known = {number: place_of(ports, name) for number, name in enumerate(names)}
    found = {number: place for number, place in known.items() if place is not None}
    unnamed = [place for place in range(len(ports)) if place not in found.values()]
    missing = [number for number in known if number not in found]
    if unnamed and len(unnamed) != len(missing):
        raise ModelLoadError(f"OpenVINO has lost the names of inputs {[names[number] for number in missing]}; convert it again")
    return found | dict(zip(missing, unnamed, strict=False))


def reports_errors(compiled: ov.CompiledModel) -> bool:
    """Return whether a synchronous run of a compiled model reports an error.

    With one thread, OpenVINO 2026.4.1 does not: the run returns, and the outputs are those of an earlier run.
    """
    return _reports_errors(compiled.get_property("INFERENCE_NUM_THREADS"))


@cache
def _reports_errors(threads: int) -> bool:
    given = [opset13.parameter([-1, -1], np.float32) for _ in range(2)]
    model = ov.Model([opset13.result(opset13.add(*given))], given)  # pyright: ignore[reportGeneralTypeIssues]  (its stubs)
    request = core().compile_model(model, DEVICE, properties(OpenVinoSettings(threads=threads), 0)).create_infer_request()
    for place, array in enumerate((np.zeros((1, 2), np.float32), np.zeros((1, 3), np.float32))):
        request.set_input_tensor(place, ov.Tensor(array))
    try:
        request.infer(share_outputs=True)
    except RuntimeError:
        return True
    return False


def reason_of(error: Exception) -> str:
    """Return the essential line of an exception, safe to show to clients: without the places in OpenVINO's sources."""
    lines = [line.strip() for line in str(error).splitlines() if not PREFIX_LINE.match(line)]
    return lines[-1] if lines else type(error).__name__


def precisions(compiled: ov.CompiledModel) -> Counter[str]:
    """Count computing nodes by the type in which they are computed: "bf16", "fp16", "fp32"; integers do not count."""
    found: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        about = node.get_rt_info()
        precision = PRECISIONS.get(about["runtimePrecision"].astype(str))
        if precision is not None and about["layerType"].astype(str) not in MOVING:
            found[precision] += 1
    return found
