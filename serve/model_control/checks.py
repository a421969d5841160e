"""Checks of a model version around its load: memory, batch invariance."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from halfserve.serve.backends.onnx_runtime.onnx_file import data_bytes, open_onnx
from halfserve.serve.engine.backend import CALLING_PROVIDERS
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.execution.batch_invariance import BatchInvariance, dependent_output
from halfserve.serve.engine.repository.loaded_version import LoadedVersion
from halfserve.serve.engine.resource_limits import available_bytes
from halfserve.serve.engine.results import Answered
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.model_control.warm_up import WarmUpRequest, declared_requests, run_alone, sized_requests, too_large

logger = logging.getLogger(__name__)


MB = 1e6
PAIR = 2


def require_memory(model: Path, copies: int) -> None:
    """Check that memory suffices for a model file and its data files, once per copy, which is the least that the model takes.

    Raises:
        ModelLoadError: memory does not suffice.
    """
    available = available_bytes()
    if available is None:
        return
    needed = _weights_bytes(model) * max(1, copies)
    if needed > available:
        raise ModelLoadError(
            f"{model}: not enough memory: it takes at least {needed / MB:.0f} MB, {available / MB:.0f} MB are available; "
            "unload another model, or ask for fewer copies (instance_group)"
        )


def _weights_bytes(model: Path) -> int:
    """Return the size of the model file, its data files, and files beside it that begin with its name (model.onnx.data)."""
    beside = {path for path in model.parent.iterdir() if path.name.startswith(model.name)}
    if model.suffix == ".xml":  # OpenVINO's weights
        beside.add(model.with_suffix(".bin"))
    locations, read = _data(model)
    named = {model.parent / name for name in locations}
    return _size(beside - named) + max(_size(named), read)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _data(model: Path) -> tuple[frozenset[str], int]:
    """Return the data files, and the bytes that tensors read from them: more than the files' size if several read the same
    bytes.
    """
    try:
        with open_onnx(model) as opened:
            return opened.data_files, data_bytes(opened.model, model)
    except ModelLoadError:  # or it is another kind of model; loading it reports the error
        return frozenset(), 0


class _NotFoundOutError(Exception):
    """The reason why batch invariance cannot be checked."""


def check_batch_invariance(version: LoadedVersion, budget_s: float) -> None:
    """Have requests computed one by one if sharing a batch changes their answers. Two rows are computed alone and together.

    If the configuration sets max_batch_size, requests share batches nevertheless, and a warning is logged. If the check is not
    possible within `budget_s` seconds, the first requests that share a batch are compared. The version must be warmed up.

    Raises:
        ModelLoadError: the device was lost.
    """
    invariance = version.invariance
    if invariance is None or not invariance.is_safe or version.config.max_batch_size < PAIR:
        return
    says_so = version.files.config.says_batch_size
    try:
        mixed = _found_mixed(version, budget_s)
    except _NotFoundOutError as error:
        if not says_so:
            _leave_in_doubt(version, invariance, str(error))
        return
    if mixed is None:
        return
    logger.warning(
        "%s/%s: output %r of a row depends on the other rows of its batch; %s. To say so from the start, set max_batch_size: 0",
        version.files.name,
        version.files.version,
        mixed,
        "requests that share one change each other's answers, as max_batch_size allows" if says_so
        else "its requests are computed one by one",
        extra={"model": f"{version.files.name}/{version.files.version}"},
    )  # fmt: skip
    if not says_so:
        invariance.is_safe = False


def _leave_in_doubt(version: LoadedVersion, invariance: BatchInvariance, reason: str) -> None:
    if own_parameter(version.config, "halfserve.max_compute_s") is None:
        invariance.is_doubtful = True
        return
    # Comparing requests while serving could exceed halfserve.max_compute_s, and the copy would be taken out of service.
    invariance.is_safe = False
    logger.warning(
        "%s/%s: whether rows of a batch depend on each other was not found out (%s); its requests are computed one by one. If "
        "they do not, set max_batch_size",
        version.files.name,
        version.files.version,
        reason,
        extra={"model": f"{version.files.name}/{version.files.version}"},
    )


def _found_mixed(version: LoadedVersion, budget_s: float) -> str | None:
    """Return the name of an output whose rows depend on each other; None if there is none."""
    if own_parameter(version.config, "halfserve.warm_up") is False:
        raise _NotFoundOutError("halfserve.warm_up is off")
    inputs = _one_row(version)
    until = time.monotonic() + budget_s

    def answer(rows: Tensors) -> Tensors:
        if time.monotonic() > until:
            raise _NotFoundOutError(f"it takes longer than {budget_s:g} s")
        return _answer(version, rows)

    mixed = dependent_output(answer, *_pair(version, inputs, seed=0))
    # A single difference may be a predicted class that rounding has changed, so that a second one is required.
    return mixed and dependent_output(answer, *_pair(version, inputs, seed=1))


def _one_row(version: LoadedVersion) -> Mapping[str, Array]:
    """Return inputs of one row like those of the warm-up."""
    declared = declared_requests(version)
    like = declared[0] if declared else None
    if any(rows <= PAIR for rows in too_large(version, like)):
        raise _NotFoundOutError("two of its rows could take all memory that is available")
    return next(sized_requests(version, like)).inputs


def _pair(version: LoadedVersion, row: Mapping[str, Array], *, seed: int) -> tuple[Tensors, Tensors, Tensors]:
    """Return two rows that vary this one, and both together."""
    random, on_cpu = np.random.default_rng(seed), version.backends[0].provider in CALLING_PROVIDERS
    first, second = ({name: _varied(array, random, on_cpu=on_cpu) for name, array in row.items()} for _ in range(PAIR))
    return first, second, {name: np.concatenate([first[name], second[name]]) for name in first}


def _varied(row: Array, random: np.random.Generator, *, on_cpu: bool) -> Array:
    """Return another row of the same kind.

    Integers may be indices, lengths or divisors: they stay small, and on a device they are unchanged, because an index out of
    range could break it.
    """
    kind = row.dtype.kind
    if row.dtype.hasobject or (kind in "iu" and not on_cpu):
        return row
    if row.dtype == np.uint8:
        return np.asarray(random.integers(1, 256, row.shape, dtype=np.uint8))
    if kind in "iu":
        return np.asarray(row + random.integers(0, 2, row.shape).astype(row.dtype))
    if kind == "b":
        return np.asarray(random.integers(0, 2, row.shape) == 1)
    return np.asarray(random.standard_normal(row.shape)).astype(row.dtype)


def _answer(version: LoadedVersion, inputs: Tensors) -> Tensors:
    """Return the answer of the first copy."""
    rows = len(next(iter(inputs.values())))
    pause()
    result = run_alone(version, version.backends[0], WarmUpRequest(what="rows", rows=rows, inputs=inputs))
    if not isinstance(result, Answered):
        raise _NotFoundOutError("it does not take what can be guessed")
    # The arrays are copied because the next run may reuse their memory.
    outputs = {name: array.copy() for name, array in result.answers[0].items()}
    if any(array.shape[:1] != (rows,) for array in outputs.values()):
        raise _NotFoundOutError("its rows do not come out as they go in")
    return outputs
