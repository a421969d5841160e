"""A server's copy of a model repository in object storage: a folder that contains only whole versions at any time."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from halfserve.files.object_storage import ObjectStore, StorageError, StoredObject
from halfserve.serve.engine.backend import ONNX, TORCH_EXPORT
from halfserve.serve.engine.config.model_config import DeclaredConfig, read_config
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.repository.model_repository import CONFIG_FILE, versions_to_serve
from halfserve.serve.storage.file_cache import FileCache, readable
from halfserve.serve.storage.storage_options import ObjectStorage

logger = logging.getLogger(__name__)

FILE_SUFFIXES = tuple(Path(kind.file_name).suffix for kind in (ONNX, TORCH_EXPORT))
BARE = ""  # name of the model if the URL is that of a single file
# At INFO the stores' clients log each request, some with signed URLs or the source of the credentials.
CHATTY = ("aiobotocore", "azure", "botocore", "gcsfs", "google", "httpx", "httpx2", "huggingface_hub")
ROUNDS = 3  # attempts to copy a model that changes during the copy
Files = dict[str, StoredObject]  # objects by path in their folder


@dataclass
class StoredModel:
    """A model's objects."""

    beside: Files = field(default_factory=dict)  # all objects outside of the versions: configuration, labels, states
    versions: dict[str, Files] = field(default_factory=dict)  # objects of each version, by the name of the version's folder

    def objects(self) -> list[StoredObject]:
        """Return all objects of the model."""
        return [stored for files in (self.beside, *self.versions.values()) for stored in files.values()]


