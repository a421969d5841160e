"""The judge of a packaged model's conversion: the same steps as for ONNX's tests, but with error figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import onnx

from benchmarks.converters.peers import converter
from benchmarks.converters.suite import Share, share_of
from benchmarks.converters.synthetic_inputs import Trial, trials
from halfserve.export.verification.error_units import ErrorUnits
from halfserve.export.verification.metrics import compare
from halfserve.export.verification.simulation import round_every_node
from tests.export.conversions.io_types import wrong_io_type
from tests.export.conversions.judge import failed
from tests.export.conversions.runtime import Session
from tests.export.conversions.runtime import rounded as as_float16

Array: TypeAlias = np.ndarray[Any, Any]

HEADINGS = (
    *("error", "rounded", "inputs rounded", "least cosine", "not finite"),
    *("float16/32 nodes, casts", "s", "size", "problem"),
)
LIMIT = 1e-2  # error limit, relative to the output's largest value


@dataclass(frozen=True, kw_only=True)
class RealOutcome:
    """Result of one converter for a packaged model.

    Attributes:
        problem: "" if it is right; else the step that failed, and the reason.
        clean: Whether ONNX's checker accepts it and the types of inputs and outputs are kept.
        runtime_error: Largest |difference| of ONNX Runtime's CPU from float32, relative to the output's largest value.
        rounded_error: The same error if every node rounds to float16, as on a GPU.
        input_error: The same error of the float32 model with inputs rounded to float16, which shows how steep the model is.
        non_finite: NaN and infinities that float32 does not have, in both executions together.
        seconds: Time of the conversion.
        size_ratio: Size of the file divided by that of the float32 file.
        share: Nodes by type.
        trials: Number of sets of inputs.
        least_cosine: Smallest cosine of a row of the first output with float32's row, over both executions; NaN if it has no
            rows of numbers.
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
    least_cosine: float = float("nan")

    @property
    def cells(self) -> tuple[str, ...]:
        """The figures for a table with HEADINGS."""
        share = self.share
        return (
            *(f"{error:.1e}" for error in (self.runtime_error, self.rounded_error, self.input_error)),
            f"{self.least_cosine:.6f}",
            str(self.non_finite),
            f"{share.float16}/{share.float32}, {share.casts}",
            f"{self.seconds:.2f}",
            f"{self.size_ratio:.3f}",
            self.problem[:80],
        )


def evaluate(name: str, modelopt_python: str | None, content: bytes, keep_io: bool) -> RealOutcome:
    """Convert with the converter of that name, and judge; run it in a child process."""
    start = time.monotonic()
    try:
        converted = converter(name, modelopt_python)(content, keep_io)
    except Exception as error:  # noqa: BLE001  (converters raise anything)
        return RealOutcome(problem=f"convert: {type(error).__name__}: {str(error).strip()[:200]}")
    seconds = time.monotonic() - start
    return replace(judged(content, converted, None, keep_io), seconds=seconds)


def judged(content: bytes, converted: bytes, chosen: Sequence[Trial] | None, keep_io: bool | None) -> RealOutcome:
    """Judge a converted model; run it in a child process.

    Args:
        content: The float32 model.
        converted: The converted model.
        chosen: Inputs with their answers in float32; errors are relative to each output's largest value in all of them. By
            default synthetic inputs that the float32 model answers, each with units from its own answers.
        keep_io: Whether the types of inputs and outputs had to stay; None if names and types are the converter's choice.
    """
    problem = _structure_problem(content, converted, keep_io)
    units = [] if chosen is None else _largest_values(chosen)
    made = RealOutcome(problem=problem, clean=not problem, size_ratio=len(converted) / len(content))
    try:
        chosen = trials(content) if chosen is None else chosen
        runtime, rounded, steepness = _distances(content, converted, chosen, units)
        share = share_of(onnx.load_from_string(converted))
    except Exception as error:  # noqa: BLE001  (the runtime's own exceptions, and what the simulation refuses)
        return replace(made, problem=problem or f"run: {failed('run', error).text}")
    non_finite = runtime.non_finite + rounded.non_finite
    if not problem and (non_finite or not max(runtime.error, rounded.error) <= LIMIT):
        problem = f"value: error {runtime.error:.2g} of the largest value, {rounded.error:.2g} rounded, {non_finite} not finite"
    return replace(
        made,
        problem=problem,
        runtime_error=runtime.error,
        rounded_error=rounded.error,
        input_error=steepness.error,
        non_finite=non_finite,
        share=share,
        trials=len(chosen),
        least_cosine=min(runtime.cosine, rounded.cosine),
    )


