"""Whether replacing a model is measured as it says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import reloads
from benchmarks.reloads import NAME, Versions, Windows, compare, measure, median_of
from benchmarks.serving_models import mlp
from halfserve.serve.benchmark.load.spec import LatencyHistogram, LoadResult, LoadSpec, LoadStatistics

pytestmark = pytest.mark.long

FINITE = st.floats(-1e6, 1e6)


def tally(*milliseconds: float) -> LoadStatistics:
    return LoadStatistics(latencies=[LatencyHistogram.of((np.array(milliseconds) * 1e6).astype(np.int64))])


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(1, 0, 0), (5, 0, 4), (6, 0, 5), (8, 0, 7), (9, 1, 7), (10, 1, 8), (20, 5, 14), (100, 39, 60)],
)
def test_the_interval_of_a_median_is_the_one_in_the_tables(count: int, low: int, high: int) -> None:
    median = median_of([float(value) for value in reversed(range(count))])
    assert (median.low, median.value, median.high) == (low, (count - 1) / 2, high)


@given(values=st.lists(FINITE, min_size=1, max_size=60))
def test_a_median_is_within_its_interval(values: list[float]) -> None:
    median = median_of(values)
    assert min(values) <= median.low <= median.value <= median.high <= max(values)


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="expected one at least"):
        median_of([])


def test_windows_are_compared_with_those_beside_them() -> None:
    quiet = Windows(tallies=[tally(1.0), tally(10.0), tally(4.0)])
    reload = Windows(tallies=[tally(1.1), tally(11.0), tally(8.0)])
    assert compare(quiet, reload, 99.0).value == pytest.approx(10, abs=0.2)
    assert reload.together()[-1] == pytest.approx(11, rel=1e-3)
    assert (reload.requests, reload.failed) == (3, 0)


class Recorded:
    """In place of a load generator: notes what happens when."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run(self, order: LoadSpec) -> LoadResult:
        self.events.append("window")
        return LoadResult(tally=tally(order.seconds or 1.0))

    def load(self) -> None:
        self.events.append("load")

    def add(self) -> None:
        self.events.append("add")


def test_every_other_window_has_a_reload() -> None:
    recorded = Recorded()
    order = LoadSpec(rate=1.0, seconds=0.0)
    quiet, reload = measure(recorded, order, 3, add=recorded.add, load=recorded.load)  # type: ignore[arg-type]  # (runs orders)
    assert recorded.events.count("load") == len(reload.loading_s) == 3
    assert len(quiet.tallies) == len(reload.tallies) == 3
    pairs = [recorded.events[at : at + 4] for at in (0, 4, 8)]
    assert [(pair[:2], set(pair[2:])) for pair in pairs] == [(["add", "window"], {"window", "load"})] * 3


def test_a_reload_that_fails_ends_the_measurement() -> None:
    def refused() -> None:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        measure(Recorded(), LoadSpec(rate=1.0, seconds=0.0), 1, add=lambda: None, load=refused)  # type: ignore[arg-type]  # (see above)


def contents(folder: Path) -> Sequence[tuple[str, bytes]]:
    return [(path.parent.name, path.read_bytes()) for path in sorted(folder.glob("*/model.onnx"))]


def test_every_version_is_another_file_and_the_same_model(tmp_path: Path) -> None:
    versions = Versions.of(tmp_path, mlp())
    versions.add()
    versions.add()
    (second, before), (third, now) = contents(tmp_path / NAME)
    assert (second, third, versions.latest) == ("2", "3", 3)
    assert before != now
    assert onnx.ModelProto.FromString(now).graph == mlp().graph


def test_a_run_tells_what_it_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloads, "WARM_UP_S", 0.1)
    reloads.main(reloads=2, rate=200.0, window_s=0.2, as_json=True)
    figures = json.loads(capsys.readouterr().out)
    assert (figures["reloads"], figures["failed"], figures["errors"]) == (2, 0, {})
    assert figures["requests"] > 40
    assert figures["difference_percent"].keys() == {"p50", "p90", "p99"}
    assert figures["reload_ms"]["p99_of_a_window"]["value"] > 0
