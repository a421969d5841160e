"""Runs a model version before it serves, so that a model that cannot run is refused, and the first request is fast.

The runs are the batches that its configuration describes, and one batch of every size that the batcher will form.
"""

from __future__ import annotations

import math

from halfserve.serve.engine.backend import CALLING_PROVIDERS, CPU_PROVIDERS, PYTHON, Backend
from halfserve.serve.engine.background_threads import pause
from halfserve.serve.engine.dispatch.short_batches import LONE_S
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.execution.batch import run_batch
from halfserve.serve.engine.results import Answered
from halfserve.serve.engine.tensors import ANY_SIZE, Tensors
from halfserve.serve.trials.tried_version import TrialBatch, TriedVersion

RUNS = 8


def warm_up(tried: TriedVersion) -> None:
    """Run every copy on the batches of its configuration, then on every batch size.

    After the budget no further size is run. A single row, and each declared batch once, are always run.

    Raises:
        ModelLoadError: the model failed, or its answer does not fit its interface.
    """
    model, budget_s = tried.model, tried.budget_s
    is_code = model.interface.kind is PYTHON  # code runs only on declared batches, because guessed ones may have effects
    if tried.is_off or model.config.model_transaction_policy.decoupled:
        return
    for warm_up_declared in tried.too_large_declared():
        what = f"model_warmup {warm_up_declared.name!r}"
        tried.warn("%s: %s was not run: it could take all memory that is available", what)
    left_out = tried.too_large()
    if left_out:
        sizes = ", ".join(map(str, left_out))
        tried.warn("%s: batches of %s were not tried out: they could take all memory that is available", sizes)
    until = tried.until()
    for backend in model.backends:
        for batch in tried.declared:
            done = _repeat(tried, backend, batch, until)
            if done < batch.times:
                how_often = f"{done} of {batch.times} times"
                tried.warn("%s: %s was run %s, for as long as %g s", batch.what, how_often, budget_s)
        for batch in () if is_code else tried.sized():
            if batch.rows > 1 and tried.clock() > until:
                tried.warn("%s: %s and more were not tried out in %g s", batch.what, budget_s)
                break
            if not _try(tried, backend, batch):
                break
            pause()


def settle(tried: TriedVersion, backend: Backend) -> None:
    """Run every batch size on a device from the calling thread, which then computes the batches of clients.

    A device's runtime keeps handles and recordings by thread. The second run of a size records it, and no further size is run
    after the budget.

    Raises:
        ModelLoadError: the model failed, or its answer does not fit its interface.
    """
    model = tried.model
    if tried.is_off or model.config.model_transaction_policy.decoupled:
        return
    if model.interface.kind is PYTHON or backend.provider in CPU_PROVIDERS:
        return
    until = tried.until()
    for batch in tried.sized():
        if tried.clock() > until:
            tried.warn("%s: %s and more were not run on the thread that serves in %g s", batch.what, tried.budget_s)
            return
        if not all(_try(tried, backend, batch) for _ in range(2)):
            return


def _repeat(tried: TriedVersion, backend: Backend, batch: TrialBatch, until: float) -> int:
    """Run the batch as often as it says, or until the time is over, but at least once; returns the number of runs."""
    for done in range(1, batch.times + 1):
        _try(tried, backend, batch)
        if tried.clock() > until:
            return done
    return batch.times


def _try(tried: TriedVersion, backend: Backend, batch: TrialBatch) -> bool:
    """Return whether the model has answered; a failure is an error unless the batch's sizes are guessed."""
    result = tried.run(backend, batch)
    wrong = _misfit(tried, result.answers[0]) if isinstance(result, Answered) else str(result.error)
    if wrong is None:
        return True
    if batch.binding:
        raise ModelLoadError(
            f"{tried.model.path}: {batch.what} failed: {wrong}; mend the model, describe inputs that it can take in "
            "model_warmup, or set the parameter halfserve.warm_up to 'off'"
        )
    tried.warn("%s: cannot be tried out (%s); describe inputs that it can take in model_warmup", wrong)
    return False


def _misfit(tried: TriedVersion, outputs: Tensors) -> str | None:
    """Return why an answer does not fit the interface; None if it fits."""
    for spec in tried.model.interface.outputs:
        shape = tuple(outputs[spec.name].shape)
        expected = spec.shape if spec.model_shape is None else spec.model_shape
        # The number of rows may differ: such a model's requests are computed one by one.
        given_sizes, expected_sizes = (shape[1:], expected[1:]) if tried.is_batched else (shape, expected)
        fits = len(shape) == len(expected) and all(e in {ANY_SIZE, g} for g, e in zip(given_sizes, expected_sizes, strict=True))
        if not fits:
            return f"output {spec.name!r} has shape {list(shape)}, the model's file promises {list(expected)}"
    return None


def short_sizes(tried: TriedVersion) -> dict[int, float]:
    """Measure batches of growing size until one is not short, so that the first short batches of clients run on the event loop.

    Returns batch rows -> least seconds that a batch takes on the slowest copy; nothing if requests may differ in shape or time,
    if batches run on a device, or if warm-up is off.
    """
    backends = tried.model.backends
    if tried.is_off or not tried.model.interface.is_steady(batched=tried.is_batched):
        return {}
    if any(backend.provider not in CALLING_PROVIDERS for backend in backends):
        return {}
    sizes = {}
    for batch in sorted(tried.sized(), key=lambda batch: batch.rows):
        seconds = max(_shortest_s(tried, backend, batch) for backend in backends)
        if seconds > LONE_S:
            break
        sizes[batch.rows] = seconds
        pause()
    return sizes


def _shortest_s(tried: TriedVersion, backend: Backend, batch: TrialBatch) -> float:
    """Return the seconds of the fastest of RUNS runs, stopped early if the first ones are too long; inf if the model fails.

    The time is that of the clock: a runtime with threads of its own keeps this thread waiting, and would keep the event loop.
    """
    shortest = math.inf
    for _ in range(RUNS):
        asked = [tried.request(batch)]
        started = tried.clock()
        (result,) = run_batch(backend, asked)
        seconds = tried.clock() - started
        if not isinstance(result, Answered):
            return math.inf
        shortest = min(shortest, seconds)
        if shortest > 2 * LONE_S:
            break
    return shortest
