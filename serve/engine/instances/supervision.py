"""How a copy of a model is run and watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve.engine.backend import Backend
from serve.engine.batches.batch import Answered, Failed
from serve.engine.errors import InferenceError
from serve.engine.precision_guard.guard import PrecisionGuard
from serve.engine.queueing.joining import Joining
from serve.engine.requests import InferRequest

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True)
class Lost:
    """Requests that were being computed when their copy broke; another one may compute them.

    Attributes:
        requests: in order of arrival.
        error: what they get if none can.
        untouched: their batch had not begun, so that none of them has broken the copy.
    """

    requests: list[InferRequest]
    error: InferenceError
    untouched: bool = False


@dataclass(frozen=True)
class Late:
    """Requests whose time ran out behind the batch that their copy computed before: they were not computed."""

    requests: list[InferRequest]


Results = Sequence[Answered | Failed | Lost | Late]
Finished = Callable[[Results], None]


def seconds_of(results: Results) -> float | None:
    """What a batch took; None for one that did not go through as a whole."""
    first = results[0]
    if len(results) > 1 or not isinstance(first, Answered):
        return None
    return (first.times.split - first.times.started) / 1e9


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """What all copies of one model have in common.

    Attributes:
        label: "name/version", for the log.
        guard: looks at every batch's outputs; None does not.
        padded_sizes: rows that a batch is filled up to, in rising order.
        joining: whether requests may share batches; None where there are no rows to share.
        reload: loads the copy of this number anew; None tries the old one again, once its thread is free.
        max_compute_s: seconds after which a batch is given up (a quarter later at most); None waits for ever.
        open_ended: the values in a batch decide how long it takes.
        first_wait_s: seconds from a fault until the copy is loaded anew. Each further one doubles them, up to a minute, until a
            batch is computed again.
    """

    label: str
    guard: PrecisionGuard | None = None
    padded_sizes: Sequence[int] = ()
    joining: Joining | None = None
    reload: Callable[[int], Backend] | None = None
    max_compute_s: float | None = None
    open_ended: bool = False
    first_wait_s: float = FIRST_WAIT_S
