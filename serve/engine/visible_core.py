"""The core as one sees it who may use some models only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from serve.engine.errors import NotFoundError
from serve.engine.inference_core import InferenceCore
from serve.engine.model import Model
from serve.engine.repository.version_states import VersionStatus
from serve.engine.requests import InferRequest


class VisibleCore(InferenceCore):
    """Hands on what concerns a visible model; of all others it says what a core without them would say.

    It is such a core: one without models. What is not handed on here, a method that is new included, finds nothing.
    """

    def __init__(self, core: InferenceCore, may_see: Callable[[str], bool]) -> None:
        """A view.

        Args:
            core: holds the models.
            may_see: whether a model is visible, by its name.
        """
        super().__init__([])
        self._core = core
        self._may_see = may_see
        self.figures = core.figures
        core.on_change(self.notify)

    def close(self) -> None:
        """See no models any more; whoever looks through this view is told, and what it remembers of them is forgotten."""
        self._core.off_change(self.notify)
        self._may_see = _nothing
        self.notify()

    @property
    def is_ready(self) -> bool:
        """As `InferenceCore.is_ready`."""
        return self._core.is_ready

    def models(self) -> list[Model]:
        """As `InferenceCore.models`, of the visible ones."""
        return [model for model in self._core.models() if self._may_see(model.name)]

    def served(self, name: str) -> list[Model]:
        """As `InferenceCore.served`."""
        return self._core.served(name) if self._may_see(name) else []

    def versions(self, name: str) -> list[Model]:
        """As `InferenceCore.versions`."""
        return self._core.versions(name) if self._may_see(name) else super().versions(name)

    def knows(self, name: str) -> bool:
        """As `InferenceCore.knows`."""
        return self._may_see(name) and self._core.knows(name)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """As `InferenceCore.is_model_ready`."""
        if self._may_see(name):
            return self._core.is_model_ready(name, version)
        return super().is_model_ready(name, version)

    def index(self) -> list[VersionStatus]:
        """As `InferenceCore.index`, of the visible ones."""
        return [status for status in self._core.index() if self._may_see(status.name)]

    def submit(self, model: Model, request: InferRequest) -> None:
        """As `InferenceCore.submit`; the model was found here, so it is visible."""
        self._core.submit(model, request)

    def wait_for(self, task: asyncio.Task[None]) -> None:
        """As `InferenceCore.wait_for`."""
        self._core.wait_for(task)

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """As `InferenceCore.load`."""
        if not self._may_see(name):
            raise NotFoundError(f"the repository has no model {name!r}; RepositoryIndex lists what it has")
        await self._core.load(name, config, files)

    async def unload(self, name: str) -> None:
        """As `InferenceCore.unload`."""
        if not self._may_see(name):
            raise NotFoundError(f"model {name!r} is not loaded; RepositoryIndex lists what is")
        await self._core.unload(name)

    async def refresh(self) -> None:
        """As `InferenceCore.refresh`."""
        await self._core.refresh()


def _nothing(_: str) -> bool:
    return False
