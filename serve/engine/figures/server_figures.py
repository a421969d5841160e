"""What is counted for the server as a whole, not for one of its models. Written and read on the event loop only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from serve.engine.errors import InferenceError
from serve.engine.figures.statistics import reason_of


@dataclass(slots=True)
class ServerFigures:
    """Counters since the start, and what others have to tell when they are asked.

    Attributes:
        refused: inference requests that reached no model's queue, by `reason_of` the error.
        readings: functions that tell a figure of now, by name, such as "connections".
    """

    refused: dict[str, int] = field(default_factory=dict)
    readings: dict[str, Callable[[], float]] = field(default_factory=dict)

    def refuse(self, error: InferenceError) -> None:
        """Record a request that was wrong, or asked for what is not here."""
        reason = reason_of(error)
        self.refused[reason] = self.refused.get(reason, 0) + 1
