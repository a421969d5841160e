"""Where a repository in object storage lies, and where its local copy goes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from halfserve.serve.engine.errors import ModelLoadError

DEFAULT_GIB = 50.0


def default_folder() -> Path:
    """Where copies go: in the user's folder for caches, as the XDG specification names it.

    Raises:
        ModelLoadError: this user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfserve" / "storage"
    except RuntimeError:
        raise ModelLoadError("this user has no home folder to keep copies in; give --storage-folder") from None


@dataclass(frozen=True, kw_only=True)
class ObjectStorage:
    """A repository in object storage, in place of a path.

    Attributes:
        url: of a repository, or of one .onnx or .pt2 file; may hold credentials.
        folder: of the local copies, shared by all servers of this user.
        max_bytes: that this folder may take.
    """

    url: str
    folder: Path
    max_bytes: int = int(DEFAULT_GIB * 2**30)
