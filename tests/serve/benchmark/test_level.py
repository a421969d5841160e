"""Loads on the command line, server counters, and figures of a level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.benchmark import BenchmarkArgumentError, BenchmarkError
from halfserve.serve.benchmark.level import Level, Load, ServerTotals, parse_concurrencies, parse_rates
from halfserve.serve.benchmark.load.spec import LoadStatistics
from tests.serve.benchmark.levels import SERVER, histogram, level, tally


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("1, 4,16", [1, 4, 16]),
        ("7", [7]),
        ("1:64:x2", [1, 2, 4, 8, 16, 32, 64]),
        ("1:60:x2", [1, 2, 4, 8, 16, 32]),
        ("10:30:10", [10, 20, 30]),
        ("3:5", [3, 4, 5]),
        ("1,8:16:4", [1, 8, 12, 16]),
        ("2:2:x3", [2]),
    ],
)
def test_lists_and_ranges(text: str, levels: list[int]) -> None:
    assert parse_concurrencies(text) == levels
    assert parse_rates(text) == levels


def test_rates_may_have_fractions() -> None:
    assert parse_rates("0.5,1:2:0.5,1:10:x2.5") == [0.5, 1, 1.5, 2, 1, 2.5, 6.25]


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(2, 9))
def test_a_range_stays_within_its_ends(low: int, more: int, factor: int) -> None:
    levels = parse_concurrencies(f"{low}:{low + more}:x{factor}")
    assert levels[0] == low
    assert levels[-1] <= low + more < levels[-1] * factor


@pytest.mark.parametrize(
    ("parse", "texts", "said"),
    [
        (
            parse_concurrencies,
            ["", "0", "1,,2", "-1", "1.5", "x", "1:3:1.5", "²", "1;2", "nan", "inf", "1e3"],
            "--concurrency {}: expected numbers above 0 with commas between",
        ),
        (
            parse_rates,
            ["0:4", "5:1", "1:9:0", "1:8:x1", f"1:{'9' * 400}", f"1:2:{'9' * 400}"],
            "--rate {}: expected LOW:HIGH:STEP or LOW:HIGH:xFACTOR",
        ),
        (parse_rates, ["9" * 400], "expected numbers above 0 with commas between"),
        (parse_rates, ["1:1000000000:1"], "--rate {}: is 1000000000 levels, expected at most 1000"),
    ],
    ids=["concurrencies", "ranges", "infinite", "too many"],
)
def test_malformed_levels_are_refused(parse: Callable[[str], object], texts: list[str], said: str) -> None:
    for text in texts:
        with pytest.raises(BenchmarkArgumentError, match=said.format(text)):
            parse(text)


def statistics(scale: int) -> pb.ModelStatistics:
    made = pb.ModelStatistics(name="m", version="1", inference_count=40 * scale, execution_count=10 * scale)
    times = made.inference_stats
    fields = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    for field, ns in zip(fields, (9_000_000, 2_000_000, 1_000_000, 3_000_000, 500_000), strict=True):
        getattr(times, field).count, getattr(times, field).ns = 20 * scale, ns * scale
    return made


def test_counts_between_two_moments() -> None:
    share = ServerTotals.of([statistics(5)]).since(ServerTotals.of([statistics(2)]))
    assert share is not None
    assert (share.requests, share.mean_batch_size) == (60, 4.0)
    assert share.queue_ms == pytest.approx(0.1)
    assert share.compute_ms == pytest.approx(0.225)


def test_versions_are_added_up() -> None:
    assert ServerTotals.of([statistics(1), statistics(2)]) == ServerTotals.of([statistics(3)])


def test_an_idle_server_has_no_means() -> None:
    idle = ServerTotals.of([statistics(2)]).since(ServerTotals.of([statistics(2)]))
    assert idle is not None
    assert (idle.mean_batch_size, idle.queue_ms, idle.compute_ms) == (None, None, None)


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
        "speed": None,
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
    mixed = LoadStatistics(latencies=[histogram(1, 2), histogram(5)], seconds=1.0)
    figures = Level(tally=mixed, server=None, load=Load(concurrency=1), batch_size=1, models=["a", "b"]).to_json()
    assert [(one["model"], one["requests"]) for one in figures["models"]] == [("a", 2), ("b", 1)]
    assert figures["requests"] == 3
    mixed = LoadStatistics(latencies=[histogram(1, 2), histogram()], seconds=1.0)
    figures = Level(tally=mixed, server=None, load=Load(concurrency=1), batch_size=1, models=["a", "never asked"]).to_json()
    assert [one["model"] for one in figures["models"]] == ["a"]


def test_windows_are_in_the_json() -> None:
    windows = [tally([1, 2], seconds=0.5), tally([], {"INTERNAL": 2}, seconds=0.25)]
    first, second = level(windows=windows).to_json()["windows"]
    assert (first["seconds"], first["requests"], first["errors"]) == (0.5, 2, 0)
    assert first["p99_ms"] == pytest.approx(2, rel=1e-3)
    assert second == {"seconds": 0.25, "requests": 0, "errors": 2, "p99_ms": None}


def test_no_success_is_an_error_with_the_servers_message() -> None:
    failed = tally([], {"INTERNAL": 1, "RESOURCE_EXHAUSTED": 7})
    text = r"at 64 in flight no request succeeded \(8 failed\): RESOURCE_EXHAUSTED: the server's text for RESOURCE_EXHAUSTED"
    with pytest.raises(BenchmarkError, match=text):
        Level(tally=failed, server=None, load=Load(concurrency=64), batch_size=1)


def test_no_request_at_all_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="none was started in the time given"):
        Level(tally=tally([]), server=None, load=Load(rate=0.1), batch_size=1)


def doubts(load: Load, made: LoadStatistics, **changes: bool | str) -> list[str]:
    return Level(tally=made, server=None, load=load, batch_size=1, **changes).doubts()  # type: ignore[arg-type]  # (a test's shorthand)


def test_figures_that_can_be_believed_have_no_doubts() -> None:
    assert level().doubts() == []
    assert doubts(Load(rate=2), tally([1, 2, 3, 4], lateness=histogram(0.1), busy=0.2)) == []
    assert doubts(Load(rate=2), tally([1, 2, 3, 4], busy=0.99)) == []  # it has sent them all in time


def test_load_of_other_clients_is_a_doubt() -> None:
    (line,) = level(8, server=SERVER + SERVER).doubts()
    assert "the server answered 8 requests, of which 4 were ours" in line


@pytest.mark.parametrize(
    ("load", "changes", "text"),
    [
        (Load(concurrency=4), {"busy": 0.99}, "the load generator was the limit: its processes never waited"),
        (Load(rate=4), {"busy": 0.99}, "the load generator was the limit: its processes never waited"),
        (Load(rate=2), {"lateness": histogram(0.1, 50)}, "the load generator was late by more than a quarter of p99"),
    ],
    ids=["closed", "rate", "late"],
)
def test_a_saturated_generator_is_a_doubt(load: Load, changes: dict[str, Any], text: str) -> None:
    (line,) = doubts(load, tally([1, 2, 3, 4], **changes))
    assert text in line


def test_early_ends_and_unstable_windows_are_doubts() -> None:
    (unrest,) = doubts(Load(concurrency=1), tally([1]), stable=False)
    assert "the windows kept differing by more than 10 %" in unrest
    (ended,) = doubts(Load(concurrency=1), tally([1]), ended_early="connection refused")
    assert "ended early (connection refused)" in ended


def test_failures_have_the_servers_messages() -> None:
    assert level(8, errors={"INTERNAL": 1, "UNAVAILABLE": 3}).failures() == [
        "at 8 in flight: 3 UNAVAILABLE: the server's text for UNAVAILABLE",
        "at 8 in flight: 1 INTERNAL: the server's text for INTERNAL",
    ]
