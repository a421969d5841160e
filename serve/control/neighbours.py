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
from serve.engine.configuration.own_parameters import own_parameter
from serve.engine.instances.instance import ON_CPU
from serve.engine.pauses import pause
from serve.engine.repository.loaded_version import LoadedVersion
from serve.engine.tensors import Array, Tensors

logger = logging.getLogger(__name__)

# Of an output's largest value, and of all whole numbers: far more than kernels for another size make of it, or int8 scales that
# are taken over all rows.
ALIKE = 0.1
PAIR = 2


class _TookTooLongError(Exception):
    """There is no time for another run."""


def look_at_neighbours(version: LoadedVersion, budget_s: float) -> None:
    """Have requests share no batches where that changes their answers. Where the configuration says a max_batch_size they do
    all the same, and a warning says what that means.

    Args:
        version: that has been warmed up.
        budget_s: after so many seconds nothing more is run.

    Raises:
        ModelLoadError: the device was lost.
    """
    joining = version.joining
    if joining is None or not joining.is_safe or version.config.max_batch_size < PAIR:
        return
    if own_parameter(version.config, "halfserve.warm_up") is False:
        return
    inputs = _one_row(version)
    if inputs is None:
        return
    until = time.monotonic() + budget_s
    try:
        mixed = _mixed_output(version, inputs, until, seed=0)
        if mixed is None or _mixed_output(version, inputs, until, seed=1) is None:  # a class may be another by a rounding, once
            return
    except _TookTooLongError:
        logger.warning(
            "%s/%s: whether rows of a batch depend on each other was not found out in %g s; if so, set max_batch_size: 0",
            version.files.name,
            version.files.version,
            budget_s,
        )
        return
    says_so = version.files.config.says_batch_size
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


def _one_row(version: LoadedVersion) -> Mapping[str, Array] | None:
    """Inputs such as the warm-up's; None where memory would not hold a pair of them."""
    declared = declared_requests(version)
    like = declared[0] if declared else None
    if any(rows <= PAIR for rows in too_large(version, like)):
        return None
    return next(sized_requests(version, like)).inputs


def _mixed_output(version: LoadedVersion, row: Mapping[str, Array], until: float, *, seed: int) -> str | None:
    """The first output that shows it, with rows such as this one; None where none does, or nothing can be told."""
    random, on_cpu = np.random.default_rng(seed), version.backends[0].provider == ON_CPU
    first, second = ({name: _varied(array, random, on_cpu=on_cpu) for name, array in row.items()} for _ in range(PAIR))
    together = {name: np.concatenate([first[name], second[name]]) for name in first}
    answers = [_answer(version, inputs, until) for inputs in (first, second, first, together)]
    if any(not answer for answer in answers):
        return None
    for name, both in answers[3].items():
        alone, again = (np.concatenate([answers[index][name], answers[1][name]]) for index in (0, 2))
        if not _differ(alone, again) and _differ(alone, both):  # else it is a matter of chance
            return name
    return None


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


def _answer(version: LoadedVersion, inputs: Mapping[str, Array], until: float) -> Tensors:
    """What the first copy answers; nothing where it cannot, as with sizes that had to be guessed, or other rows come out."""
    if time.monotonic() > until:
        raise _TookTooLongError
    rows = len(next(iter(inputs.values())))
    pause()
    result = run_alone(version, version.backends[0], WarmUpRequest(what="rows", rows=rows, inputs=inputs))
    # Copies: the next run may write where this one has written.
    outputs = {name: array.copy() for name, array in result.answers[0].items()} if isinstance(result, Answered) else {}
    return outputs if all(array.shape[:1] == (rows,) for array in outputs.values()) else {}


def _differ(ones: Array, others: Array) -> bool:
    """Whether two outputs are not alike; they are where there is nothing to compare."""
    if ones.shape != others.shape or not ones.size or ones.dtype.hasobject:
        return False
    if ones.dtype.kind in "iub" and float(np.mean(ones != others)) <= ALIKE:
        return False  # otherwise these may be roundings, as in the pixels of a picture
    a, b = (array.astype(np.float64) for array in (ones, others))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    return bool(a.size) and float(np.abs(a - b).max()) > ALIKE * max(float(np.abs(a).max()), float(np.abs(b).max()))
