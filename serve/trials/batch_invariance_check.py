"""Checks before a model serves whether its requests may share batches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from halfserve.serve.engine.backend import CALLING_PROVIDERS
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.execution.batch_invariance import dependent_output
from halfserve.serve.engine.results import Answered
from halfserve.serve.engine.tensors import Array, Tensors
from halfserve.serve.trials.tried_version import TrialBatch, TriedVersion

PAIR = 2


class _NotFoundOutError(Exception):
    """The reason why batch invariance cannot be checked."""


def check_batch_invariance(tried: TriedVersion) -> None:
    """Have requests computed one by one if sharing a batch changes their answers. Two rows are computed alone and together.

    If the configuration sets max_batch_size, requests share batches nevertheless, and a warning is logged. If the check is not
    possible within the budget, the first requests that share a batch are compared. The version must be warmed up.

    Raises:
        ModelLoadError: the device was lost.
    """
    model, invariance = tried.model, tried.model.invariance
    if invariance is None or not invariance.is_safe or model.max_batch_size < PAIR:
        return
    says_so = model.declared.says_batch_size
    try:
        mixed = _found_mixed(tried)
    except _NotFoundOutError as error:
        if not says_so and own_parameter(model.config, "halfserve.max_compute_s") is None:
            invariance.is_doubtful = True
        elif not says_so:
            # Comparing requests while serving could exceed halfserve.max_compute_s, and the copy would be taken out of service.
            invariance.is_safe = False
            tried.warn(
                "%s: whether rows of a batch depend on each other was not found out (%s); its requests are computed one by "
                "one. If they do not, set max_batch_size",
                str(error),
            )
        return
    if mixed is None:
        return
    tried.warn(
        "%s: output %r of a row depends on the other rows of its batch; %s. To say so from the start, set max_batch_size: 0",
        mixed,
        "requests that share one change each other's answers, as max_batch_size allows" if says_so
        else "its requests are computed one by one",
    )  # fmt: skip
    if not says_so:
        invariance.is_safe = False


def _found_mixed(tried: TriedVersion) -> str | None:
    """Return the name of an output whose rows depend on each other; None if there is none."""
    if tried.is_off:
        raise _NotFoundOutError("halfserve.warm_up is off")
    row = _one_row(tried)
    until = tried.until()

    def answer(rows: Tensors) -> Tensors:
        if tried.clock() > until:
            raise _NotFoundOutError(f"it takes longer than {tried.budget_s:g} s")
        return _answer(tried, rows)

    mixed = dependent_output(answer, *_pair(tried, row, seed=0))
    # A single difference may be a predicted class that rounding has changed, so that a second one is required.
    return mixed and dependent_output(answer, *_pair(tried, row, seed=1))


def _one_row(tried: TriedVersion) -> Mapping[str, Array]:
    """Return inputs of one row like those of the warm-up."""
    if any(rows <= PAIR for rows in tried.too_large()):
        raise _NotFoundOutError("two of its rows could take all memory that is available")
    return next(tried.sized()).inputs


def _pair(tried: TriedVersion, row: Mapping[str, Array], *, seed: int) -> tuple[Tensors, Tensors, Tensors]:
    """Return two rows that vary this one, and both together."""
    random, on_cpu = np.random.default_rng(seed), tried.model.backends[0].provider in CALLING_PROVIDERS
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


def _answer(tried: TriedVersion, inputs: Tensors) -> Tensors:
    """Return the answer of the first copy."""
    rows = len(next(iter(inputs.values())))
    pause()
    result = tried.run(tried.model.backends[0], TrialBatch(what="rows", rows=rows, inputs=inputs))
    if not isinstance(result, Answered):
        raise _NotFoundOutError("it does not take what can be guessed")
    # The arrays are copied because the next run may reuse their memory.
    outputs = {name: array.copy() for name, array in result.answers[0].items()}
    if any(array.shape[:1] != (rows,) for array in outputs.values()):
        raise _NotFoundOutError("its rows do not come out as they go in")
    return outputs
