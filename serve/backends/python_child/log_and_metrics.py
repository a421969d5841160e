"""`pb_utils.Logger`, `pb_utils.MetricFamily` and `pb_utils.Metric`: they live in the server."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from halfserve.serve.backends.python_child.server_access import done, server
from halfserve.serve.backends.python_child.triton_errors import TritonModelException


class LogLevel(IntEnum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the server's log, with the model's name."""

    LogLevel = LogLevel
    INFO, WARNING, ERROR, VERBOSE = LogLevel

    @staticmethod
    def log(message: str, level: IntEnum = LogLevel.INFO) -> None:
        """Write a line.

        Raises:
            TypeError: the message is no text, or the level none of Logger's.
        """
        if not isinstance(message, str) or not isinstance(level, LogLevel):
            raise TypeError(f"log takes a text and a level such as Logger.INFO, got {message!r} and {level!r}")
        server().tell("log", {"level": int(level), "text": message}, [])

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, LogLevel.VERBOSE)


class MetricKind(IntEnum):
    """Kind of a metric: the changes that its value may take."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class Metric:
    """One metric of a family, by its labels. Metrics with the same name and labels are one, in all models.

    As in Triton, every use raises TritonModelException once the MetricFamily object that made the metric is deleted.
    """

    __slots__ = ("_family", "_labels", "_name")

    def __init__(self, family: MetricFamily, labels: Mapping[str, str]) -> None:
        self._family = weakref.ref(family)
        self._labels = dict(labels)
        self._name = family.name

    def increment(self, value: float) -> None:
        """Add to a counter (0 or more) or a gauge.

        Raises:
            TritonModelException: it is a histogram, or the value is negative for a counter.
        """
        if self._kind() is MetricKind.COUNTER and value < 0:
            raise TritonModelException(f"counter {self._name!r} cannot be incremented by {value}, expected 0 or more")
        self._change("increment", value, MetricKind.COUNTER, MetricKind.GAUGE)

    def set(self, value: float) -> None:
        """Set a gauge.

        Raises:
            TritonModelException: it is none.
        """
        self._change("set", value, MetricKind.GAUGE)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram.

        Raises:
            TritonModelException: it is none.
        """
        self._change("observe", value, MetricKind.HISTOGRAM)

    def value(self) -> float:
        """Return the value in the server.

        Raises:
            TritonModelException: it is a histogram.
        """
        self._require("value", MetricKind.COUNTER, MetricKind.GAUGE)
        return float(done(server().call("metric_value", self.place(), []))[0]["value"])

    def _change(self, action: str, value: float, *kinds: MetricKind) -> None:
        self._require(action, *kinds)
        server().tell("metric", {**self.place(), "action": action, "value": float(value)}, [])

    def _require(self, action: str, *kinds: MetricKind) -> None:
        kind = self._kind()
        if kind not in kinds:
            raise TritonModelException(f"metric {self._name!r} is a {kind.name}, which has no {action}()")

    def _kind(self) -> MetricKind:
        family = self._family()
        if family is None:
            raise TritonModelException(
                f"the MetricFamily object of the metric {self._name!r} has been deleted; keep it as an attribute of the model"
            )
        return family.kind

    def place(self) -> dict[str, Any]:
        """Names the metric in messages."""
        return {"name": self._name, "labels": self._labels}


class MetricFamily:
    """Metrics of one name, which the server's /metrics shows."""

    COUNTER, GAUGE, HISTOGRAM = MetricKind

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        """Declare a family, or join the one of this name, which keeps its description.

        Raises:
            TritonModelException: the name is none of a metric, is the server's, or was declared as another kind.
        """
        self.name = str(name)
        self.kind = MetricKind(kind)
        done(server().call("metric_family", {"name": self.name, "text": description, "kind": self.kind.name.lower()}, []))

    def Metric(  # noqa: N802  (Triton's name)
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the family's metric with these labels; a histogram needs rising `buckets`.

        Raises:
            TritonModelException: a label has a wrong name; buckets are missing, given for another kind, or do not rise.
        """
        metric = Metric(self, labels or {})
        asked = {**metric.place(), "buckets": None if buckets is None else list(buckets)}
        done(server().call("metric_new", asked, []))
        return metric
