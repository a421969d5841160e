"""What takes a model's requests: its batcher, or what stands before or in place of one."""

from __future__ import annotations

from collections.abc import Sequence
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


class Composition(Protocol):
    """What a model without backends of its own is made of."""

    @property
    def provider(self) -> str:
        """The execution providers of its parts, each once."""

    @property
    def precision(self) -> str:
        """The compute precisions of its parts, each once."""

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that it is made of, at any depth."""

    @property
    def parts(self) -> Sequence[str]:
        """Each part in a line: its model, where and in which precision it computes, and its certificate's verdict."""

    @property
    def is_decoupled(self) -> bool:
        """Whether one of its parts gives any number of responses to a request."""

    def labels_of(self, output: str) -> Sequence[str]:
        """Class names of an output, of the part that computes it."""

    @property
    def fault(self) -> str:
        """Why no request can be answered now; "" where they can."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are likely to be answered."""


class Holder(Protocol):
    """Sends requests to models on behalf of its own requests."""

    async def released(self) -> None:
        """Return once its accepted requests need these models no more."""
