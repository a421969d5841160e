"""Which rows of a batch belong to which request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import TypeAlias

from serve.engine.requests import InferRequest
from serve.engine.tensors import Tensors

Part: TypeAlias = slice | EllipsisType


def parts(requests: Sequence[InferRequest], inputs: Tensors, *, batched: bool) -> Iterator[Part]:
    """For each request what to index a batch's arrays with.

    A request that was computed alone gets all that the model answered, which may be more rows than it sent. So it always is
    with a model without a batch dimension.

    Args:
        requests: of the batch, in the order of their rows.
        inputs: that the model got, by name; rows beyond the requests' are padding.
        batched: the model has a batch dimension.
    """
    if not batched or (len(requests) == 1 and next(iter(inputs.values())).shape[0] == requests[0].rows):
        yield ...
        return
    start = 0
    for request in requests:
        yield slice(start, start + request.rows)
        start += request.rows
