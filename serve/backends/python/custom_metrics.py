"""Metrics that Python models declare, over all models and processes."""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.model_statistics import CustomMetric

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")  # two underscores in front are Prometheus' own
RESERVED = ("halfserve_", "nv_", "process_")
MOST = 10_000  # metrics, over all families: a model could make one per request
Labels = tuple[tuple[str, str], ...]


@dataclass
class _Series:
    """One metric: its value, and for a histogram the observations per bucket."""

    value: float = 0.0
    bounds: tuple[float, ...] = ()
    counts: list[int] = field(default_factory=list)


@dataclass
class _Family:
    text: str
    kind: str
    series: dict[Labels, _Series] = field(default_factory=dict)


class CustomMetrics:
    """Families of metrics by name. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}

    def declare(self, name: str, text: str, kind: str) -> None:
        """Add a family ("counter", "gauge", "histogram"), or join the one of this name, which keeps its description (Triton).

        Raises:
            InvalidArgumentError: the name is none of a metric, is the server's, or was declared as another kind.
        """
        if not NAME.fullmatch(name):
            raise InvalidArgumentError(
                f"{name!r} is no name of a metric, expected letters, digits, '_' and ':', no digit first"
            )
        if name.startswith(RESERVED):
            raise InvalidArgumentError(f"metric {name!r} has a prefix of the server's own metrics; use another name")
        with self._lock:
            family = self._families.setdefault(name, _Family(text, kind))
            if family.kind != kind:
                raise InvalidArgumentError(f"metric {name!r} was declared as a {family.kind}, expected the same kind again")

    def add(self, name: str, labels: Mapping[str, str], buckets: Sequence[float] | None) -> None:
        """Add a metric to a family; the same labels mean the same metric.

        Raises:
            InvalidArgumentError: a label has a wrong name; buckets are missing, do not rise, or are for another kind; or there
                are too many metrics.
        """
        with self._lock:
            family = self._families[name]
            for label in labels:
                if not LABEL_NAME.fullmatch(label) or (label == "le" and family.kind == "histogram"):
                    raise InvalidArgumentError(
                        f"metric {name!r} has a label named {label!r}, expected letters, digits and '_', no digit and no '__' "
                        "first, and in a histogram not 'le', which names its buckets"
                    )
            if (family.kind == "histogram") != (buckets is not None):
                need = "needs" if buckets is None else "takes no"
                raise InvalidArgumentError(f"metric {name!r} is a {family.kind}, which {need} buckets")
            bounds = tuple(map(float, buckets or ()))
            if any(low >= high for low, high in pairwise(bounds)):
                raise InvalidArgumentError(f"metric {name!r} has buckets {list(bounds)}, expected rising ones")
            if sum(len(known.series) for known in self._families.values()) >= MOST:
                raise InvalidArgumentError(f"models have made {MOST} metrics, expected fewer; use fewer labels")
            family.series.setdefault(_key(labels), _Series(bounds=bounds, counts=[0] * (len(bounds) + 1)))

    def change(self, name: str, labels: Mapping[str, str], action: str, value: float) -> None:
        """Increment, set or observe."""
        with self._lock:
            series = self._families[name].series[_key(labels)]
            if action == "set":
                series.value = value
                return
            series.value += value
            if action == "observe":
                series.counts[bisect_left(series.bounds, value)] += 1

    def value(self, name: str, labels: Mapping[str, str]) -> float:
        """Return the value of a counter or gauge."""
        with self._lock:
            return self._families[name].series[_key(labels)].value

    def read(self) -> list[CustomMetric]:
        """Return all families, for the exposition."""
        with self._lock:
            return [
                CustomMetric(
                    name,
                    family.text,
                    family.kind,
                    [s for key, one in family.series.items() for s in _samples(family.kind, key, one)],
                )
                for name, family in sorted(self._families.items())
            ]


def _key(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((str(name), str(value)) for name, value in labels.items()))


def _samples(kind: str, key: Labels, series: _Series) -> list[tuple[str, dict[str, str], float]]:
    """Return a metric's samples: (suffix, labels, value)."""
    labels = dict(key)
    if kind != "histogram":
        return [("", labels, series.value)]
    names = [*(repr(bound).removesuffix(".0") for bound in series.bounds), "+Inf"]  # as Triton writes them: 1, 2.5
    counts = list(accumulate(series.counts))
    buckets = [("_bucket", {**labels, "le": name}, float(count)) for name, count in zip(names, counts, strict=True)]
    return [*buckets, ("_sum", labels, series.value), ("_count", labels, float(counts[-1]))]
