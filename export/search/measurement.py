"""What the instrumented graph says of a model on the samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import version_converter

from export.errors import ExportError
from export.files.model_file import serialize
from export.search.half_path import BROKEN
from export.search.instrumented_graph import RESULT, Probe, instrumented
from export.search.searched_model import SearchedModel
from export.verification.children import Feed
from export.verification.metrics import Array

FLOATS = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(double)": np.float64}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Largest errors over all samples, by the name of the value. `BROKEN` or more stands for NaN or infinite.

    Attributes:
        scale: Largest finite magnitude of each float32 value that a node makes.
        fresh: Error of rounding it.
        brought: Error that each input of its node brings into it, by the input's value; "" for all together.
        local: Error of its node on rounded true inputs, its result rounded.
        carried: The healed half path's error at it.
        half: The nodes that were float16 in the half path.
    """

    scale: dict[str, float] = field(default_factory=dict)
    fresh: dict[str, float] = field(default_factory=dict)
    brought: dict[str, dict[str, float]] = field(default_factory=dict)
    local: dict[str, float] = field(default_factory=dict)
    carried: dict[str, float] = field(default_factory=dict)
    half: frozenset[str] = frozenset()

    def relative_error(self, value: str) -> float:
        """The half path's error at a value, about, in units of its scale: what its inputs bring in, and its own rounding."""
        error = sum(self.brought.get(value, {}).values()) + self.fresh.get(value, 0.0)
        scale = self.scale.get(value, 0.0)
        return error / scale if scale else error

    def relative_carried(self, value: str) -> float:
        """The healed half path's error at a value in units of its scale; 0 where it was not measured."""
        scale, error = self.scale.get(value, 0.0), self.carried.get(value, 0.0)
        return error / scale if scale else error

    def local_error(self, values: Collection[str]) -> float | None:
        """The largest error of a node alone in units of its results' scales; infinite where it breaks, None if not measured."""
        errors = [_relative(self.local[value], self.scale.get(value, 0.0)) for value in values if value in self.local]
        return max(errors, default=None)


def measure(searched: SearchedModel, kept: Collection[str], batches: Sequence[Feed]) -> Measurement:
    """Run the instrumented graph.

    It runs in this process: it is float32 and not optimised, and its reference ran before.

    Args:
        searched: The model.
        kept: Nodes that stay float32 whatever is searched for.
        batches: The samples.

    Raises:
        ExportError: It cannot be built or does not run, as with an operator whose result has another size each time.
    """
    graph = instrumented(replace(searched, prepared=with_where(searched.prepared)), kept)
    try:
        session = onnxruntime.InferenceSession(serialize(graph.model), _options(), providers=["CPUExecutionProvider"])
        rows = [session.run([RESULT], _fitting(session, batch))[0] for batch in batches]
    except ExportError:
        raise
    except Exception as error:
        raise ExportError(str(error).splitlines()[0]) from error
    half = frozenset(searched.nodes).difference(kept)
    return replace(_sorted(graph.probes, np.maximum(np.stack(rows).max(axis=0), 0)), half=half)


def with_where(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself, or where its opset is older than 9, which has no Where, the model at opset 13.

    Raises:
        ExportError: ONNX cannot convert it.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if opset >= 9:
        return model
    try:
        return version_converter.convert_version(model, 13)
    except Exception as error:
        raise ExportError(f"opset {opset} is too old to be measured: {str(error).splitlines()[0]}") from error


def _options() -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # Optimised, casts and copies would be merged and folded, and that is what must not happen here.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # The planner that reuses memory takes minutes for ten thousand nodes; without it, memory is freed as before.
    options.enable_mem_reuse = False
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _fitting(session: Any, batch: Feed) -> Feed:
    types = {value.name: FLOATS.get(value.type) for value in session.get_inputs()}
    floating = {name for name, array in batch.items() if np.issubdtype(array.dtype, np.floating)}
    return {name: array.astype(types[name] or array.dtype) if name in floating else array for name, array in batch.items()}


def _sorted(probes: Sequence[Probe], numbers: Array) -> Measurement:
    measured = Measurement(brought=defaultdict(dict))
    plain = {"scale": measured.scale, "fresh": measured.fresh, "local": measured.local, "carried": measured.carried}
    for probe, number in zip(probes, numbers.tolist(), strict=True):
        if probe.kind == "brought":
            measured.brought[probe.value][probe.source] = number
        else:
            plain[probe.kind][probe.value] = number
    return measured


def _relative(error: float, scale: float) -> float:
    if error >= BROKEN:
        return float("inf")
    return error / scale if scale else error
