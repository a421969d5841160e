"""Ray on this machine as if it were several, and `halfserve cluster` on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
WAIT_S = 240.0  # on a busy machine of two cores; what takes less returns at once
MARK = "TEST_MACHINE"  # the variable that each process of a machine inherits
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Ray's own notice of a dead machine, in seconds instead of a minute.
FAST = {"RAY_health_check_initial_delay_ms": "500", "RAY_health_check_period_ms": "500"}
FAST |= {"RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3"}


def until(holds: Callable[[], T], what: str, limit_s: float = WAIT_S) -> T:
    """The first true value; fails where there is none in time."""
    ends_s = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < ends_s, f"no {what} within {limit_s:g} s"
        time.sleep(0.1)
    return found


def processes_of(mark: str) -> list[int]:
    """The living processes of one machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it is gone, or another user's
            continue
    return found


def kill_all(mark: str) -> None:
    """End a machine as a loss of power does; all of its processes at once."""

    def gone() -> bool:
        pids = processes_of(mark)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not pids

    until(gone, f"end of {mark}")


class Machines:
    """A Ray cluster of several machines that are this one.

    Attributes:
        address: of Ray's head.
        nodes: marks of the machines, the head first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = ""
        self.nodes: list[str] = []

    def mark(self) -> str:
        """The mark of another machine."""
        self.nodes.append(uuid.uuid4().hex)
        return self.nodes[-1]

    def environment(self, mark: str) -> dict[str, str]:
        folder = str(self._folder)
        own = {"RAY_TMPDIR": folder, "TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", MARK: mark}
        cleaned = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HALFSERVE_"))}
        return cleaned | own | FAST | ({"RAY_ADDRESS": self.address} if self.address else {})

    def start(self, cpus: int) -> str:
        """Start a machine, the first one as Ray's head. Returns its mark."""
        mark = self.mark()
        role = [f"--address={self.address}"] if self.address else ["--head", "--port=0", "--include-dashboard=false"]
        memory = f"--object-store-memory={100 * 2**20}"
        environment = self.environment(mark)
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [*RAY, "start", *role, f"--num-cpus={cpus}", memory], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.address = self.address or (self._folder / "ray" / "ray_current_cluster").read_text().strip()
        return mark

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "halfserve", "cluster", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `halfserve cluster ...` to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(self.nodes[0]),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def done(self, *arguments: str) -> str:
        """What `halfserve cluster ...` prints; fails where it fails."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.done("status", "--json"))
        return status


@contextmanager
def machines(cpus: Sequence[int]) -> Iterator[Machines]:
    """Ray on as many machines as there are numbers of cores; nothing of it is left after the block."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    found = Machines(folder)
    try:
        for count in cpus:
            found.start(count)
        yield found
    finally:
        for mark in found.nodes:
            kill_all(mark)
        shutil.rmtree(folder, ignore_errors=True)
