"""Names and paths that come over the wire: checked before any of them meets the file system."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

from serve.engine.errors import InvalidArgumentError

MAX_NAME_BYTES = 255  # what file systems take
MAX_DEPTH = 4
MAX_FILES = 1000


def check_name(name: str) -> None:
    """Check that a model's name is that of a folder, and nothing more.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not _is_plain(name):
        raise InvalidArgumentError(
            f"model name {name[:100]!r} is not valid, expected the name of a folder in the repository: no '/', no '.' first"
        )


def check_paths(paths: Collection[str]) -> None:
    """Check that paths of files lie in one folder, each a file of its own.

    Args:
        paths: as a load request has them, such as "1/model.onnx".

    Raises:
        InvalidArgumentError: a path leads elsewhere, is hidden, or is both a file and a folder; or there are too many.
    """
    if len(paths) > MAX_FILES:
        raise InvalidArgumentError(f"the load request brings {len(paths)} files, expected at most {MAX_FILES}")
    for path in paths:
        parts = path.split("/")
        if len(parts) > MAX_DEPTH or not all(_is_plain(part) for part in parts):
            raise InvalidArgumentError(
                f"file path {path[:200]!r} is not valid, expected one in the model's folder such as '1/model.onnx'"
            )
        if any(str(parent) in paths for parent in PurePosixPath(path).parents):
            raise InvalidArgumentError(f"file path {path[:200]!r} lies below what is a file itself")


def _is_plain(part: str) -> bool:
    """Whether it is one visible part of a path on any system."""
    good = bool(part) and not part.startswith(".") and part.isprintable() and not set(part) & set('/\\:*?"<>|')
    return good and len(part.encode()) <= MAX_NAME_BYTES
