"""The control groups that this process is in: what a container, a pod or a systemd unit may use of the machine."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUP = Path("/sys/fs/cgroup")


def group_folders(controller: str = "") -> list[Path]:
    """The folder of this process's own group, then those around it: each of them has limits of its own.

    A container may see its own group as the outermost one, under another path than its membership names. So folders may be
    missing, and the last one is always the whole hierarchy.

    Args:
        controller: of version 1, which has a hierarchy for each; none for version 2, which has one.
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
