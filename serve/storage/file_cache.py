"""Local cache of objects, shared by all servers that use the folder, with a size limit.

<folder>/lock                                 held while a server copies: one at a time
<folder>/<hash of a URL>/objects/<key>        a whole object; <key>.part is a partial copy that can be resumed
<folder>/<hash of a URL>/view-<n>             one server's repository, whose files are hard links to objects
<folder>/<hash of a URL>/view-<n>.lock        held by that server

A file's number of links shows whether a server uses it. Unused objects stay until their space is needed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from halfserve.files.object_storage import ObjectStore, StorageError, StoredObject
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.storage.storage_options import ObjectStorage

if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 * 2**20
WINDOW_BYTES = 64 * 2**20  # bytes that are read concurrently, and held in memory
WINDOW_PIECES = 16
LARGE_BYTES = 256 * 2**20  # copies of at least this size are logged, as they take a while
INCOMING = ".incoming"
PLACE = "[0-9a-f]" * 16  # pattern of the hash of a URL
KEY = re.compile(r"[0-9a-f]{64}(\.part)?")
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

Piece = tuple[StoredObject, int, int]


class FileCache:
    """The copied objects of one URL, and one server's view of them.

    Attributes:
        view: folder of this server; no other process writes there while this process lives.
    """

    def __init__(self, storage: ObjectStorage, url: str) -> None:
        """Open the cache; `url` has no credentials, which may change while the objects stay the same.

        Raises:
            ModelLoadError: the folder is not usable, or a package is missing.
        """
        try:
            from filelock import FileLock  # noqa: PLC0415  (an extra)
        except ModuleNotFoundError:
            raise ModelLoadError(f"{url}: what guards its copy is not installed; run: pip install filelock") from None
        self._root = storage.folder.absolute()
        self._max_bytes = storage.max_bytes
        place = self._root / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._objects = place / "objects"
        self._copying = threading.Lock()
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._objects.mkdir(parents=True, exist_ok=True)
            self._turn = FileLock(self._root / "lock", thread_local=False)
            self._lock, self.view = _free_view(place)
            _clear(self.view)
            (self.view / INCOMING).mkdir(parents=True)
        except OSError as error:
            raise self._unusable(error) from None
        self._closed = False

    def close(self) -> None:
        """Release the view. The objects stay for the next start."""
        self._closed = True
        _clear(self.view)
        self._lock.release()

    def incoming(self, stored: StoredObject) -> Path:
        """Path at which `fetch` puts an object, to be renamed into the view."""
        return self.view / INCOMING / _key(stored)

    def forget_incoming(self) -> None:
        """Remove objects that were fetched but not moved into the view, because the store has changed since."""
        for path in (self.view / INCOMING).glob("*"):
            path.unlink(missing_ok=True)

    def fetch(self, store: ObjectStore, wanted: Sequence[StoredObject], name: str) -> list[StoredObject]:
        """Copy objects of a model to this disk; returns the copied ones.

        Objects or parts that any server has copied before are not copied again. `name` is the model's, for messages.

        Raises:
            StorageError: an object cannot be read.
            ModelLoadError: there is no space for the objects, or the folder is not writable.
        """
        try:
            missing = [stored for stored in wanted if not self._linked(stored)]
            if not missing:
                return []
            with self._my_turn(name):
                missing = [stored for stored in missing if not self._linked(stored)]  # another server may have copied some
                self._copy(store, missing, name)
            return missing
        except OSError as error:
            raise self._unusable(error) from None

    def discard(self, stored: StoredObject) -> None:
        """Remove an object that was replaced in the store during the copy, as its bytes may mix both versions."""
        for path in (self._objects / _key(stored), self._part(stored), self.incoming(stored)):
            path.unlink(missing_ok=True)

    def _linked(self, stored: StoredObject) -> bool:
        place, incoming = self._objects / _key(stored), self.incoming(stored)
        try:
            status = place.stat()
            # The access time records the last use. The modification time must stay, because servers watch it.
            os.utime(place, ns=(time.time_ns(), status.st_mtime_ns))
            incoming.unlink(missing_ok=True)
            incoming.hardlink_to(place)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _my_turn(self, name: str) -> Iterator[None]:
        with self._copying:
            if not self._turn.is_locked and _is_held(self._turn):
                logger.info("%s: waits for another server that copies into %s", name, self._root)
            with self._turn:
                yield

    def _copy(self, store: ObjectStore, missing: Sequence[StoredObject], name: str) -> None:
        self._make_room(missing, name)
        size = sum(stored.size for stored in missing)
        if size >= LARGE_BYTES:
            logger.info("%s: copying %s from %s", name, readable(size), store.url)
        damaged = self._read(store, missing, name)
        if damaged and (damaged := self._read(store, damaged, name)):
            raise StorageError(
                f"{store.url}/{damaged[0].path}: two reads gave other bytes than those that its ETag is the MD5 of; it is not "
                "used. Write the object again, or check what lies between this server and the store"
            )

    def _read(self, store: ObjectStore, missing: Sequence[StoredObject], name: str) -> list[StoredObject]:
        """Copy objects. Returns those whose bytes do not match their tags; their copies are removed."""
        damaged = []
        pieces = [piece for stored in missing for piece in self._pieces(stored)]
        for window in _windows(pieces):
            for (stored, start, end), content in zip(window, store.read_ranges(window), strict=True):
                if self._closed:
                    raise ModelLoadError(f"{name}: the server ends before it is copied")
                path = self._part(stored)
                with path.open("r+b") as part:
                    part.seek(start)
                    part.write(content)
                    part.truncate()
                    if end == stored.size:
                        part.flush()
                        os.fsync(part.fileno())
                if end != stored.size:
                    continue
                if store.is_intact(stored, path):
                    self._finish(stored)
                else:
                    path.unlink()
                    damaged.append(stored)
        return damaged

    def _pieces(self, stored: StoredObject) -> Iterator[Piece]:
        """Pieces that are still to be read; a partial copy is resumed."""
        part = self._part(stored)
        with part.open("ab") as file:
            begun = file.tell()
        begun = begun if begun < stored.size else 0
        if stored.size == 0:
            self._finish(stored)
        for start in range(begun, stored.size, PIECE_BYTES):
            yield stored, start, min(start + PIECE_BYTES, stored.size)

    def _finish(self, stored: StoredObject) -> None:
        part, incoming = self._part(stored), self.incoming(stored)
        incoming.unlink(missing_ok=True)
        incoming.hardlink_to(part)  # first, because a second link marks the object as in use
        part.replace(self._objects / _key(stored))

    def _part(self, stored: StoredObject) -> Path:
        return self._objects / f"{_key(stored)}.part"

    def _make_room(self, missing: Sequence[StoredObject], name: str) -> None:
        """Remove objects that no server uses, the longest unused first, until there is space for the missing ones."""
        begun = {self._part(stored): stored.size for stored in missing}
        found = []
        for objects in self._root.glob(f"{PLACE}/objects"):  # no other files, as the user chose the folder
            _remove_dead_views(objects.parent)
            found += [(path.stat(), path) for path in objects.iterdir() if KEY.fullmatch(path.name)]
        used = sum(status.st_size for status, _ in found)
        needed = sum(begun.values()) - sum(min(status.st_size, begun[path]) for status, path in found if path in begun)
        room = min(self._max_bytes - used, shutil.disk_usage(self._root).free)
        unused = [(status, path) for status, path in found if status.st_nlink == 1 and path not in begun]
        removable = sum(status.st_size for status, _ in unused)
        if room + removable < needed:
            rest = readable(max(0, room + removable))
            raise ModelLoadError(
                f"{name}: {readable(needed)} are to be copied, and {self._root} has room for {rest} beside what servers use; "
                f"raise --storage-gib (now {self._max_bytes / 2**30:g}) or free the disk"
            )
        for status, path in sorted(unused, key=lambda entry: entry[0].st_atime_ns):
            if room >= needed:
                return
            path.unlink()
            room += status.st_size

    def _unusable(self, error: OSError) -> ModelLoadError:
        return ModelLoadError(
            f"{error.filename or self._root}: cannot hold copies from object storage: {error.strerror or error}; "
            "choose another folder with --storage-folder"
        )


def _key(stored: StoredObject) -> str:
    return hashlib.sha256(f"{stored.path}\0{stored.size}\0{stored.tag}".encode(errors="surrogatepass")).hexdigest()


def _windows(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    window: list[Piece] = []
    for piece in pieces:
        if len(window) == WINDOW_PIECES or sum(end - start for _, start, end in [*window, piece]) > WINDOW_BYTES:
            yield window
            window = []
        window.append(piece)
    if window:
        yield window


def _free_view(place: Path) -> tuple[FileLock, Path]:
    """Return the first view without a living server, locked for this one."""
    number = 1
    while (lock := _tried(place / f"view-{number}.lock")) is None:
        number += 1
    return lock, place / f"view-{number}"


def _remove_dead_views(place: Path) -> None:
    """Remove the views of servers that were killed, whose links would count as uses."""
    for path in place.glob("view-*.lock"):
        if (lock := _tried(path)) is not None:
            _clear(path.with_suffix(""))
            lock.release()


def _tried(path: Path) -> FileLock | None:
    from filelock import FileLock, Timeout  # noqa: PLC0415  (an extra)

    lock = FileLock(path, thread_local=False)
    with suppress(Timeout):
        lock.acquire(timeout=0)
        return lock
    return None


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold the lock of a file, after other processes have released it."""
    from filelock import FileLock  # noqa: PLC0415  (an extra)

    with FileLock(path):
        yield


def _is_held(lock: FileLock) -> bool:
    """Return whether another process holds the lock."""
    if (tried := _tried(Path(lock.lock_file))) is None:
        return True
    tried.release()
    return False


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def readable(size: int) -> str:
    """Format a number of bytes for people."""
    unit, name = next(((unit, name) for unit, name in UNITS if size >= unit), UNITS[-1])
    return f"{size / unit:.1f} {name}"
