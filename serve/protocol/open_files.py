"""Shares out the process's limit of open files (`ulimit -n`).

| use | share |
|---|---|
| files that are open when the server begins to listen | actual number |
| model files, model probes, log | an eighth, 16 to 256 |
| shared memory regions, if enabled | half |
| connections of all ports, TLS handshakes included | the rest |
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

FEWEST_FILES = 64  # fewest files that a server can work with; an idle one has 17 open
ENOUGH = 65_536  # number of files that suffices for all allowed connections
FEWEST_SPARE, MOST_SPARE = 16, 256
FEWEST_CONNECTIONS = 8  # allowed even if there are too few files
OPEN_FILES = Path("/dev/fd")  # has an entry for each open file


def allow_more() -> None:
    """Raise the soft limit to the hard one, at most to ENOUGH: shells and service managers keep it low for compatibility."""
    with suppress(ModuleNotFoundError):  # Windows has no module resource
        import resource  # noqa: PLC0415  (see above)

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_files() -> float:
    """Return the limit of open files."""
    with suppress(ModuleNotFoundError):  # Windows has no module resource
        import resource  # noqa: PLC0415  (see above)

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return math.inf if files == resource.RLIM_INFINITY else files
    return math.inf


def most_regions() -> float:
    """Return the limit of shared memory regions; each holds an open file."""
    return most_files() // 2


def most_connections(*, regions: bool) -> float:
    """Return the limit of connections, given the files that are open now.

    Args:
        regions: whether some files are kept for shared memory regions.
    """
    files = most_files()
    if files == math.inf:
        return files
    spare = min(max(files // 8, FEWEST_SPARE), MOST_SPARE)
    return max(files - sum(1 for _ in OPEN_FILES.iterdir()) - spare - (most_regions() if regions else 0), FEWEST_CONNECTIONS)
