from __future__ import annotations

from typing import Any

import pytest

from serve.benchmark.errors import BenchmarkError
from serve.benchmark.level import Level
from serve.benchmark.load.order import Tally
from serve.benchmark.loads import Load
from tests.serve.benchmark.levels import SERVER, histogram, level, tally


def test_rates_and_means() -> None:
    figures = level(errors={"INTERNAL": 3}, goodput_ms=2.5).to_json()
    assert figures["latency_ms"] == pytest.approx(
        {"min": 1, "mean": 2.5, "p50": 2, "p90": 4, "p95": 4, "p99": 4, "p99.9": 4, "max": 4}, rel=1e-3
    )
    assert figures["models"] == [{"model": "mlp", "requests": 4, "latency_ms": figures["latency_ms"]}]
    del figures["latency_ms"], figures["models"]
    assert figures == {
        "concurrency": 2,
        "rate": None,
        "batch_size": 2,
        "requests": 4,
        "errors": 3,
        "errors_by_status": {"INTERNAL": 3},
        "error_messages": {"INTERNAL": "the server's text for INTERNAL"},
        "seconds": 2.0,
        "requests_per_second": 2.0,
        "rows_per_second": 4.0,
        "goodput_per_second": 1.0,
        "mean_batch_size": 4.0,
        "server_ms": {"queue": 0.5, "compute": 1.5, "compute_input": 0.25, "compute_infer": 1.0, "compute_output": 0.25},
        "windows": [],
        "generator": {"sent": 7, "busy": 0.0, "late_p99_ms": None, "held_back": 0},
        "stable": None,
        "ended_early": None,
    }


def test_a_server_without_statistics_leaves_nulls() -> None:
    figures = level(server=None).to_json()
    assert figures["mean_batch_size"] is None
    assert set(figures["server_ms"].values()) == {None}


def test_several_models_stand_beside_each_other() -> None:
    mixed = Tally(latencies=[histogram(1, 2), histogram(5)], seconds=1.0)
    figures = Level.of(mixed, None, load=Load(concurrency=1), batch_size=1, models=["a", "b"]).to_json()
    assert [(one["model"], one["requests"]) for one in figures["models"]] == [("a", 2), ("b", 1)]
    assert figures["requests"] == 3
    mixed = Tally(latencies=[histogram(1, 2), histogram()], seconds=1.0)
    figures = Level.of(mixed, None, load=Load(concurrency=1), batch_size=1, models=["a", "never asked"]).to_json()
    assert [one["model"] for one in figures["models"]] == ["a"]


def test_windows_show_what_happened_when() -> None:
    windows = [tally([1, 2], seconds=0.5), tally([], {"INTERNAL": 2}, seconds=0.25)]
    first, second = level(windows=windows).to_json()["windows"]
    assert (first["seconds"], first["requests"], first["errors"]) == (0.5, 2, 0)
    assert first["p99_ms"] == pytest.approx(2, rel=1e-3)
    assert second == {"seconds": 0.25, "requests": 0, "errors": 2, "p99_ms": None}


def test_no_success_is_an_error_with_the_servers_message() -> None:
    failed = tally([], {"INTERNAL": 1, "RESOURCE_EXHAUSTED": 7})
    text = r"at 64 in flight no request succeeded \(8 failed\): RESOURCE_EXHAUSTED: the server's text for RESOURCE_EXHAUSTED"
    with pytest.raises(BenchmarkError, match=text):
        Level.of(failed, None, load=Load(concurrency=64), batch_size=1)


def test_no_request_at_all_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="none was started in the time given"):
        Level.of(tally([]), None, load=Load(rate=0.1), batch_size=1)


def doubts(load: Load, made: Tally, **changes: bool | str) -> list[str]:
    return Level.of(made, None, load=load, batch_size=1, **changes).doubts()  # type: ignore[arg-type]  # (a test's shorthand)


def test_figures_that_can_be_believed_have_no_doubts() -> None:
    assert level().doubts() == []
    assert doubts(Load(rate=2), tally([1, 2, 3, 4], lateness=histogram(0.1), busy=0.2)) == []
    assert doubts(Load(rate=2), tally([1, 2, 3, 4], busy=0.99)) == []  # it has sent them all in time


def test_foreign_load_is_told() -> None:
    (line,) = level(8, server=SERVER + SERVER).doubts()
    assert "the server answered 8 requests, of which 4 were ours" in line


@pytest.mark.parametrize(
    ("load", "changes", "text"),
    [
        (Load(concurrency=4), {"busy": 0.99}, "the load generator was the limit: it had nothing to wait for"),
        (Load(rate=4), {"busy": 0.99}, "the load generator was the limit: it had nothing to wait for"),
        (Load(rate=2), {"lateness": histogram(0.1, 50)}, "the load generator was late by more than a quarter of p99"),
    ],
    ids=["closed", "rate", "late"],
)
def test_a_generator_that_was_the_limit_says_so(load: Load, changes: dict[str, Any], text: str) -> None:
    (line,) = doubts(load, tally([1, 2, 3, 4], **changes))
    assert text in line


def test_endings_and_unrest_are_told() -> None:
    (unrest,) = doubts(Load(concurrency=1), tally([1]), stable=False)
    assert "the windows kept differing by more than 10 %" in unrest
    (ended,) = doubts(Load(concurrency=1), tally([1]), ended_early="connection refused")
    assert "ended early (connection refused)" in ended


def test_failures_are_told_with_the_servers_words() -> None:
    assert level(8, errors={"INTERNAL": 1, "UNAVAILABLE": 3}).failures() == [
        "at 8 in flight: 3 UNAVAILABLE: the server's text for UNAVAILABLE",
        "at 8 in flight: 1 INTERNAL: the server's text for INTERNAL",
    ]
