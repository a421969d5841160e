"""Run a model version before anyone else does: a model that cannot run is found out, and the first request is a fast one."""

from __future__ import annotations

import logging
import time

from serve.control.warm_up_requests import WarmUpRequest, declared_requests, sized_requests, too_large, too_large_declared
from serve.engine.backend import Backend
from serve.engine.batches.batch import Answered, Failed, run_batch
from serve.engine.configuration.own_parameters import own_parameter
from serve.engine.device_faults import InstanceLostError
from serve.engine.errors import ModelLoadError
from serve.engine.pauses import pause
from serve.engine.repository.loaded_version import LoadedVersion
from serve.engine.tensors import ANY_SIZE, Tensors

logger = logging.getLogger(__name__)


def warm_up(version: LoadedVersion, budget_s: float) -> None:
    """Run every copy on what its configuration describes, then on every batch size that it will be given.

    Args:
        version: the model version.
        budget_s: after so many seconds no further size is tried. What the configuration describes, and one row, always is; more
            than once only within that time.

    Raises:
        ModelLoadError: the model failed, or its answer does not fit its interface.
    """
    if own_parameter(version.config, "halfserve.warm_up") is False:
        return
    for warm_up_declared in too_large_declared(version):
        what = f"model_warmup {warm_up_declared.name!r}"
        logger.warning("%s: %s was not run: it could take all memory that is available", _name(version), what)
    declared = declared_requests(version)
    like = declared[0] if declared else None
    left_out = too_large(version, like)
    if left_out:
        sizes = ", ".join(map(str, left_out))
        logger.warning(
            "%s: batches of %s were not tried out: they could take all memory that is available", _name(version), sizes
        )
    until = time.monotonic() + budget_s
    for backend in version.backends:
        for request in declared:
            done = _repeat(version, backend, request, until)
            if done < request.times:
                how_often = f"{done} of {request.times} times"
                logger.warning("%s: %s was run %s, for as long as %g s", _name(version), request.what, how_often, budget_s)
        for request in sized_requests(version, like):
            if request.rows > 1 and time.monotonic() > until:
                logger.warning("%s: %s and more were not tried out in %g s", _name(version), request.what, budget_s)
                break
            if not _try(version, backend, request):
                break
            pause()


def _repeat(version: LoadedVersion, backend: Backend, request: WarmUpRequest, until: float) -> int:
    """How often it was run: as often as it says, or for as long as there is time, and once at least."""
    for done in range(1, request.times + 1):
        _try(version, backend, request)
        if time.monotonic() > until:
            return done
    return request.times


def _try(version: LoadedVersion, backend: Backend, request: WarmUpRequest) -> bool:
    """Whether the model has answered; it need not where the request's sizes are a guess."""
    result = run_alone(version, backend, request)
    wrong = _misfit(version, result.answers[0]) if isinstance(result, Answered) else str(result.error)
    if wrong is None:
        return True
    if request.binding:
        raise ModelLoadError(
            f"{version.files.model}: {request.what} failed: {wrong}; mend the model, describe inputs that it can take in "
            "model_warmup, or set the parameter halfserve.warm_up to 'off'"
        )
    logger.warning("%s: cannot be tried out (%s); describe inputs that it can take in model_warmup", _name(version), wrong)
    return False


def run_alone(version: LoadedVersion, backend: Backend, request: WarmUpRequest) -> Answered | Failed:
    """What a copy makes of a request.

    Raises:
        ModelLoadError: the device was lost.
    """
    try:
        (result,) = run_batch(backend, [request.to_model(version)], joining=version.joining)
    except InstanceLostError as error:
        raise ModelLoadError(f"{version.files.model}: the device failed while it was tried out: {error}") from None
    return result


def _misfit(version: LoadedVersion, outputs: Tensors) -> str | None:
    """Why an answer is not what the interface promises; None where it is."""
    batched = version.config.max_batch_size > 0
    for spec in version.interface.outputs:
        shape = tuple(outputs[spec.name].shape)
        expected = spec.shape if spec.model_shape is None else spec.model_shape
        # How many rows an answer has is between the model and its batches; the server takes such a model's requests one by one.
        given_sizes, expected_sizes = (shape[1:], expected[1:]) if batched else (shape, expected)
        fits = len(shape) == len(expected) and all(e in {ANY_SIZE, g} for g, e in zip(given_sizes, expected_sizes, strict=True))
        if not fits:
            return f"output {spec.name!r} has shape {list(shape)}, the model's file promises {list(expected)}"
    return None


def _name(version: LoadedVersion) -> str:
    return f"{version.files.name}/{version.files.version}"