class RepositoryCopy:
    """Follows a repository in object storage. `update` may be called on any thread.

    Attributes:
        path: path to serve: a repository's folder, or one model file.
    """

    def __init__(self, storage: ObjectStorage) -> None:
        """Create the local folder without copying anything.

        Raises:
            ModelLoadError: the URL cannot be opened, or the folder cannot be used.
        """
        try:
            self._store = ObjectStore(storage.url, file_suffixes=FILE_SUFFIXES)
        except StorageError as error:
            raise ModelLoadError(str(error)) from None
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._cache = FileCache(storage, self._store.url)
        self.path = self._cache.view / self._store.file if self._store.file else self._cache.view
        self._shown: dict[str, StoredModel] = {}  # objects of each model that are in the folder
        self._lock = threading.Lock()

    def close(self) -> None:
        """Remove the folder. Copied objects stay for the next start."""
        with self._lock:
            self._cache.close()

    def update(
        self,
        names: Mapping[str, DeclaredConfig | None] | None = None,
        *,
        serving: Collection[tuple[str, int]] = (),
        arriving: Collection[str] = (),
    ) -> dict[str, str]:
        """Update the folder to the store's content. Changes of a model appear together, if its objects were stable meanwhile.

        Models in `names`, or all, are copied, by a configuration that replaces the stored one where one is given; the others
        appear as empty folders. Superseded versions are removed once they are not `serving`; models that are `arriving`,
        which are being loaded, are not changed.

        Returns:
            Reasons why models could not be copied, by name; their files stay as they are.

        Raises:
            ModelLoadError: the store cannot be read, or has no models; the folder stays as it is.
        """
        try:
            return self._updated(names, serving, arriving)
        except StorageError as error:
            raise ModelLoadError(str(error)) from None
        except OSError as error:
            raise ModelLoadError(f"{error.filename}: cannot hold copies from object storage: {error.strerror}") from None

    def _updated(
        self, names: Mapping[str, DeclaredConfig | None] | None, serving: Collection[tuple[str, int]], arriving: Collection[str]
    ) -> dict[str, str]:
        models = self._models()
        failures: dict[str, str] = {}
        left = [name for name in models if names is None or name in names or (name == BARE and (names or not self._shown))]
        if left:  # at most one thread has calls left
            self._cache.forget_incoming()
        for attempt in range(1, ROUNDS + 1):
            copied, ready = False, dict[str, StoredModel]()
            for name in left:
                failures.pop(name, None)
                try:
                    copied |= self._fetch(name, models[name], (names or {}).get(name), serving, ready)
                except (StorageError, ModelLoadError) as error:
                    failures[name] = str(error)
                    if isinstance(error, StorageError):
                        self._store.objects()  # raises if no model can be copied
            now = self._models() if copied or failures else models
            self._show_unchanged({name: models[name] for name in left}, now, ready, failures, is_last=attempt == ROUNDS)
            left = [name for name in left if name in now and now[name] != models[name]]
            models = now
            if not left:
                break
        self._hide(models, names, {name for name, _ in serving}.union(arriving))
        return failures

    def _show_unchanged(
        self,
        before: Mapping[str, StoredModel],
        now: Mapping[str, StoredModel],
        ready: Mapping[str, StoredModel],
        failures: dict[str, str],
        *,
        is_last: bool,
    ) -> None:
        """Show models that are ready and did not change during the copy; forget objects that were replaced meanwhile."""
        for name, model in before.items():
            if now.get(name) == model and name in ready:
                self._show(name, model, ready[name], failures)
            elif now.get(name) != model and is_last:
                failures[name] = f"{self._store.url}/{name}: changes while it is copied; it is copied once that ends"
        present = {stored for model in now.values() for stored in model.objects()}
        for stored in {stored for model in before.values() for stored in model.objects()} - present:
            self._cache.discard(stored)

    def _models(self) -> dict[str, StoredModel]:
        models: dict[str, StoredModel] = {}
        for path, stored in self._store.objects().items():
            parts = path.split("/")
            if not all(_is_plain(part) for part in parts):
                continue
            if self._store.file:
                models.setdefault(BARE, StoredModel()).beside[path] = stored
            elif len(parts) > 1:  # a file in the repository's folder itself belongs to no model
                model, inside = models.setdefault(parts[0], StoredModel()), "/".join(parts[1:])
                if len(parts) > 2 and _is_version(parts[1]):
                    model.versions.setdefault(parts[1], {})["/".join(parts[2:])] = stored
                else:
                    model.beside[inside] = stored
        if not any(name == BARE or model.versions or CONFIG_FILE in model.beside for name, model in models.items()):
            own = any(_is_version(name) for name in models)
            hint = "; it looks like one model's own folder: give the URL of the folder above" if own else ""
            expected = f"expected <model>/<version>/{ONNX.file_name}, with a version such as 1"
            raise ModelLoadError(f"{self._store.url}: no models there; {expected}{hint}")
        return models

    def _fetch(
        self,
        name: str,
        model: StoredModel,
        declared: DeclaredConfig | None,
        serving: Collection[tuple[str, int]],
        ready: dict[str, StoredModel],
    ) -> bool:
        """Copy the missing objects of a model to this disk, and put the model's new content into `ready`.

        Returns whether there was something to copy.
        """
        shown, started, label = self._shown.get(name, StoredModel()), time.monotonic(), name or self._store.file
        copied = self._cache.fetch(self._store, _new(model.beside, shown.beside), label)
        chosen = self._chosen(model, shown, declared)
        kept = {v for v in shown.versions if (name, int(v)) in serving and v in model.versions}
        wanted = StoredModel(beside=model.beside, versions={})
        for version in sorted(chosen | kept):
            files = model.versions[version] if version in chosen else shown.versions[version]
            wanted.versions[version] = files
            if files != shown.versions.get(version):
                copied += self._cache.fetch(self._store, list(files.values()), label)
        ready[name] = wanted
        if copied:
            size, seconds = readable(sum(stored.size for stored in copied)), time.monotonic() - started
            logger.info("%s: copied %s in %d files from %s in %.1f s", label, size, len(copied), self._store.url, seconds)
        return bool(copied)

    def _chosen(self, model: StoredModel, shown: StoredModel, declared: DeclaredConfig | None) -> set[str]:
        """Names of the version folders to serve."""
        numbers = {int(version): version for version in sorted(model.versions, key=len, reverse=True)}
        contents = {number: {path.split("/")[0] for path in model.versions[version]} for number, version in numbers.items()}
        try:
            config = declared or self._config(model, shown)
            return {numbers[number] for number in versions_to_serve(config, contents)}
        except ModelLoadError:  # the model's loading reports the error
            return shown.versions.keys() & model.versions.keys()

    def _config(self, model: StoredModel, shown: StoredModel) -> DeclaredConfig:
        stored = model.beside.get(CONFIG_FILE)
        if stored is None:
            return read_config(self._cache.view / CONFIG_FILE)  # absent: an empty configuration
        name = stored.path.split("/")[0]
        is_new = shown.beside.get(CONFIG_FILE) != stored
        return read_config(self._cache.incoming(stored) if is_new else self._cache.view / name / CONFIG_FILE)

    def _show(self, name: str, model: StoredModel, wanted: StoredModel, failures: dict[str, str]) -> None:
        with self._lock:
            try:
                self._place(name, model, wanted)
                self._shown[name] = wanted
            except OSError as error:
                failures[name] = f"{self._store.url}/{name}: cannot be shown in {self._cache.view}: {error.strerror or error}"

    def _place(self, name: str, model: StoredModel, wanted: StoredModel) -> None:
        folder, shown = self._cache.view / name, self._shown.get(name, StoredModel())
        if name != BARE and name not in self._shown:  # only an empty folder was shown
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        for version, files in wanted.versions.items():
            if files != shown.versions.get(version):
                self._place_version(folder, version, files)
        for path in shown.beside.keys() - wanted.beside.keys():
            (folder / path).unlink(missing_ok=True)
        # The model file comes last, after its data files.
        for stored in sorted(_new(wanted.beside, shown.beside), key=lambda stored: stored.path == self._store.file):
            target = folder / stored.path.removeprefix(f"{name}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._cache.incoming(stored).replace(target)
        for version in model.versions.keys() | shown.versions.keys():
            if version not in wanted.versions:
                shutil.rmtree(folder / version, ignore_errors=True)
                if version in model.versions:  # an empty folder, so that error messages can name the other versions
                    (folder / version).mkdir()

    def _place_version(self, folder: Path, version: str, files: Files) -> None:
        made, old, target = folder / f".{version}.new", folder / f".{version}.old", folder / version
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        for path, stored in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            self._cache.incoming(stored).replace(made / path)
        if target.exists():
            target.rename(old)
        made.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def _hide(self, models: Mapping[str, StoredModel], names: Collection[str] | None, in_use: Collection[str]) -> None:
        """Remove models that are gone, and empty the folders of models that are not copied."""
        with self._lock:
            for folder in [] if self._store.file else list(self._cache.view.iterdir()):
                if not folder.name.startswith(".") and folder.name not in models:
                    shutil.rmtree(folder, ignore_errors=True)
                    self._shown.pop(folder.name, None)
            if names is None or self._store.file:
                return
            for name, model in models.items():
                if name in names or name in in_use:
                    continue
                if self._shown.pop(name, None) is not None:
                    shutil.rmtree(self._cache.view / name, ignore_errors=True)
                for version in model.versions:
                    (self._cache.view / name / version).mkdir(parents=True, exist_ok=True)
                if CONFIG_FILE in model.beside:  # an ensemble may have nothing else
                    (self._cache.view / name).mkdir(exist_ok=True)
                    (self._cache.view / name / CONFIG_FILE).touch()


def _is_plain(part: str) -> bool:
    """Return whether a name may be a local file name and part of a log line. Hidden files are unfinished, or not models."""
    return part.isprintable() and part[:1] not in {"", "."} and not set(part) & {"\\", os.sep}


def _is_version(part: str) -> bool:
    return part.isascii() and part.isdigit() and int(part) > 0


def _new(wanted: Files, shown: Files) -> list[StoredObject]:
    return [stored for path, stored in wanted.items() if shown.get(path) != stored]
