"""The judge of a packaged model's conversion: the same steps as for ONNX's tests, in figures in place of right and wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import onnx

from benchmarks.converters.float_share import Share, share_of
from benchmarks.converters.io_types import wrong_io_type
from benchmarks.converters.judge import failed
from benchmarks.converters.peers import converter
from benchmarks.converters.runtime import Session
from benchmarks.converters.runtime import rounded as as_float16
from benchmarks.converters.synthetic_inputs import Trial, trials
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.simulation import round_every_node

LIMIT = 1e-2  # of the output's largest value


@dataclass(frozen=True, kw_only=True)
class RealOutcome:
    """What a converter made of a packaged model.

    Attributes:
        problem: "" when it is right; else the step that failed and how.
        clean: Whether ONNX's checker takes it and the types of inputs and outputs are kept.
        runtime_error: Largest |difference| of ONNX Runtime's CPU from float32, in units of the output's largest value.
        rounded_error: The same when every node rounds to float16, as on a GPU.
        input_error: What rounding the inputs to float16 alone does to the float32 model: how steep it is there.
        non_finite: NaN and infinities that float32 does not have, both executions together.
        seconds: Time of the conversion.
        size_ratio: Bytes of the file by bytes of the float32 file.
        share: Nodes by type.
        trials: How many sets of inputs were run.
    """

    problem: str = ""
    clean: bool = False
    runtime_error: float = float("nan")
    rounded_error: float = float("nan")
    input_error: float = float("nan")
    non_finite: int = 0
    seconds: float = float("nan")
    size_ratio: float = float("nan")
    share: Share = field(default_factory=Share)
    trials: int = 0


def evaluate(name: str, modelopt_python: str | None, content: bytes, keep_io: bool) -> RealOutcome:
    """Convert with the converter of that name, and judge; run it in a child process."""
    start = time.monotonic()
    try:
        converted = converter(name, modelopt_python)(content, keep_io)
    except Exception as error:  # noqa: BLE001  (converters raise anything)
        return RealOutcome(problem=f"convert: {type(error).__name__}: {str(error).strip()[:200]}")
    seconds = time.monotonic() - start
    problem = _structure_problem(content, converted, keep_io)
    made = RealOutcome(problem=problem, clean=not problem, seconds=seconds, size_ratio=len(converted) / len(content))
    try:
        runtime, rounded, steepness, non_finite, count = _errors(content, converted)
        share = share_of(onnx.load_from_string(converted))
    except Exception as error:  # noqa: BLE001  (the runtime's own exceptions, and what the simulation refuses)
        return replace(made, problem=problem or f"run: {failed('run', error).text}")
    if not problem and (non_finite or not max(runtime, rounded) <= LIMIT):
        problem = f"value: error {runtime:.2g} of the largest value, {rounded:.2g} rounded, {non_finite} not finite"
    return replace(
        made,
        problem=problem,
        runtime_error=runtime,
        rounded_error=rounded,
        input_error=steepness,
        non_finite=non_finite,
        share=share,
        trials=count,
    )


def _structure_problem(content: bytes, converted: bytes, keep_io: bool) -> str:
    try:
        model = onnx.load_from_string(converted)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001  (a converter's bytes may be anything)
        return f"checker: {failed('checker', error).text}"
    wrong = wrong_io_type(onnx.load_from_string(content), model, keep_io=keep_io)
    return f"types: {wrong}" if wrong else ""


def _errors(content: bytes, converted: bytes) -> tuple[float, float, float, int, int]:
    """(runtime error, rounded error, error of rounding the inputs alone, non-finite numbers, trials)."""
    chosen = trials(content)
    if not chosen:
        raise ValueError("the float32 model takes none of the synthetic inputs")
    runtime = _distance(Session(converted), chosen)
    # Its casts are part of the model, which the runtime keeps; it would fold constants through them at higher levels.
    simulation = round_every_node(onnx.load_from_string(converted)).SerializeToString()
    rounded = _distance(Session(simulation, "ORT_DISABLE_ALL"), chosen)
    coarse = [replace(trial, feeds={name: as_float16(array) for name, array in trial.feeds.items()}) for trial in chosen]
    steepness, _ = _distance(Session(content), coarse)
    return runtime[0], rounded[0], steepness, runtime[1] + rounded[1], len(chosen)


def _distance(session: Session, chosen: list[Trial]) -> tuple[float, int]:
    worst, non_finite = 0.0, 0
    for trial in chosen:
        for reference, answer in zip(trial.answers, session.run(trial.feeds), strict=True):
            r, a = np.asarray(reference), np.asarray(answer)
            if r.shape != a.shape:
                raise ValueError(f"an output has shape {list(a.shape)} instead of {list(r.shape)}")
            if r.size == 0:
                continue
            if np.issubdtype(r.dtype, np.floating):
                figures = compare(r, a)
                worst, non_finite = max(worst, figures.max_scaled_error), non_finite + figures.non_finite
            else:
                worst = max(worst, float((r != a).mean()))
    return worst, non_finite
