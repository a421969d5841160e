"""The dashboard asks for what the server tells, and for nothing else."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from halfserve import Client, ClientError, RetryPolicy
from tests.models import FLOAT32
from tests.serve.engine.precision_guard.guarded_models import write_thousandfold
from tests.serve.observability.prometheus import Prometheus, Series, needs_prometheus, running_prometheus
from tests.serve.observability.queries import names_in, told, unknown_in
from tests.serve.observability.test_alerts import RULES
from tests.serve.running_server import WAIT_S


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


def test_the_dashboard_has_what_grafanas_schema_requires(dashboard: dict[str, Any]) -> None:
    # https://github.com/grafana/grafana/blob/main/kinds/dashboard/dashboard_kind.cue and packages/grafana-schema.
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = {name for expression in expressions(dashboard) for name in re.findall(r"\$(\w+)", expression)}
    assert used - {"__rate_interval"} <= variables
    assert all({"name", "type", "query"} <= variable.keys() for variable in dashboard["templating"]["list"])
    for panel in (panel for panel in dashboard["panels"] if panel["type"] != "row"):
        assert {"title", "datasource", "fieldConfig", "options"} <= panel.keys()
        assert {"defaults", "overrides"} <= panel["fieldConfig"].keys()
        if panel["type"] == "timeseries":
            assert {"calcs", "displayMode", "placement", "showLegend"} <= panel["options"]["legend"].keys(), panel["title"]
            assert {"mode", "sort"} <= panel["options"]["tooltip"].keys()
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_names_follow_prometheus_rules() -> None:
    ours = [name for name in told() if name.startswith("halfserve_")]
    assert all(re.fullmatch(r"halfserve_[a-z0-9]+(_[a-z0-9]+)*", name) for name in ours)
    assert all(re.fullmatch(r"[a-z_]+", label) for labels in told().values() for label in labels)


# A dashboard shows rates over $__rate_interval: four scrapes, which Prometheus makes every 15 s where its config does not say.
RATE_INTERVAL = "1m"
SPECIAL = re.compile(r"[\\^$*+?.()|\[\]{}]")


def asked(expression: str, values: dict[str, list[str]]) -> str:
    """A panel's query as Grafana sends it: variables of several values are regular expressions. No value is "All"."""
    for name, chosen in values.items():
        escaped = [SPECIAL.sub(r"\\\\\g<0>", value) for value in chosen]
        expression = expression.replace(f"${name}", f"({'|'.join(escaped)})" if escaped else ".*")
    return expression.replace("$__rate_interval", RATE_INTERVAL)


def load(address: str) -> None:
    """Ask for all that the panels show: answers, failures and refusals, finite or not, with and without the guard's twin."""
    rows = [(model, value) for model in ("fallback", "reject", "absent") for value in (1, 100, math.inf)]
    with Client(address, timeout_s=WAIT_S, retries=RetryPolicy(retries=0)) as client:
        for model, value in rows:
            with suppress(ClientError):
                client.infer(model, {"x": np.full((1, 4), value, np.float16)})


@pytest.fixture
def loaded_server(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The ready line of a server that says all that a dashboard may show."""
    models = tmp_path / "models"
    write_thousandfold(models / "fallback", precision_guard="fallback", shadow_rate="1")
    write_thousandfold(models / "reject", precision_guard="reject")
    command = [sys.executable, "-m", "halfserve", "serve", str(models), "--grpc-port", "0", "--json", *FLOAT32, "--supervise"]
    command += ["--access-log", "all", "--access-log-file", str(tmp_path / "access.log")]
    command += ["--trace-to", str(tmp_path / "traces"), "--trace-rate", "1"]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            yield json.loads((process.stdout or io.StringIO()).readline())
        finally:
            process.terminate()


def label_values(prometheus: Prometheus, definition: str) -> list[str]:
    """What a variable of the dashboard offers for choice."""
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition)
    assert found is not None
    values: list[str] = prometheus.ask(f"label/{found[2]}/values", **{"match[]": found[1]})
    return values


def rule_states(prometheus: Prometheus) -> list[str]:
    """For each alert rule "ok", its error, or an empty text before its first evaluation."""
    (group,) = prometheus.ask("rules")["groups"]
    return [
        {"ok": "ok", "unknown": ""}.get(rule["health"], f"{rule['name']}: {rule.get('lastError')}") for rule in group["rules"]
    ]


def has_data(series: list[Series]) -> bool:
    """Whether a panel has something to draw: 0 divided by 0 is nothing."""
    return any(not math.isnan(one.value) for one in series)


@pytest.mark.long
@needs_prometheus
def test_panels_show_what_prometheus_scraped_of_a_loaded_server(
    dashboard: dict[str, Any], loaded_server: dict[str, Any], tmp_path: Path, free_port: int
) -> None:
    variables = {found["name"]: found["definition"] for found in dashboard["templating"]["list"] if "definition" in found}
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    of_gpus = [target for target in targets if target["expr"].startswith("nv_gpu_")]  # which the test's server has none of
    scraped = [f"127.0.0.1:{loaded_server['metrics_port']}"]
    everything: dict[str, list[str]] = {name: [] for name in variables}
    with running_prometheus(tmp_path, free_port, scraped, RULES) as prometheus:
        waiting, end = [target for target in targets if target not in of_gpus], monotonic() + WAIT_S
        while (waiting or not all(rule_states(prometheus))) and monotonic() < end:
            load(f"127.0.0.1:{loaded_server['grpc_port']}")
            waiting = [target for target in waiting if not has_data(prometheus.query(asked(target["expr"], everything)))]
        assert [target["expr"] for target in waiting] == []
        values = {name: label_values(prometheus, definition) for name, definition in variables.items()}
        assert values == {"job": ["halfserve"], "instance": scraped, "model": ["fallback", "reject"]}
        for target in targets:
            series = prometheus.query(asked(target["expr"], values))
            assert series or target in of_gpus, target["expr"]
            labels = {label for one in series for label in one.labels}
            assert not series or set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, target
        assert set(rule_states(prometheus)) == {"ok"}
