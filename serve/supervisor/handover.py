"""Data passed from the command to its supervisor, and from the supervisor to each worker: open file descriptors, as JSON."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from halfserve.serve.log_handler import LineFormat

VARIABLE = "HALFSERVE_SUPERVISED"
LOST_DEVICE_CODE = 75  # EX_TEMPFAIL: the worker's exit code after a device was lost; the next process can use it again

GRPC, HTTP, METRICS, ADMIN = "grpc", "http", "metrics", "admin"
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
        folder: folder that these workers share (see serve/members); empty for a single worker.
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
            ValueError: the text is not a handover.
        """
        fields = _fields(text, cls._fields)
        numbers = (fields[name] for name in ("lifeline", "ready", "restarts", "place", "places", "parent"))
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("a descriptor is no number")
        return cls(**fields)


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
        """Parse the argument.

        Raises:
            ValueError: the text is not a plan.
        """
        return cls(**_fields(text, cls._fields))


def _fields(text: str, names: tuple[str, ...]) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict) or set(content) != set(names) or not isinstance(content["sockets"], dict):
        raise ValueError(f"expected a JSON object with {', '.join(names)}")
    return content
