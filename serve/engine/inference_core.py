"""The server without a transport: which models there are, whether they are ready, and the way in for requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from serve.engine.errors import InvalidArgumentError, NotFoundError, UnavailableError
from serve.engine.model import Model
from serve.engine.requests import InferRequest


class InferenceCore:
    """Holds the loaded models. Lives on one event loop."""

    def __init__(self, models: Iterable[Model]) -> None:
        self._models: dict[str, dict[int, Model]] = {}
        for model in models:
            self._models.setdefault(model.name, {})[model.version] = model
        self._draining = False
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not self._draining

    def models(self) -> list[Model]:
        """Every model version, by name and version."""
        return [versions[v] for _, versions in sorted(self._models.items()) for v in sorted(versions)]

    def versions(self, name: str) -> list[Model]:
        """The served versions of one model, oldest first.

        Raises:
            NotFoundError: no model of this name.
        """
        versions = self._models.get(name)
        if versions is None:
            raise NotFoundError(f"model {name!r} is not served here; RepositoryIndex lists what is")
        return [versions[v] for v in sorted(versions)]

    def model(self, name: str, version: str = "") -> Model:
        """One model version; "" is the latest one.

        Raises:
            NotFoundError: no such model or version.
            InvalidArgumentError: the version is not a number.
        """
        if not version:
            return self.versions(name)[-1]
        if not (version.isascii() and version.isdigit()):
            raise InvalidArgumentError(
                f"model version {version!r} is not a number; expected one such as '1', or '' for the latest"
            )
        served = self.versions(name)
        found = next((m for m in served if m.version == int(version)), None)
        if found is None:
            known = ", ".join(str(m.version) for m in served)
            raise NotFoundError(f"model {name!r} has no version {version}; served: {known}")
        return found

    def submit(self, model: Model, request: InferRequest) -> None:
        """Queue a request.

        Raises:
            UnavailableError: the server is draining.
            QueueFullError: the model's queue has reached its bound.
        """
        if self._draining:
            raise UnavailableError("the server is shutting down; send the request to another replica")
        model.batcher.submit(request)

    async def drain(self) -> None:
        """Stop taking requests and finish those that were taken."""
        self._draining = True
        self._changed.set()
        self._changed = asyncio.Event()
        await asyncio.gather(*(model.batcher.drain() for model in self.models()))

    @property
    def changed(self) -> asyncio.Event:
        """Is set when readiness next changes. Take it before reading what may change, so that no change is missed."""
        return self._changed
