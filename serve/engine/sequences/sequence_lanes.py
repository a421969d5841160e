"""Divides the sequences of a model between its copies, each of which keeps its sequences' states in itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from halfserve.serve.engine.model import Scheduler
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.sequences.sequence import slot_of


class SequenceLanes:
    """Passes each request to the copy of its sequence, which follows from the sequence's slot. Takes requests whose `done` is a
    Step.
    """

    def __init__(self, lanes: Sequence[Scheduler]) -> None:
        """`lanes`: one scheduler for each copy."""
        self._lanes = lanes

    @property
    def is_idle(self) -> bool:
        """See `Scheduler`."""
        return all(lane.is_idle for lane in self._lanes)

    def submit(self, request: InferRequest) -> None:
        """See `Scheduler`."""
        self._lane(request).submit(request)

    def cancel(self, request: InferRequest) -> None:
        """See `Scheduler`."""
        self._lane(request).cancel(request)

    async def drain(self) -> None:
        """See `Scheduler`."""
        await asyncio.gather(*(lane.drain() for lane in self._lanes))

    def _lane(self, request: InferRequest) -> Scheduler:
        return self._lanes[slot_of(request) % len(self._lanes)]
