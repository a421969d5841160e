"""Resource use of a process, sampled over time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
USER_TICKS = 11  # place of utime, which stime follows, behind the name in /proc/<pid>/stat (proc_pid_stat(5))


@dataclass(frozen=True)
class Sample:
    """One sample of a process."""

    at_s: float  # time of the sample on time.monotonic()'s clock
    resident_mb: float  # resident memory in MB
    descriptors: int  # number of open files and sockets
    threads: int  # number of threads
    cpu_s: float = 0.0  # processor time since the process began, in seconds


def look(pid: int) -> Sample:
    """Take a sample of a process.

    Raises:
        FileNotFoundError: the process has ended.
    """
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    behind_name = (process / "stat").read_text().rpartition(")")[2].split()
    return Sample(
        at_s=time.monotonic(),
        resident_mb=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=sum(1 for _ in (process / "fd").iterdir()),
        threads=int(status["Threads"]),
        cpu_s=sum(int(ticks) for ticks in behind_name[USER_TICKS : USER_TICKS + 2]) / TICKS_A_SECOND,
    )


def watch(pid: int, every_s: float, stop: threading.Event, samples: list[Sample]) -> None:
    """Take samples regularly, until `stop` is set or the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, KeyError):  # a process that has just ended has no memory
        while not stop.wait(every_s):
            samples.append(look(pid))


def process_tree(pid: int) -> list[int]:
    """Ids of a process and of all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(found for child in children for found in process_tree(int(child)))]


def processor_us(pid: int) -> float:
    """Processor time of a process's living threads, in microseconds."""
    spent = [path.read_text(encoding="ascii").split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, spent)) / 1e3


def proportional_kib(pid: int) -> int:
    """Proportional memory of a process (PSS), in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
