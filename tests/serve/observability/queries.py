"""Whether Prometheus queries ask for what the server tells: names of metrics, names of labels, values of labels."""

from __future__ import annotations

import asyncio
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model_statistics import Reading
from halfserve.serve.engine.precision_guard.guard import GuardPolicy, PrecisionGuard
from halfserve.serve.engine.precision_guard.tally import DriftHistogram, GuardCounters, OutputCounters
from halfserve.serve.observability.exposition import exposition, gpu_metrics
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.observability.metric_text import declared_readings, to_text
from tests.serve.observability.test_exposition import two_gpus

NAME = re.compile(r"\b(?:nv|halfserve|process)_\w+")
SELECTOR = re.compile(r"\b((?:nv|halfserve|process)_\w+)\{([^}]*)\}")
MATCHER = re.compile(r'(\w+)(?:=|!=|=~|!~)"([^"]*)"')
FIXED = {"reason", "stage", "state"}  # labels whose values are always all there
SCRAPED = {"job", "instance", "namespace", "pod"}  # labels that Prometheus and its operator add


def everything() -> str:
    """The exposition of a server on which every kind of figure is there."""
    drift = DriftHistogram(bounds=(0.1,), counts=(1, 0), total=0.05)
    counters = GuardCounters(policy="count", outputs={"y": OutputCounters(drift=drift)})

    async def run() -> str:
        model = held_model(HeldBackend())
        model.statistics.failed(0, InvalidArgumentError("wrong"))
        core = InferenceCore([model])
        core.figures.refuse(InvalidArgumentError("wrong"))
        for kind, name, text in declared_readings():
            core.figures.readings[name] = Reading(kind, name, text, lambda: 1)
        tally: Any = SimpleNamespace(counters=lambda: counters)
        model.guard = PrecisionGuard((), tally, policy=GuardPolicy.COUNT, batched=True)
        body, _ = await exposition(core)
        await core.drain()
        return body.decode() + to_text(gpu_metrics(two_gpus()))

    return asyncio.run(run())


@cache
def told() -> dict[str, dict[str, set[str]]]:
    """The values of every label of every sample, by the sample's name and the label's."""
    found: dict[str, dict[str, set[str]]] = {}
    for line in everything().splitlines():
        if not line.startswith("#"):
            name, _, rest = line.rpartition(" ")[0].partition("{")
            labels = found.setdefault(name, {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', rest):
                labels.setdefault(label, set()).add(value)
    return found


def names_in(expression: str) -> set[str]:
    return set(NAME.findall(re.sub(r'"[^"]*"', '""', expression)))


def unknown_in(expression: str) -> list[str]:
    """What a query asks for that no server tells: metrics, labels, and values of the labels that have a fixed set of them."""
    metrics = told()
    unknown = sorted(names_in(expression) - metrics.keys())
    labels: set[str] = SCRAPED.union(*(metrics.get(name, {}) for name in names_in(expression)))
    grouped = {label for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in group.split(", ")}
    unknown += sorted(grouped - labels)
    for name, selector in SELECTOR.findall(expression):
        for label, value in MATCHER.findall(selector):
            known = metrics.get(name, {}).get(label)
            if known is None and label not in SCRAPED:
                unknown.append(f"{name}{{{label}}}")
            elif label in FIXED and known is not None:
                unknown += [f'{name}{{{label}="{one}"}}' for one in value.split("|") if one not in known]
    return unknown
