"""Whether each row of a batch gets what it gets alone, which a model file does not say.

One that takes a mean over its first dimension, say, has numbers for a row that depend on the other rows, and these are other
clients'. So two rows are computed alone and together before a model serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np

from serve.control.warm_up import run_alone
from serve.control.warm_up_requests import WarmUpRequest, declared_requests, sized_requests, too_large
from serve.engine.batches.batch import Answered
from serve.engine.batches.likeness import mixed_output
from serve.engine.configuration.own_parameters import own_parameter
from serve.engine.instances.instance import ON_CPU
from serve.engine.pauses import pause
from serve.engine.queueing.joining import Joining
from serve.engine.repository.loaded_version import LoadedVersion
from serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)

PAIR = 2


class _NotFoundOutError(Exception):
    """Why nothing can be told."""


def look_at_neighbours(version: LoadedVersion, budget_s: float) -> None:
    """Have requests share no batches where that changes their answers. Where the configuration says a max_batch_size they do
    all the same, and a warning says what that means. What cannot be found out is left to the first requests that meet.

    Args:
        version: that has been warmed up.
        budget_s: after so many seconds nothing more is run.

    Raises:
        ModelLoadError: the device was lost.
    """
    joining = version.joining
    if joining is None or not joining.is_safe or version.config.max_batch_size < PAIR:
        return
    says_so = version.files.config.says_batch_size
    try:
        mixed = _found_mixed(version, budget_s)
    except _NotFoundOutError as error:
        if not says_so:
            _leave_in_doubt(version, joining, str(error))
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
    )  # fmt: skip
    if not says_so:
        joining.is_safe = False


def _leave_in_doubt(version: LoadedVersion, joining: Joining, reason: str) -> None:
    if own_parameter(version.config, "halfserve.max_compute_s") is None:
        joining.is_doubtful = True
        return
    # What is given up after so long would be the look, and the copy with it.
    joining.is_safe = False
    logger.warning(
        "%s/%s: whether rows of a batch depend on each other was not found out (%s); its requests are computed one by one. If "
        "they do not, set max_batch_size",
        version.files.name,
        version.files.version,
        reason,
    )


def _found_mixed(version: LoadedVersion, budget_s: float) -> str | None:
    """An output whose rows depend on each other; None where none does."""
    if own_parameter(version.config, "halfserve.warm_up") is False:
        raise _NotFoundOutError("halfserve.warm_up is off")
    inputs = _one_row(version)
    until = time.monotonic() + budget_s

    def answer(rows: Tensors) -> Tensors:
        if time.monotonic() > until:
            raise _NotFoundOutError(f"it takes longer than {budget_s:g} s")
        return _answer(version, rows)

    mixed = mixed_output(answer, *_pair(version, inputs, seed=0))
    return mixed and mixed_output(answer, *_pair(version, inputs, seed=1))  # a class may be another by a rounding, once


def _one_row(version: LoadedVersion) -> Mapping[str, Array]:
    """Inputs such as the warm-up's."""
    declared = declared_requests(version)
    like = declared[0] if declared else None
    if any(rows <= PAIR for rows in too_large(version, like)):
        raise _NotFoundOutError("two of its rows could take all memory that is available")
    return next(sized_requests(version, like)).inputs


def _pair(version: LoadedVersion, row: Mapping[str, Array], *, seed: int) -> tuple[Tensors, Tensors, Tensors]:
    """Two rows such as this one, and both together."""
    random, on_cpu = np.random.default_rng(seed), version.backends[0].provider == ON_CPU
    first, second = ({name: _varied(array, random, on_cpu=on_cpu) for name, array in row.items()} for _ in range(PAIR))
    return first, second, {name: np.concatenate([first[name], second[name]]) for name in first}


def _varied(row: Array, random: np.random.Generator, *, on_cpu: bool) -> Array:
    """Another row of the same kind.

    Whole numbers may be places, lengths or divisors: they stay small, and as they are on a device, which could be lost over a
    place that does not exist.
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
    """What the first copy answers."""
    rows = len(next(iter(inputs.values())))
    pause()
    result = run_alone(version, version.backends[0], WarmUpRequest(what="rows", rows=rows, inputs=inputs))
    if not isinstance(result, Answered):
        raise _NotFoundOutError("it does not take what can be guessed")
    # Copies: the next run may write where this one has written.
    outputs = {name: array.copy() for name, array in result.answers[0].items()}
    if any(array.shape[:1] != (rows,) for array in outputs.values()):
        raise _NotFoundOutError("its rows do not come out as they go in")
    return outputs
