"""What takes a model's requests: its batcher, or what stands before or in place of one."""

from __future__ import annotations

from typing import Protocol

from halfserve.serve.engine.requests import InferRequest


class Scheduler(Protocol):
    """Takes requests and gives each its answer. Used on the event loop only."""

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            InferenceError: it is refused.
        """

    def cancel(self, request: InferRequest) -> None:
        """The client has gone: free what the request holds, and drop its answer."""

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and stop."""
