"""Executions of a candidate: simulated on the CPU, for any device and for CUDA, and by ONNX Runtime at each level.

Some optimisation levels of ONNX Runtime crash on a model, and some change its answers, so the highest sound level is
searched.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper, inliner

from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.verdicts import LevelVerdict, OutputVerdict, Probe, Risk
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import BF16, FP16, HalfType
from halfserve.export.onnx_files.external_data import external_tensors, location_of, take_in
from halfserve.export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile, serialize
from halfserve.export.onnx_fp16.float32_copy import hold_in_float32
from halfserve.export.verification.comparison import Comparison
from halfserve.export.verification.judging import judge
from halfserve.export.verification.samples import Value
from halfserve.export.verification.sandbox import (
    CPU,
    CUDA,
    LEVELS,
    RunResult,
    Sandbox,
    StagedFeed,
    at_first_level,
    on_disk,
    written_model,
)
from halfserve.export.verification.simulation import SumChecks, has_cuda_steps, round_every_node, rounds, with_sum_checks

# Folds constants, and fuses nothing across nodes: a fused node would round once where a GPU rounds twice.
ROUNDED_LEVEL = "ORT_ENABLE_BASIC"
# The weights of larger models are mapped from their files instead of copied into the simulated model.
INLINE_LIMIT_BYTES = min(PROTOBUF_LIMIT_BYTES // 4, 256 << 20)
MAPPABLE = frozenset(
    {TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT8, TensorProto.UINT8}
    | {TensorProto.INT32, TensorProto.INT64}
)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """Result of a simulation: answers, nodes whose sums exceed float16's range, and nodes whose sums were not bounded."""

    answer: RunResult
    risks: tuple[Risk, ...]
    unchecked: tuple[str, ...]


def run_simulated(
    candidate: ModelFile,
    sandbox: Sandbox,
    batches: Sequence[StagedFeed],
    *,
    user_batches: int,
    products: bool,
    half: HalfType = FP16,
    written: HalfType | None = None,
) -> SimulatedRun:
    """Run the candidate with every node rounded to `half` (see `halfserve.export.verification.simulation`).

    A model without a node in half precision has nothing to round. It runs at the reference's optimisation level: another level
    sums in another order, and a quantised model amplifies a difference in the last bit to a step of its integers.

    Sums are bounded on the first `user_batches` batches alone, as sums on others say nothing about the model in use, and with
    `products` inside matrix products and convolutions too. `written` is the type in which the model is written, `half` by
    default.

    Raises:
        ExportError: The model cannot be simulated.
    """
    rounded = round_every_node(_simulable(candidate), half, written)
    if not rounds(rounded.graph):
        path, weights = (
            (on_disk(candidate, sandbox), []) if BF16 not in (half, written) else _staged_model(rounded, candidate, sandbox)
        )
        answer = at_first_level(path, sandbox, batches, weights=weights)
        return SimulatedRun(answer=answer, risks=(), unchecked=())
    own = len(rounded.graph.output)
    bounded = not half.has_float32_range
    checks = with_sum_checks(rounded, products=products) if bounded else SumChecks(model=rounded, risks=())
    answer = _run_simulation(checks.model, candidate, sandbox, batches)
    failed = answer.trouble is not None or any(isinstance(batch, str) for batch in answer.batches)
    if failed and checks.risks:  # a check can fail where the model does not, as on an empty tensor
        checks = checks.without_checks(rounded)
        answer = _run_simulation(rounded, candidate, sandbox, batches)
    reaches = [_reaches(batch[own:]) for batch in answer.batches[:user_batches] if not isinstance(batch, str)]
    largest = [max(column) for column in zip(*reaches, strict=True)]
    cut = tuple(batch if isinstance(batch, str) else batch[:own] for batch in answer.batches)
    risks = tuple(checks.over(largest)) if largest else ()
    answer = RunResult(batches=cut, crash=answer.crash, refusal=answer.refusal, providers=answer.providers)
    return SimulatedRun(answer=answer, risks=risks, unchecked=checks.unchecked)


def run_as_on_cuda(candidate: ModelFile, sandbox: Sandbox, batches: Sequence[StagedFeed], half: HalfType) -> RunResult | None:
    """Run the candidate as ONNX Runtime's CUDA kernels compute it (see `halfserve.export.verification.cuda_steps`).

    `half` is the type in which it is written. Returns None where the kernels round as `run_simulated` does.

    Raises:
        ExportError: The model cannot be simulated.
    """
    rounded = round_every_node(_simulable(candidate), half, cuda=True)
    return _run_simulation(rounded, candidate, sandbox, batches) if has_cuda_steps(rounded.graph) else None


def gpu_is_there() -> bool:
    """Return whether ONNX Runtime has the CUDA provider and the system has a device.

    The GPU build of ONNX Runtime lists the provider on every machine, and falls back to the CPU where there is no GPU.
    """
    device = sys.platform == "win32" or Path("/dev/nvidiactl").exists()
    return device and os.environ.get("CUDA_VISIBLE_DEVICES") != "" and CUDA in onnxruntime.get_available_providers()


def _reaches(values: list[Value]) -> list[float]:
    return [0.0 if value is None or isinstance(value, list) else float(value) for value in values]


def _simulable(candidate: ModelFile) -> onnx.ModelProto:
    return candidate.proto if candidate.size_bytes <= INLINE_LIMIT_BYTES else candidate.outline


def _run_simulation(model: onnx.ModelProto, candidate: ModelFile, sandbox: Sandbox, batches: Sequence[StagedFeed]) -> RunResult:
    path, weights = _staged_model(model, candidate, sandbox)
    return sandbox.run(path, batches, level=ROUNDED_LEVEL, weights=weights)


