"""Trials that compare two ways to compute a model on this processor, in speed and answers; the results are cached."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from halfserve.files.atomic_files import atomic_file
from halfserve.protos.certificates import RECORDED_INPUT, RECORDED_OUTPUT, SAMPLES
from halfserve.serve.engine.backend import Backend, ModelInterface
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.disk_files import open_regular
from halfserve.serve.engine.errors import InferenceError, InstanceLostError
from halfserve.serve.engine.tensors import ANY_SIZE, Array, TensorSpec

logger = logging.getLogger(__name__)

R = TypeVar("R")

MAX_BYTES = 1 << 24  # most bytes of the file; the converter writes at most a fourth of this


@dataclass(frozen=True)
class RecordedSamples:
    """The samples beside a certificate: inputs and answers by name, in the float32 model's types, batch dimension first."""

    inputs: Mapping[str, Array]
    answers: Mapping[str, Array]


def read_samples(model: Path, certificate: Mapping[str, Any], interface: ModelInterface) -> RecordedSamples | None:
    """Read the samples beside a model file; None if `certificate`, the one that the model names, vouches for none.

    A warning is logged if they cannot be used. They must have all inputs of the interface; answers of further outputs are left
    out.
    """
    files = certificate.get("files")
    digest = files.get(SAMPLES) if isinstance(files, Mapping) else None
    if digest is None:
        return None
    path = model.parent / SAMPLES
    try:
        arrays = _arrays(path, digest)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError, MemoryError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        logger.warning("%s: cannot be used to check what this machine computes: %s", path, error)
        return None
    inputs, answers = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in (RECORDED_INPUT, RECORDED_OUTPUT)
    )
    outputs = [spec.name for spec in interface.outputs]
    if inputs.keys() != {spec.name for spec in interface.inputs} or not answers.keys() >= set(outputs):
        logger.warning("%s: has other inputs or outputs than the model, and is not used", path)
        return None
    return RecordedSamples(inputs, {name: answers[name] for name in outputs})


def _arrays(path: Path, digest: str) -> dict[str, Array]:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError("it is not the file that the certificate names")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
            raise ValueError("its arrays are compressed")  # compressed arrays may be of any size
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


SHORT_MS = 999.5  # below this time, three digits are shown
MOST_ROWS = 8  # most rows of a trial's batch
FREE_SIZES = (16, 1)  # sizes to try in place of the model's open sizes; the first that it can compute is used
RUNS = 5  # most runs of each way
BUDGET_S = 2.0  # seconds for the runs of one model; each way is run at least twice


@dataclass(frozen=True)
class TrialResult:
    half_ms: float  # milliseconds of the shortest run in half precision
    float32_ms: float  # milliseconds of the shortest run in float32
    error: float  # the largest difference of the answers, divided by the output's largest value; infinite if one is not finite
    # Whether the answers were compared with recorded samples, computed in float32, and not for a made-up batch.
    recorded: bool = False


@dataclass(frozen=True)
class ResultCache(ABC, Generic[R]):
    """A folder of results, one small JSON file each. Unreadable or unwritable files only cost another trial."""

    folder: Path | None  # None caches nothing

    @abstractmethod
    def from_json(self, known: Any) -> R: ...

    @abstractmethod
    def to_json(self, result: R) -> Any: ...

    def find(self, key: str) -> R | None:
        if self.folder is None:
            return None
        try:
            return self.from_json(json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, key: str, result: R) -> None:
        if self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(self.folder / f"{key}.json") as file:
                file.write(json.dumps(self.to_json(result)).encode())


class TrialCache(ResultCache[TrialResult]):
    def from_json(self, known: Any) -> TrialResult:
        half_ms, float32_ms, error = (float(known[name]) for name in ("half_ms", "float32_ms", "error"))
        return TrialResult(half_ms, float32_ms, error, known["recorded"] is True)

    def to_json(self, result: TrialResult) -> Any:
        return asdict(result)


def compared(
    half: Backend, float32: Backend, interface: ModelInterface, rows: int, samples: RecordedSamples | None = None
) -> TrialResult | None:
    """Run both backends in turns on the same batch; None if the model cannot compute a made-up one.

    `rows` is the largest batch, 0 for a model without a batch dimension. With `samples`, the answers in half precision are
    compared with the recorded ones; otherwise a batch is made up.
    """
    batches: Iterable[tuple[Mapping[str, Array], Mapping[str, Array] | None]]
    if samples is None:
        guessed = ({spec.name: made_up(spec, min(rows, MOST_ROWS), size) for spec in interface.inputs} for size in FREE_SIZES)
        batches = ((batch, None) for batch in guessed)
    else:
        batches = [(samples.inputs, samples.answers)]
    for batch, recorded in batches:
        try:
            answers, computed = _run(half, batch)[1], _run(float32, batch)[1]
            error = largest_error(answers, computed if recorded is None else recorded)
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


def made_up(spec: TensorSpec, rows: int, size: int) -> Array:
    """Make an input up: integers are ones (valid indices, lengths and masks), other numbers are normally distributed."""
    own = spec.shape[1:] if rows else spec.shape
    shape = (*((rows,) if rows else ()), *(size if n == ANY_SIZE else n for n in own))
    if spec.datatype.array_dtype.kind in "iub":
        return np.ones(shape, spec.datatype.array_dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def largest_error(answers: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Return the largest difference, divided by the output's largest value; infinite if not both are finite."""
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
        return largest_error(_run(backend, samples.inputs)[1], samples.answers)
    except (InferenceError, InstanceLostError):
        return math.inf


def describe(result: TrialResult, precision: Any, rows: int, float32_runtime: str) -> str:
    """Describe a measurement in words; `rows` is the model's largest batch, 0 for a model without a batch dimension."""
    batch = f"for a batch of {min(rows, MOST_ROWS)}" if rows else "for a request"
    half, float32 = (f"{ms:.3g}" if ms < SHORT_MS else f"{ms:,.0f}" for ms in (result.half_ms, result.float32_ms))
    times = f"OpenVINO in {precision} {half} ms, {float32_runtime} in float32 {float32} ms {batch}"
    answers = "the answers to recorded samples" if result.recorded else "they"
    return f"{times}; {answers} differ by {result.error:.2g} of the largest value"
