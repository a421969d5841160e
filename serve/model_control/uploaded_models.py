"""Models that load requests bring, each in a temporary repository of its own."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from halfserve.serve.engine.disk_files import temporary_folder
from halfserve.serve.engine.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.repository.model_repository import ModelRepository
from halfserve.serve.model_control.uploads import write_upload
from halfserve.serve.model_control.version_loading import LoaderThread

logger = logging.getLogger(__name__)


class UploadedModels:
    """Keeps the uploaded files of each model as long as a serving version needs them. Lives on the event loop."""

    def __init__(self, core: InferenceCore, thread: LoaderThread, *, allowed: bool) -> None:
        """Keep no files yet; `allowed`: load requests may bring files, which `thread` writes."""
        self._core = core
        self._thread = thread
        self._allowed = allowed
        self._folders: dict[str, list[tempfile.TemporaryDirectory[str]]] = {}

    async def store(self, name: str, config: str | None, files: Mapping[str, bytes]) -> ModelRepository:
        """Write the files of a load request, by path, into a repository with this one model.

        Raises:
            FailedPreconditionError: load requests may not bring files.
            InvalidArgumentError: there is no config, or a path or a content is not allowed.
            UnavailableError: the files cannot be written.
        """
        if not self._allowed:
            raise FailedPreconditionError(
                "model files in a load request are refused here; put them into the repository, or start the server with "
                "--model-uploads"
            )
        folder = await self._thread.run(_written, name, config, files)
        self._folders.setdefault(name, []).append(folder)
        return ModelRepository(Path(folder.name))

    def drop_unused(self, name: str) -> None:
        """Delete uploaded files that no serving version needs: a copy of a model may be loaded again from its files.

        If only some versions of a load were refused, versions of it and of the previous load serve side by side.
        """
        paths = [model.path for model in self._core.served(name) if model.path is not None]
        kept = []
        for folder in self._folders.pop(name, []):
            if any(path.is_relative_to(folder.name) for path in paths):
                kept.append(folder)
            else:
                folder.cleanup()
        if kept:
            self._folders[name] = kept

    def close(self) -> None:
        """Delete all files."""
        for folders in self._folders.values():
            for folder in folders:
                folder.cleanup()


def _written(name: str, config: str | None, files: Mapping[str, bytes]) -> tempfile.TemporaryDirectory[str]:
    """Write the files of a request to a temporary repository with one model."""
    if config is None:
        raise InvalidArgumentError("the load request brings files and no config, expected both; '{}' is a config")
    try:
        folder = temporary_folder("halfserve-model-")
        try:
            model = Path(folder.name) / name
            model.mkdir()
            write_upload(model, files)
        except BaseException:
            folder.cleanup()
            raise
    except OSError as error:
        logger.warning("%s: the files of a load request cannot be stored: %s", name, error, extra={"model": name})
        reason = os.strerror(error.errno or errno.EIO)  # the error's own text may list folders of the server
        raise UnavailableError(f"the files of the load request cannot be stored: {reason}") from None
    return folder
