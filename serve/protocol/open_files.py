"""How the files that this process may have open (`ulimit -n`) are shared out.

| for | how many |
|---|---|
| what is open when the server begins to listen | as it is then |
| reading models, trials of new ones, the log | an eighth, 16 to 256 |
| shared memory regions, where there are any | half |
| connections of all ports, those that have not finished TLS among them | the rest |
"""

from __future__ import annotations

import math
from pathlib import Path

FEWEST_FILES = 64  # that a server can work with; one that nobody has connected to has 17
ENOUGH = 65_536  # files: for as many connections as are allowed, and more
FEWEST_SPARE, MOST_SPARE = 16, 256
FEWEST_CONNECTIONS = 8  # however few files there are
OPEN_FILES = Path("/dev/fd")  # has an entry for each


def allow_more() -> None:
    """Raise the soft limit to the hard one, or to ENOUGH: shells and service managers set it low for old programs' sake."""
    try:
        import resource  # noqa: PLC0415  (Windows does not have it)
    except ModuleNotFoundError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_files() -> float:
    """How many may be open in all."""
    try:
        import resource  # noqa: PLC0415  (Windows does not have it)
    except ModuleNotFoundError:
        return math.inf
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if files == resource.RLIM_INFINITY else files


def most_regions() -> float:
    """How many shared memory regions there may be; each holds a file."""
    return most_files() // 2


def most_connections(*, regions: bool) -> float:
    """How many connections there may be, besides the files that are open now.

    Args:
        regions: whether some files are kept for shared memory regions.
    """
    files = most_files()
    if files == math.inf:
        return files
    spare = min(max(files // 8, FEWEST_SPARE), MOST_SPARE)
    return max(files - sum(1 for _ in OPEN_FILES.iterdir()) - spare - (most_regions() if regions else 0), FEWEST_CONNECTIONS)
