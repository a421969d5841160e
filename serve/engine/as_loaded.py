"""A model's files as they were when it was loaded. What is read from them later must be the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from serve.engine.errors import ModelLoadError

T = TypeVar("T")
Stamp: TypeAlias = tuple[int, int]  # time of change in nanoseconds, and size


@dataclass(frozen=True)
class AsLoaded:
    """Looks at a model file, at the data files beside it that begin with its name (model.onnx.data), and at further ones."""

    _stamps: Mapping[Path, Stamp]

    @classmethod
    def look(cls, model: Path) -> AsLoaded:
        """The files as they are now; those that cannot be read are for others to complain of."""
        try:
            beside = [path for path in model.parent.iterdir() if path.name.startswith(model.name)]
        except OSError:
            beside = []
        return cls(_stamps_of(beside))

    def also(self, paths: Iterable[Path]) -> AsLoaded:
        """With further files, as they are now."""
        return AsLoaded({**_stamps_of(paths), **self._stamps})

    def require(self) -> None:
        """Check that none of them has changed. One that is gone is for whoever reads it to complain of.

        Raises:
            ModelLoadError: one has.
        """
        for path, before in self._stamps.items():
            if _stamp(path) not in {before, None}:
                raise ModelLoadError(
                    f"{path}: has been changed since the model was loaded; put the file back, or load the model again to serve "
                    "what is there now"
                )

    def guarded(self, read: Callable[..., T]) -> Callable[..., T]:
        """`read`, for as long as the files are the same."""

        def checked(*arguments: object) -> T:
            self.require()
            return read(*arguments)

        return checked


def _stamps_of(paths: Iterable[Path]) -> dict[Path, Stamp]:
    return {path: stamp for path in paths if (stamp := _stamp(path)) is not None}


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: no file can be called so
        return None
    return status.st_mtime_ns, status.st_size
