"""Location of a repository in object storage, and of its local copy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.engine.errors import ModelLoadError

DEFAULT_GIB = 50.0


def default_folder() -> Path:
    """Default folder of local copies: in the user's cache folder, according to the XDG specification.

    Raises:
        ModelLoadError: this user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfserve" / "storage"
    except RuntimeError:
        raise ModelLoadError("this user has no home folder to keep copies in; give --storage-folder") from None


@dataclass(frozen=True, kw_only=True)
class ObjectStorage:
    """A repository in object storage, used instead of a path."""

    url: str  # URL of a repository, or of one .onnx or .pt2 file; may contain credentials
    folder: Path  # folder of the local copies, shared by all servers of this user
    max_bytes: int = int(DEFAULT_GIB * 2**30)  # size limit of this folder
