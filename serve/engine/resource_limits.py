"""Memory, cores and open files that the machine and this process's control groups (container, pod, unit) let it use.

The limit of open files (`ulimit -n`) is shared out:

| use | share |
|---|---|
| files that are open when the server begins to listen | actual number |
| model files, model probes, log | an eighth, 16 to 256 |
| shared memory regions, if enabled | half |
| connections of all ports, TLS handshakes included | the rest |
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Protocol

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
# Files of a group: its limit, its usage, and the names in its statistics of cached file pages, which can be reclaimed.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
FEWEST_FILES = 64  # fewest files that a server can work with; an idle one has 17 open
ENOUGH = 65_536  # number of files that suffices for all allowed connections
MACOS_FILES = 10_240  # OPEN_MAX of macOS, which may refuse more although its hard limit is infinite
FEWEST_SPARE, MOST_SPARE = 16, 256
FEWEST_CONNECTIONS = 8  # allowed even if there are too few files
OPEN_FILES = Path("/dev/fd")  # has an entry for each open file


class BudgetShare(Protocol):
    """A share of the memory that a server may hold for all its clients."""

    @property
    def is_short(self) -> bool:
        """Whether memory is short and this share holds more than its part."""
        ...

    @property
    def is_crowded_out(self) -> bool:
        """Whether the memory is spent, this share holds more than its part, and the others hold most of it."""
        ...

    def resize(self, size: int) -> None:
        """Set the number of bytes that it holds."""


def group_folders(controller: str = "") -> list[Path]:
    """Return the folders of this process's control group and of the groups around it, innermost first; each has its own limits.

    A container may see its own group as the outermost one, under a path other than the one in its membership. So folders may be
    missing, and the last one is always the root of the hierarchy. cgroup version 1 has a hierarchy for each `controller`,
    version 2 has one, "".
    """
    mount = CGROUP / controller
    parts = [part for part in PurePosixPath(_membership(controller)).parts if part not in {"/", ".."}]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _membership(controller: str) -> str:
    try:
        lines = MEMBERSHIP.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "/"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def available_bytes() -> int | None:
    """Return the bytes that this process may still take, by the machine and its groups; None if neither is known."""
    groups = [_group(folder, *VERSION_2) for folder in group_folders()]
    groups += [_group(folder, *VERSION_1) for folder in group_folders("memory")]
    return min((room for room in (_machine("MemAvailable"), *groups) if room is not None), default=None)


def memory_limit_bytes() -> int | None:
    """Return the bytes that this process may take in all, used or not; None if that is unknown."""
    limits = [_limit(folder / VERSION_2[0]) for folder in group_folders()]
    limits += [_limit(folder / VERSION_1[0]) for folder in group_folders("memory")]
    return min((limit for limit in (_machine("MemTotal"), *limits) if limit is not None), default=None)


def _machine(field: str) -> int | None:
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None


def _group(folder: Path, limit: str, used: str, cached: tuple[str, ...]) -> int | None:
    """Return one control group's limit less the memory in use that cannot be reclaimed; None if it has no limit."""
    try:
        most, taken = ((folder / name).read_text().strip() for name in (limit, used))
        if most == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(most) - int(taken) + sum(int(statistics.get(name, 0)) for name in cached)
    except (OSError, ValueError):
        return None


def fewer_cores() -> int:
    """Return the cores that this process may use if fewer than the machine's; 0 for all.

    ONNX Runtime ignores CPU quotas and affinity. Threads beyond a quota exhaust it at once, and then all threads, the event
    loop's included, stop for the rest of the scheduler's period of 100 ms.
    """
    there = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    mine = min([mine, *_quotas()])
    return mine if mine < there else 0


def usable_cores() -> int:
    """Return the cores that this process may use, at least one."""
    return fewer_cores() or os.cpu_count() or 1


def _quotas() -> list[int]:
    """Return the CPU quotas of this process's control groups, in whole cores."""
    texts = [_read(folder, "cpu.max") for folder in group_folders()]
    texts += [_read(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us") for folder in group_folders("cpu")]
    return [quota for text in texts if (quota := _cores(text))]


def _read(folder: Path, *names: str) -> str:
    try:
        return " ".join((folder / name).read_text() for name in names)
    except OSError:
        return ""


def _cores(text: str) -> int:
    """Convert quota and period to cores; 0 without a quota ("max", or -1)."""
    try:
        time, period = map(int, text.split())
    except ValueError:
        return 0
    return math.ceil(time / period) if time > 0 else 0


def allow_more() -> None:
    """Raise the soft limit to the hard one, at most to ENOUGH: shells and service managers keep it low for compatibility."""
    with suppress(ModuleNotFoundError):  # Windows has no module resource
        import resource  # noqa: PLC0415  (see above)

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for most in (ENOUGH, MACOS_FILES):
            wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
            if soft == resource.RLIM_INFINITY or soft >= wanted:
                return
            with suppress(OSError, ValueError):  # the system allows fewer than the hard limit says
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return


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
    """Return the limit of connections, given the files that are open now; `regions`: whether shared memory is enabled."""
    files = most_files()
    if files == math.inf:
        return files
    spare = min(max(files // 8, FEWEST_SPARE), MOST_SPARE)
    return max(files - sum(1 for _ in OPEN_FILES.iterdir()) - spare - (most_regions() if regions else 0), FEWEST_CONNECTIONS)
