"""The dashboard asks for what the server tells, and for nothing else."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import combinations
from typing import Any

import pytest

from tests.serve.observability.queries import names_in, told, unknown_in


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        files("halfserve.serve.observability").joinpath("grafana.json").read_text(encoding="utf-8")
    )
    return loaded


def expressions(dashboard: dict[str, Any]) -> list[str]:
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return queries + [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]


def test_the_dashboard_asks_for_nothing_that_is_not_there(dashboard: dict[str, Any]) -> None:
    assert len(set().union(*map(names_in, expressions(dashboard)))) > 40
    assert {expression: unknown_in(expression) for expression in expressions(dashboard) if unknown_in(expression)} == {}


def test_everything_that_triton_tells_has_a_place(dashboard: dict[str, Any]) -> None:
    asked = set().union(*map(names_in, expressions(dashboard)))
    assert {name for name in told() if name.startswith("nv_inference")} <= asked


def test_panels_do_not_overlap_and_have_numbers_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart, (a, b)


def test_names_follow_prometheus_rules() -> None:
    ours = [name for name in told() if name.startswith("halfserve_")]
    assert all(re.fullmatch(r"halfserve_[a-z0-9]+(_[a-z0-9]+)*", name) for name in ours)
    assert all(re.fullmatch(r"[a-z_]+", label) for labels in told().values() for label in labels)
