"""How long the short batches of a model version take, so that the first one that serves is computed where the thousandth is."""

from __future__ import annotations

import math
import time

from serve.control.warm_up_requests import WarmUpRequest, declared_requests, sized_requests
from serve.engine.backend import Backend
from serve.engine.batches.batch import Answered, run_batch
from serve.engine.configuration.own_parameters import own_parameter
from serve.engine.instances.instance import ON_CPU
from serve.engine.instances.short_batches import LONE_S
from serve.engine.pauses import pause
from serve.engine.repository.loaded_version import LoadedVersion

RUNS = 8


def short_sizes(version: LoadedVersion) -> dict[int, float]:
    """Run batches of growing size until one is not short.

    Args:
        version: that has been warmed up.

    Returns:
        Seconds that a batch takes at best on the slowest copy, by rows. Nothing where requests may differ in shape or the time
        that they take, where batches run on a device, or where the model is not to be run before it serves.
    """
    if own_parameter(version.config, "halfserve.warm_up") is False:
        return {}
    steady = version.interface.is_steady(batched=version.config.max_batch_size > 0)
    if not steady or any(backend.provider != ON_CPU for backend in version.backends):
        return {}
    declared = declared_requests(version)
    sizes = {}
    for request in sorted(sized_requests(version, declared[0] if declared else None), key=lambda request: request.rows):
        seconds = max(_shortest_s(version, backend, request) for backend in version.backends)
        if seconds > LONE_S:
            break
        sizes[request.rows] = seconds
        pause()
    return sizes


def _shortest_s(version: LoadedVersion, backend: Backend, request: WarmUpRequest) -> float:
    """Of the fastest of some runs; of the first that was not short at all; inf where the model has no answer.

    By the clock: a runtime with threads of its own keeps this one waiting, and would keep the event loop.
    """
    shortest = math.inf
    for _ in range(RUNS):
        asked = [request.to_model(version)]
        started = time.monotonic()
        (result,) = run_batch(backend, asked)
        seconds = time.monotonic() - started
        if not isinstance(result, Answered):
            return math.inf
        shortest = min(shortest, seconds)
        if shortest > 2 * LONE_S:
            break
    return shortest