def _structure_problem(content: bytes, converted: bytes, keep_io: bool | None) -> str:
    try:
        model = onnx.load_from_string(converted)
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001  (a converter's bytes may be anything)
        return f"checker: {failed('checker', error).text}"
    if keep_io is None:
        return ""
    wrong = wrong_io_type(onnx.load_from_string(content), model, keep_io=keep_io)
    return f"types: {wrong}" if wrong else ""


@dataclass(frozen=True)
class _Distance:
    """Distance of answers from float32's: see `RealOutcome`."""

    error: float
    non_finite: int
    cosine: float


def _distances(
    content: bytes, converted: bytes, chosen: Sequence[Trial], units: Sequence[ErrorUnits]
) -> tuple[_Distance, _Distance, _Distance]:
    """Distances of the runtime, of the simulation of a GPU, and of the float32 model with rounded inputs."""
    if not chosen:
        raise ValueError("the float32 model takes none of the synthetic inputs")
    runtime = _distance(Session(converted), chosen, units)
    # The model's casts are kept by the runtime at this level; at higher levels it would fold constants through them.
    simulation = round_every_node(onnx.load_from_string(converted)).SerializeToString()
    rounded = _distance(Session(simulation, "ORT_DISABLE_ALL"), chosen, units)
    coarse = [replace(trial, feeds={name: as_float16(array) for name, array in trial.feeds.items()}) for trial in chosen]
    return runtime, rounded, _distance(Session(content), coarse, units)


def _distance(session: Session, chosen: Sequence[Trial], units: Sequence[ErrorUnits]) -> _Distance:
    worst, non_finite = 0.0, 0
    cosines: list[float] = []
    for trial in chosen:
        for number, (reference, answer) in enumerate(zip(trial.answers, session.run(trial.feeds), strict=True)):
            r, a = np.asarray(reference), np.asarray(answer)
            if r.shape != a.shape:
                raise ValueError(f"an output has shape {list(a.shape)} instead of {list(r.shape)}")
            if r.size == 0:
                continue
            if np.issubdtype(r.dtype, np.floating):
                figures = compare(r, a, units[number] if units else None)
                worst, non_finite = max(worst, figures.max_scaled_error), non_finite + figures.non_finite
            else:
                worst = max(worst, float((r != a).mean()))
            if number == 0 and r.ndim == 2:
                cosines.append(_least_cosine(r, a))
    return _Distance(worst, non_finite, min(cosines, default=float("nan")))


def _largest_values(chosen: Sequence[Trial]) -> list[ErrorUnits]:
    """For each output, its largest |value| in all trials."""
    outputs = zip(*(trial.answers for trial in chosen), strict=True)
    largest = [max(float(np.abs(np.asarray(answer)).max(initial=0.0)) for answer in answers) for answers in outputs]
    return [ErrorUnits(scale=value, unit=value) for value in largest]


def _least_cosine(reference: Array, answer: Array) -> float:
    """Smallest cosine of two rows, in float64; NaN if a row has length zero."""
    r: Array = reference.astype(np.float64)
    a: Array = answer.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        lengths = np.linalg.norm(r, axis=-1) * np.linalg.norm(a, axis=-1)
        return float(((r * a).sum(-1) / lengths).min())
