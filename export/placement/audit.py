"""Measures where ONNX Runtime places a model's nodes and which casts and copies it adds, and finds its float32 islands."""

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

from halfserve.export.export_errors import ExportError
from halfserve.export.onnx_files.model_file import ModelFile, ModelSource, open_model
from halfserve.export.onnx_files.proto_graphs import all_nodes, typed_graphs
from halfserve.export.placement.cuda_kernels import CudaWarning, predict_cuda

LEVELS = ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_BASIC")
CPU = "CPUExecutionProvider"
TIMEOUT_SECONDS = 600
LARGEST_OPTIMIZED_BYTES = 1 << 30  # the runtime writes the optimised model with its weights, which takes long for large ones
_WORKER = Path(__file__).with_name("session_worker.py")
_COPIES = frozenset({"MemcpyToHost", "MemcpyFromHost"})
_CONVERSIONS = frozenset({"Cast", "CastLike"})


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The placement of a model's nodes.

    Attributes:
        assigned: The number of nodes by execution provider and operator, after the runtime's own folding.
        level: The graph optimisation level at which the model opened.
        crashes: The failures at the levels tried before.
        casts_in_file: Cast nodes of the model.
        casts_at_runtime: Cast nodes of the optimised model; the runtime removes some and adds casts where a provider has no
            float16 kernel. This and the next two are None for models over 1 GiB, which are not written.
        copies: Copies between host and device that the runtime adds.
        nodes_at_runtime: Nodes of the optimised model.
        islands: Connected groups of float32 nodes in the file, the largest first.
        cuda: The nodes that the CUDA provider would not compute as they are, predicted from a table.
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
        """Return the placement as JSON's own types."""
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
    """Open a model in a child process and report the placement of its nodes.

    Args:
        model: Any ONNX model.
        providers: Execution providers in order of preference, as ONNX Runtime names them; by default CUDA where it is
            available, then the CPU.
        reasons: The reason for which a node was kept in float32, by its name; for the islands.
        levels: Graph optimisation levels to try, in this order.
        worker: The program that opens the model; see `session_worker`.
        largest_optimized_bytes: Size of the model up to which the optimised one is written and its nodes are counted.

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
        ran = all_nodes(onnx.load(optimized, load_external_data=False)) if optimized else None
        counts = None if ran is None else Counter(node.op_type for node in ran)
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


def _opened(
    path: Path, providers: list[str], levels: Sequence[str], optimized: str, worker: Path
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    crashes: list[str] = []
    for level in levels:
        # -P: the worker's own folder must not shadow its imports.
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


@dataclass(frozen=True, kw_only=True)
class Island:
    """One connected group of float32 nodes.

    Attributes:
        nodes: Names of its nodes, in the graph's order.
        op_types: The number of nodes by operator.
        reasons: The reasons of the conversion, each once.
    """

    nodes: tuple[str, ...]
    op_types: dict[str, int]
    reasons: tuple[str, ...]


def find_islands(model: ModelFile, reasons: Mapping[str, str] | None = None) -> tuple[Island, ...]:
    """Return the connected groups of nodes with float32 inputs or outputs, without casts, the largest first.

    Two nodes are connected when one's output is the other's input in the same graph. `reasons` says by a node's name why it was
    kept in float32.
    """
    islands = [
        _island(group, reasons or {})
        for graph, types in typed_graphs(model.outline)
        for group in _groups([node for node in graph.node if _computes_in_fp32(node, types)])
    ]
    return tuple(sorted(islands, key=lambda island: -len(island.nodes)))


def _computes_in_fp32(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    if node.op_type in _CONVERSIONS or node.op_type == "Constant":
        return False
    fp32 = onnx.TensorProto.FLOAT
    return any(types.get(name) == fp32 for name in (*node.output, *node.input) if name) and not _only_parameters(node, types)


def _only_parameters(node: onnx.NodeProto, types: Mapping[str, int]) -> bool:
    """Return whether only parameters are float32 and the data is float16, as the scales of a Resize."""
    data = [types.get(name, 0) for name in (*node.output[:1], *node.input[:1]) if name]
    return onnx.TensorProto.FLOAT not in data and onnx.TensorProto.FLOAT16 in data


def _groups(nodes: list[onnx.NodeProto]) -> list[list[onnx.NodeProto]]:
    makers = {output: index for index, node in enumerate(nodes) for output in node.output if output}
    parents = list(range(len(nodes)))

    def root(index: int) -> int:
        while parents[index] != index:
            parents[index] = parents[parents[index]]
            index = parents[index]
        return index

    for index, node in enumerate(nodes):
        for name in node.input:
            if name in makers:
                parents[root(index)] = root(makers[name])
    groups: dict[int, list[onnx.NodeProto]] = {}
    for index, node in enumerate(nodes):
        groups.setdefault(root(index), []).append(node)
    return list(groups.values())


def _island(nodes: list[onnx.NodeProto], reasons: Mapping[str, str]) -> Island:
    names = tuple(node.name or next(iter(node.output), node.op_type) for node in nodes)
    return Island(
        nodes=names,
        op_types=dict(Counter(node.op_type for node in nodes)),
        reasons=tuple(dict.fromkeys(reasons[name] for name in names if name in reasons)),
    )
