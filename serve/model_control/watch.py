"""Watches a repository by the fingerprints of its files. Changes that have settled are loaded."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import ModelFiles, ModelRepository
from halfserve.serve.model_control.loader_thread import LoaderThread

logger = logging.getLogger(__name__)


CACHE = "__pycache__"  # Python writes it when a model is loaded
MAX_DEPTH = 4  # levels below a model's folder: version, twin, and data files in folders of their own
Fingerprint: TypeAlias = tuple[tuple[str, int, int, int, int, int], ...]


def fingerprint(path: Path) -> Fingerprint:
    """Return path, device, inode, times of change and size of a file, or of all files below a folder except hidden ones and
    caches of Python code.

    Two times are needed: reproducible builds give all files the same modification time, and `cp -p` keeps it; the inode's
    change time differs. For a folder that changes meanwhile, the files seen are returned; a missing path gives ().
    """
    if os.path.isdir(path):  # noqa: PTH112  (pathlib's raises where a folder above may not be looked into)
        return tuple(sorted(_below(path, "", MAX_DEPTH)))
    return tuple(_entry(path, path.name))


def _below(folder: Path, prefix: str, depth: int) -> Iterator[tuple[str, int, int, int, int, int]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or entry.name == CACHE:
            continue
        if not _is_folder(entry):
            yield from _entry(Path(entry.path), name)
        elif depth > 1:
            yield from _below(Path(entry.path), f"{name}/", depth - 1)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # for example a link to itself
        return False


def _entry(path: Path, name: str) -> Iterator[tuple[str, int, int, int, int, int]]:
    try:
        status = path.stat()
    except OSError:
        return
    # Linking a file again changes its change time too, and copies from object storage share their files with other servers.
    changed_ns = status.st_ctime_ns if status.st_nlink == 1 else 0
    yield name, status.st_dev, status.st_ino, status.st_mtime_ns, changed_ns, status.st_size


@dataclass(frozen=True, kw_only=True)
class VersionFingerprint:
    """The files and configuration of a version. Equal for two scans of unchanged files, so that a reload leaves the version
    alone.
    """

    model: Path  # path of the model file, which may move from one repository to another
    version: Fingerprint  # fingerprint of the version's folder
    beside: Fingerprint  # fingerprint of the files in the model's folder: configuration, labels
    config: bytes  # the serialized configuration in use, which may have come with a load request


def version_fingerprint(files: ModelFiles, *, bare: bool) -> VersionFingerprint:
    """Scan a version's files. `bare`: whether the model is a file without a folder of its own."""
    folder = files.config.model_folder
    beside = () if bare else tuple(entry for path in sorted(folder.iterdir()) if path.is_file() for entry in fingerprint(path))
    return VersionFingerprint(
        model=files.model,
        version=fingerprint(files.model if bare else files.model.parent),
        beside=beside,
        config=files.config.message.SerializeToString(deterministic=True),
    )


Follow = Callable[[str, bool], Awaitable[None]]
Look = dict[str, dict[Path, Fingerprint]]  # fingerprints by model, and by the path of the repository that has it


class RepositoryWatch:
    """Scans all files periodically. Files that are still being written differ between two scans, and are loaded after a later
    one.
    """

    def __init__(
        self,
        repository: ModelRepository,
        thread: LoaderThread,
        *,
        interval_s: float,
        settle_s: float,
        refresh: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`interval_s`: seconds between scans; `settle_s`: seconds for which a change must stay. Scans run on `thread`.

        `refresh` updates the files before each scan if they are a copy; it raises ModelLoadError if it cannot.
        """
        self._repository = repository
        self._thread = thread
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._refresh = refresh
        self._known: Look = {}
        self._lost = False

    async def remember(self) -> None:
        """Take the present files as known."""
        self._known = await self._look() or {}

    async def run(self, follow: Follow) -> None:
        """Call `follow(model, whether it is there)` for every change, forever."""
        while True:
            await asyncio.sleep(self._interval_s)
            before = await self._look()
            while before is not None and self._changed(before):
                await asyncio.sleep(self._settle_s)
                after = await self._look()
                if after is None:
                    break
                for name in self._changed(after):
                    if before.get(name) == after.get(name):
                        self._settle(name, after)
                        await self._follow(follow, name, name in after)
                before = after

    async def _follow(self, follow: Follow, name: str, there: bool) -> None:
        """Load a change; its errors are logged, because they must not end the watch."""
        try:
            await follow(name, there)
        except Exception:
            said = "%s: a change could not be followed; it is tried again when the files change"
            logger.exception(said, name, extra={"model": name})

    def _changed(self, look: Look) -> list[str]:
        return sorted(name for name in look.keys() | self._known.keys() if look.get(name) != self._known.get(name))

    def _settle(self, name: str, look: Look) -> None:
        if name in look:
            self._known[name] = look[name]
        else:
            del self._known[name]

    async def _look(self) -> Look | None:
        """Return the present fingerprints; None if the repository cannot be read now, which unloads no model."""
        try:
            if self._refresh is not None:
                await self._refresh()
            seen = await self._thread.run(_look, self._repository)
        except ModelLoadError as error:
            if not self._lost:
                logger.warning("%s; what is loaded goes on serving", error)
            self._lost = True
            return None
        except Exception:
            if not self._lost:
                logger.exception("%s: cannot be looked at; what is loaded goes on serving", self._repository)
            self._lost = True
            return None
        if self._lost:
            logger.info("the repository can be read again")
        self._lost = False
        return seen


def _look(repository: ModelRepository) -> Look:
    names = repository.names()  # comes first, because its errors name the problem
    return {
        name: {path: fingerprint(path if path.is_file() else path / name) for path in repository.having(name)} for name in names
    }
