"""Where ONNX Runtime really puts a model's nodes, and what it adds to do so."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from export.errors import ExportError
from export.files.model_file import ModelFile, ModelSource, open_model
from export.files.proto_walk import all_nodes
from export.placement.islands import Island, find_islands
from export.placement.predict_cuda import CudaWarning, predict_cuda

LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC")
CPU = "CPUExecutionProvider"
TIMEOUT_SECONDS = 600
LARGEST_OPTIMIZED_BYTES = (
    1 << 30
)  # the runtime writes the optimised model with its weights: that of a larger one is not asked for
_WORKER = Path(__file__).with_name("session_worker.py")
_COPIES = frozenset({"MemcpyToHost", "MemcpyFromHost"})


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model runs.

    Attributes:
        assigned: For each execution provider that got nodes: how many of each operator, after the runtime's own folding.
        level: The graph optimisation level at which the model opened.
        crashes: What happened at the levels tried before.
        casts_in_file: Cast nodes of the model.
        casts_at_runtime: Cast nodes of the optimised model: those of the file that are left, and those that the runtime adds
            because a provider has no kernel for float16. None for models over 1 GiB, as for the next two: the optimised model
            is not asked for.
        copies: Copies between host and device that the runtime adds.
        nodes_at_runtime: Nodes of the optimised model.
        islands: Connected groups of float32 nodes in the file, the largest first.
        cuda: What the CUDA provider would not compute as it is; a prediction from a table, made without a GPU.
        runtime: Release of ONNX Runtime.
    """

    assigned: dict[str, dict[str, int]]
    level: str
    crashes: tuple[str, ...]
    casts_in_file: int
    casts_at_runtime: int | None
    copies: int | None
    nodes_at_runtime: int | None
    islands: tuple[Island, ...]
    cuda: tuple[CudaWarning, ...]
    runtime: str

    def to_json(self) -> dict[str, Any]:
        """The placement as JSON's own types."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def audit_placement(
    model: ModelSource | ModelFile,
    *,
    providers: Sequence[str] | None = None,
    reasons: Mapping[str, str] | None = None,
    levels: Sequence[str] = LEVELS,
    worker: Path = _WORKER,
    largest_optimized_bytes: int = LARGEST_OPTIMIZED_BYTES,
) -> Placement:
    """Open a model in a child process and report where its nodes go.

    Args:
        model: Any ONNX model.
        providers: Execution providers in order of preference, as ONNX Runtime names them; by default CUDA where it is
            available, then the CPU.
        reasons: Why a node was kept in float32, by its name; for the islands.
        levels: Graph optimisation levels to try, in this order.
        worker: The program that opens the model; see `session_worker`.
        largest_optimized_bytes: Size of the model up to which the optimised one is asked for, and its nodes are counted.

    Raises:
        ExportError: The model cannot be read, a provider is not there, or the runtime refuses the model or crashes.
    """
    opened = model if isinstance(model, ModelFile) else open_model(model)
    wanted = _providers(providers)
    with tempfile.TemporaryDirectory(prefix="halfserve-placement-") as folder:
        path = opened.path
        if path is None:
            path = Path(folder) / "model.onnx"
            path.write_bytes(opened.content)
        optimized = str(Path(folder) / "optimized.onnx") if opened.size_bytes <= largest_optimized_bytes else ""
        answer, level, crashes = _opened(path, wanted, levels, optimized, worker)
        counts = _counts(Path(optimized)) if optimized else None
    return Placement(
        assigned=answer["assigned"],
        level=level,
        crashes=crashes,
        casts_in_file=sum(node.op_type == "Cast" for node in all_nodes(opened.outline)),
        casts_at_runtime=None if counts is None else counts["Cast"],
        copies=None if counts is None else sum(counts[name] for name in _COPIES),
        nodes_at_runtime=None if counts is None else counts.total(),
        islands=find_islands(opened, reasons),
        cuda=predict_cuda(opened),
        runtime=answer["version"],
    )


def _providers(providers: Sequence[str] | None) -> list[str]:
    available = onnxruntime.get_available_providers()
    missing = [name for name in providers or () if name not in available]
    if missing:
        raise ExportError(f"this ONNX Runtime has no {missing[0]!r}; it has {', '.join(available)}")
    return list(providers or [name for name in ("CUDAExecutionProvider", CPU) if name in available])


def _counts(optimized: Path) -> Counter[str]:
    return Counter(node.op_type for node in all_nodes(onnx.load(optimized, load_external_data=False)))


def _opened(
    path: Path, providers: list[str], levels: Sequence[str], optimized: str, worker: Path
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    crashes: list[str] = []
    for level in levels:
        # -P: the worker's own folder does not get into the way of what it imports.
        command = [sys.executable, "-P", str(worker), str(path.absolute()), level, ",".join(providers), optimized]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            crashes.append(f"{level}: not open after {TIMEOUT_SECONDS} s")
            continue
        if done.returncode == 0:
            return json.loads(done.stdout), level, tuple(crashes)
        if done.returncode > 0:
            reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise ExportError(f"ONNX Runtime {onnxruntime.__version__} cannot open the model: {reason[0]}")
        crashes.append(f"{level}: killed by {signal.Signals(-done.returncode).name}")
    raise ExportError(f"ONNX Runtime {onnxruntime.__version__} crashes when it opens the model ({'; '.join(crashes)})")
