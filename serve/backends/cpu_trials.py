"""Trials that compare two ways to compute a model on this processor, in speed and answers; the results are cached."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfserve.files.atomic_files import atomic_file
from halfserve.serve.backends.recorded_samples import RecordedSamples
from halfserve.serve.engine.backend import Backend, ModelInterface
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.errors import InferenceError, InstanceLostError
from halfserve.serve.engine.tensors import ANY_SIZE, Array, TensorSpec

SHORT_MS = 999.5  # below this time, three digits are shown
MOST_ROWS = 8  # most rows of a trial's batch
FREE_SIZES = (16, 1)  # sizes to try in place of the model's open sizes; the first that it can compute is used
RUNS = 5  # most runs of each way
BUDGET_S = 2.0  # seconds for the runs of one model; each way is run at least twice


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial."""

    half_ms: float  # milliseconds of the shortest run in half precision
    float32_ms: float  # milliseconds of the shortest run in float32
    error: float  # the largest difference of the answers, divided by the output's largest value; infinite if one is not finite
    # Whether the answers were compared with recorded samples, computed in float32, and not for a made-up batch.
    recorded: bool = False


@dataclass(frozen=True)
class TrialCache:
    """A folder of trial results, one small file each. Unreadable or unwritable files only cost another trial."""

    folder: Path | None  # None caches nothing

    def find(self, key: str) -> TrialResult | None:
        if self.folder is None:
            return None
        try:
            known = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            half_ms, float32_ms, error = (float(known[name]) for name in ("half_ms", "float32_ms", "error"))
            return TrialResult(half_ms, float32_ms, error, known["recorded"] is True)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, key: str, result: TrialResult) -> None:
        """Write a result atomically."""
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.folder / f"{key}.json") as file:
                file.write(json.dumps(asdict(result)).encode())


def compared(
    half: Backend, float32: Backend, interface: ModelInterface, rows: int, samples: RecordedSamples | None = None
) -> TrialResult | None:
    """Run both backends in turns on the same batch; None if the model cannot compute a made-up one.

    `rows` is the largest batch, 0 for a model without a batch dimension. With `samples`, the answers in half precision are
    compared with the recorded ones; otherwise a batch is made up.
    """
    batches: Iterable[tuple[Mapping[str, Array], Mapping[str, Array] | None]]
    if samples is None:
        made_up = ({spec.name: _made_up(spec, min(rows, MOST_ROWS), size) for spec in interface.inputs} for size in FREE_SIZES)
        batches = ((batch, None) for batch in made_up)
    else:
        batches = [(samples.inputs, samples.answers)]
    for batch, recorded in batches:
        try:
            answers, computed = _run(half, batch)[1], _run(float32, batch)[1]
            error = _error(answers, computed if recorded is None else recorded)
            times = _timed(half, float32, batch if recorded is None else _repeated(batch, min(rows, MOST_ROWS)))
        except (InferenceError, InstanceLostError) as failure:
            if isinstance(failure, InstanceLostError) or recorded is not None:
                return TrialResult(math.inf, math.inf, math.inf, recorded is not None)
            continue  # the model may refuse made-up sizes and values
        return TrialResult(*times, error, recorded is not None)
    return None


def _timed(half: Backend, float32: Backend, batch: Mapping[str, Array]) -> tuple[float, float]:
    """Return the milliseconds of the shortest run of each backend."""
    in_half, in_float32 = [], []
    until = time.monotonic() + BUDGET_S
    for _ in range(RUNS):  # in turns, so that other load on the machine affects both
        in_half.append(_run(half, batch)[0])
        in_float32.append(_run(float32, batch)[0])
        pause()
        if time.monotonic() > until:
            break
    return 1e3 * min(in_half), 1e3 * min(in_float32)


def _repeated(batch: Mapping[str, Array], rows: int) -> Mapping[str, Array]:
    """Repeat the batch to `rows` rows; unchanged if `rows` is 0, because a model without rows may have several sizes."""
    return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()} if rows else batch


def _run(backend: Backend, batch: Mapping[str, Array]) -> tuple[float, Mapping[str, Array]]:
    inputs = {name: array.astype(backend.compute_dtype(name)) for name, array in batch.items()}
    started = time.perf_counter()
    answers = backend.run(inputs)
    return time.perf_counter() - started, answers


def _made_up(spec: TensorSpec, rows: int, size: int) -> Array:
    """Make an input up: integers are ones (valid indices, lengths and masks), other numbers are normally distributed."""
    own = spec.shape[1:] if rows else spec.shape
    shape = (*((rows,) if rows else ()), *(size if n == ANY_SIZE else n for n in own))
    if spec.datatype.array_dtype.kind in "iub":
        return np.ones(shape, spec.datatype.array_dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _error(answers: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    worst = 0.0
    for name, wanted in expected.items():
        given: Array = answers[name]
        if given.shape != wanted.shape:
            return math.inf
        if wanted.dtype.kind in "iub":  # among nearly equal classes, another one may win
            continue
        far, near = given.astype(np.float64), wanted.astype(np.float64)
        if not np.array_equal(np.isfinite(far), np.isfinite(near)):
            return math.inf
        finite = np.isfinite(near)
        scale = float(np.abs(near[finite]).max(initial=0.0))
        worst = max(worst, float(np.abs(far[finite] - near[finite]).max(initial=0.0)) / (scale or 1.0))
    return worst


def recorded_error(backend: Backend, samples: RecordedSamples) -> float:
    """Return the largest difference to recorded answers, divided by the output's largest value; infinite if the model fails."""
    try:
        return _error(_run(backend, samples.inputs)[1], samples.answers)
    except (InferenceError, InstanceLostError):
        return math.inf


def describe(result: TrialResult, precision: Any, rows: int, float32_runtime: str) -> str:
    """Describe a measurement in words; `rows` is the model's largest batch, 0 for a model without a batch dimension."""
    batch = f"for a batch of {min(rows, MOST_ROWS)}" if rows else "for a request"
    half, float32 = (f"{ms:.3g}" if ms < SHORT_MS else f"{ms:,.0f}" for ms in (result.half_ms, result.float32_ms))
    times = f"OpenVINO in {precision} {half} ms, {float32_runtime} in float32 {float32} ms {batch}"
    answers = "the answers to recorded samples" if result.recorded else "they"
    return f"{times}; {answers} differ by {result.error:.2g} of the largest value"
