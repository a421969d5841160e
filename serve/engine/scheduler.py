"""The interface of schedulers, which take a model's requests, and of the composition of ensembles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from halfserve.serve.engine.requests import InferRequest


class Scheduler(Protocol):
    """Takes requests and gives each its answer. Used on the event loop only."""

    def submit(self, request: InferRequest) -> None:
        """Queue a request; its `done` is called later on this event loop, exactly once unless it is cancelled.

        Raises:
            InferenceError: the request is refused.
        """

    def cancel(self, request: InferRequest) -> None:
        """Drop a request whose client has gone: free its resources, and discard its answer."""

    async def drain(self) -> None:
        """Refuse new requests, finish the accepted ones, and stop."""


class Composition(Protocol):
    """The parts of a model without backends of its own: an ensemble."""

    @property
    def provider(self) -> str:
        """The execution providers of its parts, each once."""

    @property
    def precision(self) -> str:
        """The compute precisions of its parts, each once."""

    @property
    def models(self) -> frozenset[str]:
        """The names of the models of which it consists, at any depth."""

    @property
    def parts(self) -> Sequence[str]:
        """One line per part: its model, its provider and precision, and its certificate's verdict."""

    @property
    def is_decoupled(self) -> bool:
        """Whether one of its parts gives any number of responses to a request."""

    def labels_of(self, output: str) -> Sequence[str]:
        """Return the class names of an output, which are those of the part that computes it."""

    @property
    def fault(self) -> str:
        """Reason why no request can be answered now; "" if requests can be answered."""

    @property
    def is_ready(self) -> bool:
        """Whether requests are likely to be answered."""


class Holder(Protocol):
    """Sends requests to models on behalf of its own requests."""

    async def released(self) -> None:
        """Wait until its accepted requests no longer need these models."""
