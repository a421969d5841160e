"""What one process tells the next of the files that it leaves open for it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

VARIABLE = "HALFSERVE_SUPERVISED"

GRPC, HTTP, METRICS, ADMIN = "grpc", "http", "metrics", "admin"
Sockets = dict[str, list[int]]  # file descriptors of listening sockets, by what they are for


class Handover(NamedTuple):
    """What a supervisor gives a worker, in an environment variable.

    Attributes:
        sockets: that listen.
        lifeline: the reading end of a pipe that nobody writes to. It ends when the supervisor does.
        ready: the writing end of a pipe; a byte says that the worker takes requests.
        restarts: how many workers there were before.
    """

    sockets: Sockets
    lifeline: int
    ready: int
    restarts: int

    def to_text(self) -> str:
        """As the variable's value."""
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> Handover:
        """The reverse.

        Raises:
            ValueError: it is nothing of the kind.
        """
        told = _fields(text, cls._fields)
        numbers = told["lifeline"], told["ready"], told["restarts"]
        if not all(isinstance(number, int) for number in numbers):
            raise ValueError("a descriptor is no number")
        return cls(told["sockets"], *numbers)


class Plan(NamedTuple):
    """What the command tells the supervisor that it becomes.

    Attributes:
        sockets: that listen.
        socket_path: of a Unix socket among them, to be removed in the end.
    """

    sockets: Sockets
    socket_path: str | None

    def to_text(self) -> str:
        """As an argument."""
        return json.dumps(self._asdict())

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The reverse.

        Raises:
            ValueError: it is nothing of the kind.
        """
        return cls(**_fields(text, cls._fields))


def _fields(text: str, names: tuple[str, ...]) -> dict[str, Any]:
    told = json.loads(text)
    if not isinstance(told, dict) or set(told) != set(names) or not isinstance(told["sockets"], dict):
        raise ValueError(f"expected a JSON object with {', '.join(names)}")
    return told