def _staged_model(model: onnx.ModelProto, candidate: ModelFile, sandbox: Sandbox) -> tuple[Path, list[dict[str, Any]]]:
    """Return the file of a model made from the candidate, and its mapped weights: the runtime reads data files beside a model
    only.
    """
    weights: list[dict[str, Any]] = []
    folder = (candidate.path or Path()).absolute().parent
    mappable = {id(tensor) for tensor in model.graph.initializer if tensor.data_type in MAPPABLE}
    for tensor in list(external_tensors(model)):
        if id(tensor) in mappable:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            dtype = "<u2" if tensor.data_type == BF16.elem_type else helper.tensor_dtype_to_np_dtype(tensor.data_type).str
            file = folder / location_of(tensor)  # may be absolute
            place = {"file": str(file), "offset": int(entries.get("offset", 0)), "shape": list(tensor.dims)}
            weights.append({"name": tensor.name, "dtype": dtype, "elem_type": tensor.data_type, **place})
        else:
            take_in(tensor, folder, candidate.name)
    return written_model(serialize(model), sandbox), weights


@dataclass(frozen=True, kw_only=True)
class RuntimeLevels:
    """Results of ONNX Runtime's CPU provider: verdicts on all levels that were tried, and the failures above the chosen one.

    The answer is that at the highest sound level, or else at the highest that gives answers.
    """

    answer: RunResult
    probe: Probe
    levels: tuple[LevelVerdict, ...]


def run_levels(comparison: Comparison, budget: Budget, *, below: bool = True) -> RuntimeLevels:
    """Run the candidate on all batches from the highest level down to a sound one, and with `below` on the first batch below
    it.

    Levels below are skipped for a model of more than 256 MiB, where opening takes most of the time.

    Raises:
        ExportError: The runtime refuses the model, crashes at every level, or fails on the user's samples.
    """
    path, weights = for_cpu(comparison)
    levels: list[LevelVerdict] = []
    chosen: tuple[str, RunResult] | None = None
    fallback: tuple[str, RunResult] | None = None
    for level in LEVELS:
        batches = comparison.staged if chosen is None else comparison.staged[:1]
        answer = comparison.sandbox.run(path, batches, level=level, provider=CPU, weights=weights)
        verdict = _verdict(comparison, level, answer, budget)
        levels.append(verdict)
        if chosen is None and verdict.trouble is None:
            chosen = level, answer
            if not below or comparison.candidate.size_bytes > INLINE_LIMIT_BYTES:
                break
        elif fallback is None and verdict.max_scaled_error is not None:
            fallback = level, answer
    working = chosen or fallback
    if working is None:
        raise ExportError(_hopeless(levels))
    above = levels[: LEVELS.index(working[0])]
    crashes = tuple(f"{verdict.level}: {verdict.trouble}" for verdict in above)
    return RuntimeLevels(answer=working[1], probe=Probe(level=working[0], crashes=crashes), levels=tuple(levels))


def for_cpu(comparison: Comparison) -> tuple[Path, list[dict[str, Any]]]:
    """Return the file that the CPU provider runs, and its mapped weights: the candidate, or a float32 copy of one with
    bfloat16.

    The server makes the same copy where it computes a bfloat16 model in float32. A copy of a model that is written in one half
    type and computed in the other has its weights rounded to the second.
    """
    if BF16 not in (comparison.half, comparison.written):
        return comparison.path, []
    model = onnx.ModelProto()
    model.CopyFrom(inliner.inline_local_functions(_simulable(comparison.candidate)))
    hold_in_float32(model, comparison.half, rounded=False, written=comparison.written)
    return _staged_model(model, comparison.candidate, comparison.sandbox)


def _verdict(comparison: Comparison, level: str, answer: RunResult, budget: Budget) -> LevelVerdict:
    expected = comparison.expected[: len(answer.batches)]
    reached = answer.batches[: len(expected)]
    failed = next((batch for batch in reached if isinstance(batch, str)), None)
    cut_off = answer.trouble is not None and len(reached) < len(comparison.expected)
    if cut_off or failed is not None:
        return LevelVerdict(provider=CPU, level=level, trouble=answer.trouble if cut_off else failed)
    values = [batch for batch in reached if not isinstance(batch, str)]
    verdicts = judge(comparison.outputs, "runtime", expected, values, budget, comparison.output_units, comparison.half).verdicts
    broken = [f"output {verdict.name!r}: {text}" for verdict in verdicts for text in verdict.violations]
    return LevelVerdict(
        provider=CPU,
        level=level,
        trouble=f"over budget: {broken[0]}" if broken else None,
        max_scaled_error=_worst(verdicts),
    )


def _worst(verdicts: Sequence[OutputVerdict]) -> float:
    errors = [verdict.figures.max_scaled_error for verdict in verdicts]
    return max((error for error in errors if math.isfinite(error)), default=math.nan)


def _hopeless(levels: Sequence[LevelVerdict]) -> str:
    troubles = {verdict.trouble or "" for verdict in levels}
    crashed = any("killed by" in trouble or "exit status" in trouble or "no answer" in trouble for trouble in troubles)
    if not crashed:
        return f"ONNX Runtime cannot open or run the model: {levels[0].trouble}"
    listed = "; ".join(f"{verdict.level}: {verdict.trouble}" for verdict in levels)
    return (
        f"ONNX Runtime {onnxruntime.__version__} crashes on the model ({listed}); "
        "try another release of it, or keep the affected block in float32"
    )
