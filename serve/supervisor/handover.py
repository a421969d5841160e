"""What the command hands to its supervisor, and the supervisor to each worker: open file descriptors, as JSON."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from halfserve.serve.log_handler import LineFormat

VARIABLE = "HALFSERVE_SUPERVISED"
LOST_DEVICE_CODE = 75  # EX_TEMPFAIL: the worker's exit code after a device was lost; the next process can use it again

GRPC, HTTP, METRICS, ADMIN = "grpc", "http", "metrics", "admin"
Sockets = dict[str, list[int]]  # file descriptors of listening sockets, by purpose


class Handover(NamedTuple):
    """What a supervisor gives a worker, in an environment variable.

    Attributes:
        sockets: listening sockets.
        lifeline: reading end of a pipe that is never written; it ends when the supervisor ends.
        ready: writing end of a pipe; the worker writes one byte once it accepts requests.
        restarts: how many workers there were before, in this one's place.
        place: of the worker among those that serve together, from 1 on.
        places: how many serve together.
        folder: which those share (see serve/members); empty for a worker that serves alone.
        member: id of the worker in a cluster, whose agent has started it and shares the folder; empty outside of a cluster.
        parent: process that has started the worker, with which it ends at once; 0 for one that ends when its lifeline does.
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
    """What the command gives the supervisor that it becomes, as an argument.

    Attributes:
        sockets: listening sockets.
        socket_path: of the Unix socket among them, which the supervisor removes at its end.
        line_format: of the supervisor's log.
        processes: how many workers serve together.
        folder: which those share, and which the supervisor removes at its end; empty for a worker that serves alone.
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
