"""Configurations that load requests brought, which later loads without a configuration keep, as in Triton."""

from __future__ import annotations

from dataclasses import dataclass

from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.model_control.loader_threads import LoaderThreads
from halfserve.serve.model_control.watch import Fingerprint, fingerprint


@dataclass(frozen=True, kw_only=True)
class ConfigOverride:
    """A configuration in place of a model's own.

    Attributes:
        config: ModelConfig as JSON.
        files: fingerprint of the model's files when it was loaded with that.
    """

    config: str
    files: Fingerprint


class ConfigOverrides:
    """The override of each model that was loaded with one. Lives on the event loop.

    An override holds until another one, an unload, or a load after the model's files in the repository have changed.
    """

    def __init__(self, repository: ModelRepository, threads: LoaderThreads) -> None:
        """Start without overrides; files are looked at on `threads`."""
        self._repository = repository
        self._threads = threads
        self._by_model: dict[str, ConfigOverride] = {}

    def get(self, name: str) -> str | None:
        """Return the configuration that a model was loaded with; None for its own."""
        override = self._by_model.get(name)
        return None if override is None else override.config

    async def kept(self, name: str) -> str | None:
        """Return the configuration that a load without one keeps; None if there is none or the model's files have changed."""
        override = await self.for_load(name, None)
        return None if override is None else override.config

    async def for_load(self, name: str, config: str | None) -> ConfigOverride | None:
        """Return the override to load a model with: the given configuration, or the one that a load without it keeps."""
        before = self._by_model.get(name)
        if config is None and before is None:
            return None
        files = await self._files(name)
        if config is not None:
            return ConfigOverride(config=config, files=files)
        return before if before is not None and before.files == files else None

    def set(self, name: str, override: ConfigOverride | None) -> None:
        """Keep the override that a model is served with; None for its own configuration."""
        if override is None:
            self._by_model.pop(name, None)
        else:
            self._by_model[name] = override

    async def _files(self, name: str) -> Fingerprint:
        return await self._threads.run(_files, self._repository, name)


def _files(repository: ModelRepository, name: str) -> Fingerprint:
    path = repository.path_of(name)
    return fingerprint(path if path.is_file() else path / name)
