"""Which rows of a batch belong to which request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import TypeAlias

from serve.engine.requests import InferRequest

Part: TypeAlias = slice | EllipsisType


def parts(requests: Sequence[InferRequest], *, batched: bool) -> Iterator[Part]:
    """For each request what to index a batch's arrays with; a model without a batch dimension runs one request at a time."""
    if not batched:
        yield ...
        return
    start = 0
    for request in requests:
        yield slice(start, start + request.rows)
        start += request.rows
