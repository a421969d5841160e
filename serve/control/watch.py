"""Watch a repository: what has changed, and stays as it is, is to be acted on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from serve.control.fingerprint import Fingerprint, fingerprint
from serve.control.loader_thread import LoaderThread
from serve.engine.errors import ModelLoadError
from serve.engine.repository.model_repository import model_names

logger = logging.getLogger(__name__)

Follow = Callable[[str, bool], Awaitable[None]]
Look = dict[str, Fingerprint]


class RepositoryWatch:
    """Looks at all files now and then. Files that are still being written change between two looks, and wait."""

    def __init__(self, path: Path, thread: LoaderThread, *, interval_s: float, settle_s: float) -> None:
        """A watch that has not looked yet.

        Args:
            path: a repository folder, or a bare model file.
            thread: where to look; file systems may be slow.
            interval_s: seconds between two looks.
            settle_s: seconds for which a change must have stayed as it is.
        """
        self._path = path
        self._thread = thread
        self._interval_s = interval_s
        self._settle_s = settle_s
        self._known: Look = {}
        self._lost = False

    async def remember(self) -> None:
        """Take what is there now for known."""
        self._known = await self._look() or {}

    async def run(self, follow: Follow) -> None:
        """Call `follow(model, whether it is there)` for every change, for ever."""
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
        """The watch outlives what goes wrong with one change: there will be others."""
        try:
            await follow(name, there)
        except Exception:
            logger.exception("%s: a change could not be followed; it is tried again when the files change", name)

    def _changed(self, look: Look) -> list[str]:
        return sorted(name for name in look.keys() | self._known.keys() if look.get(name) != self._known.get(name))

    def _settle(self, name: str, look: Look) -> None:
        if name in look:
            self._known[name] = look[name]
        else:
            del self._known[name]

    async def _look(self) -> Look | None:
        """What is there; None where the repository cannot be read now, which is no reason to unload what it held."""
        try:
            seen = await self._thread.run(_look, self._path)
        except ModelLoadError as error:
            if not self._lost:
                logger.warning("%s; what is loaded goes on serving", error)
            self._lost = True
            return None
        except Exception:
            if not self._lost:
                logger.exception("%s: cannot be looked at; what is loaded goes on serving", self._path)
            self._lost = True
            return None
        self._lost = False
        return seen


def _look(path: Path) -> Look:
    names = model_names(path)  # first: it says why there is nothing to be seen
    bare = path.is_file()
    return {name: fingerprint(path if bare else path / name) for name in names}
