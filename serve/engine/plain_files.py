"""Files that are read in one go."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


def require_plain(path: Path) -> Path:
    """The same path, unless a pipe or a device is there: who reads one may wait for ever.

    Raises:
        OSError: one is there, or nothing that can be looked at.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # whoever reads a folder is told so
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))
    return path
