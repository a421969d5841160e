"""The dashboard asks for what the server tells, and for nothing else."""

from __future__ import annotations

import asyncio
import json
import re
from importlib.resources import files
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from halfserve.serve.engine.errors import InvalidArgumentError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.precision_guard.tally import DriftHistogram, GuardCounters, OutputCounters
from halfserve.serve.observability.exposition import READINGS, exposition, gpu_metrics
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.observability.metric_text import to_text
from tests.serve.observability.test_exposition import TwoGpus

NAME = re.compile(r"\b(?:nv|halfserve|process)_\w+")
SELECTOR = re.compile(r"\b((?:nv|halfserve|process)_\w+)\{([^}]*)\}")
SCRAPED = {"job", "instance"}  # labels that Prometheus adds


def everything() -> str:
    """The exposition of a server on which every kind of figure is there."""
    drift = DriftHistogram(bounds=(0.1,), counts=(1, 0), total=0.05)
    counters = GuardCounters(policy="count", outputs={"y": OutputCounters(drift=drift)})

    async def run() -> str:
        model = held_model(HeldBackend())
        model.statistics.failed(0, InvalidArgumentError("wrong"))
        core = InferenceCore([model])
        core.figures.refuse(InvalidArgumentError("wrong"))
        core.figures.readings |= {name: lambda: 1 for name in READINGS}
        guard: Any = SimpleNamespace(counters=lambda: counters, stop=lambda: None)
        model.guard = guard
        body, _ = await exposition(core)
        await core.drain()
        return body.decode() + to_text(gpu_metrics(TwoGpus()))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def told() -> dict[str, set[str]]:
    """The label names of every sample, by its name."""
    labels: dict[str, set[str]] = {}
    for line in everything().splitlines():
        if not line.startswith("#"):
            name, _, rest = line.rpartition(" ")[0].partition("{")
            labels.setdefault(name, set()).update(re.findall(r'(\w+)="', rest))
    return labels


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        files("halfserve.serve.observability").joinpath("grafana.json").read_text(encoding="utf-8")
    )
    return loaded


def expressions(dashboard: dict[str, Any]) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return queries + [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]


def test_every_metric_of_the_dashboard_exists(dashboard: dict[str, Any], told: dict[str, set[str]]) -> None:
    asked = {name for expression in expressions(dashboard) for name in NAME.findall(expression)}
    assert len(asked) > 40
    assert asked - told.keys() == set()


def test_every_label_of_the_dashboard_exists(dashboard: dict[str, Any], told: dict[str, set[str]]) -> None:
    for expression in expressions(dashboard):
        for name, selector in SELECTOR.findall(expression):
            assert set(re.findall(r"(\w+)[=!]~?\"", selector)) <= told[name] | SCRAPED, expression
        grouped = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
        available = set().union(SCRAPED, *(told[name] for name in NAME.findall(expression)))
        assert grouped <= available, expression


def test_everything_that_triton_tells_has_a_place(dashboard: dict[str, Any], told: dict[str, set[str]]) -> None:
    asked = {name for expression in expressions(dashboard) for name in NAME.findall(expression)}
    assert {name for name in told if name.startswith("nv_inference")} <= asked


def test_panels_do_not_overlap_and_have_numbers_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (a, b)


def test_names_follow_prometheus_rules(told: dict[str, set[str]]) -> None:
    ours = [name for name in told if name.startswith("halfserve_")]
    assert all(re.fullmatch(r"halfserve_[a-z0-9]+(_[a-z0-9]+)*", name) for name in ours)
    assert all(re.fullmatch(r"[a-z_]+", label) for labels in told.values() for label in labels)
