"""Data passed from the command to its supervisor, and from the supervisor to each worker.

Open file descriptors are passed as JSON. Processes behind the same ports share the numbers of their connections.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from halfserve.serve.log_handler import LineFormat

VARIABLE = "HALFSERVE_SUPERVISED"
LOST_DEVICE_CODE = 75  # EX_TEMPFAIL: the worker's exit code after a device was lost; the next process can use it again

GRPC, HTTP, METRICS, ADMIN = "grpc", "http", "metrics", "admin"
COUNTS_FILE = "connections"
COUNT_BYTES = 8  # size of one count
PR_SET_PDEATHSIG = 1  # constant of <sys/prctl.h>
GONE = 2**62  # count of a server that does not accept connections
Sockets = dict[str, list[int]]  # file descriptors of listening sockets, by purpose


class Handover(NamedTuple):
    """Data for a worker, in an environment variable.

    Attributes:
        sockets: listening sockets.
        lifeline: read end of a pipe that is never written to; it ends when the supervisor ends.
        ready: write end of a pipe; the worker writes one byte once it accepts requests.
        restarts: number of earlier workers in this place.
        place: number of the worker among the workers that serve together, counted from 1.
        places: number of workers that serve together.
        folder: folder that these workers share (see serve/fleet/member); empty for a single worker.
        member: id of the worker in a cluster, whose agent started it and shares the folder; empty outside of a cluster.
        parent: id of the process that started the worker; the worker is killed when it ends. 0 for a worker that ends by its
            lifeline.
    """

    sockets: Sockets
    lifeline: int
    ready: int
    restarts: int
    place: int = 1
    places: int = 1
    folder: str = ""
    member: str = ""
    parent: int = 0

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> Handover:
        """Parse the environment variable.

        Raises:
            ValueError, TypeError: the text is not a handover.
        """
        return cls(**json.loads(text))


class SupervisorPlan(NamedTuple):
    """Data for the supervisor, as a command-line argument.

    Attributes:
        sockets: listening sockets.
        socket_path: path of the Unix socket among them, which the supervisor removes at its end; None without one.
        line_format: format of the supervisor's log lines.
        processes: number of workers that serve together.
        folder: folder that these workers share, which the supervisor removes at its end; empty for a single worker.
    """

    sockets: Sockets
    socket_path: str | None
    line_format: str = LineFormat.TEXT
    processes: int = 1
    folder: str = ""

    def to_text(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> SupervisorPlan:
        """Parse the argument."""
        return cls(**json.loads(text))


class ConnectionCounts:
    """Numbers of open connections of the servers behind one port, in shared memory.

    Each server writes its own count, and the supervisor that of a server that has ended. Without the counts, the server that
    wakes first would take the most of the connections.
    """

    def __init__(self, folder: Path) -> None:
        """Map the file that `create` made.

        Raises:
            OSError: there is no such file.
        """
        with (folder / COUNTS_FILE).open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @staticmethod
    def create(folder: Path, places: int) -> None:
        """Create the file for `places` servers, none of which accepts yet."""
        (folder / COUNTS_FILE).write_bytes(GONE.to_bytes(COUNT_BYTES, "little") * places)

    def set(self, place: int, count: int) -> None:
        """Write the count of the server at `place`, counted from 1."""
        self._counts[place - 1] = count

    def fewest(self) -> int:
        """Return the smallest count."""
        return min(self._counts)

    def all_accept(self) -> bool:
        """Return whether every server accepts connections."""
        return max(self._counts) < GONE


def end_with(parent: int) -> None:
    """Have the system kill this process when the thread that started it ends; exit now if it has ended already (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
