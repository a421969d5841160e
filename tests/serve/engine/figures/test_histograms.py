from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serve.engine.figures.histograms import EDGES_NS, FOLD_REQUESTS, STAGES, StageHistograms
from serve.engine.figures.statistics import BatchTimes

durations = st.integers(0, 3 * EDGES_NS[-1])
batches = st.lists(st.tuples(st.lists(durations, min_size=1, max_size=5), durations, durations, durations), max_size=20)
NOW = 10**15


def naive(values: list[int]) -> tuple[int, ...]:
    """How many lie in each bucket, an edge belonging to the bucket below it."""
    edges = (-1, *EDGES_NS, 10**18)
    return tuple(sum(low < v <= high for v in values) for low, high in pairwise(edges))


@given(batches)
def test_every_request_counts_once_in_each_stage(cases: list[tuple[list[int], int, int, int]]) -> None:
    histograms = StageHistograms()
    expected: dict[str, list[int]] = {stage: [] for stage in STAGES}
    for waits, assembling, computing, splitting in cases:
        assembled = NOW + assembling
        computed = assembled + computing
        times = BatchTimes(started=NOW, assembled=assembled, computed=computed, split=computed + splitting)
        histograms.add([(times, [NOW - wait for wait in waits], 1)])
        for wait in waits:
            spent = (wait, assembling, computing, splitting, wait + assembling + computing + splitting)
            for stage, ns in zip(STAGES, spent, strict=True):
                expected[stage].append(ns)
    for stage, histogram in histograms.read().items():
        assert histogram.counts == naive(expected[stage])
        assert histogram.ns == sum(expected[stage])
        assert histogram.count == len(expected[stage])


def test_what_has_been_recorded_is_not_kept_for_ever() -> None:
    histograms = StageHistograms()
    times = BatchTimes(started=NOW, assembled=NOW + 1, computed=NOW + 2, split=NOW + 3)
    for _ in range(FOLD_REQUESTS * 3 // 2):
        histograms.add([(times, [NOW - 5, NOW - 6], 2)])
    assert len(histograms._arrivals) < FOLD_REQUESTS
    assert histograms.read()["total"].count == FOLD_REQUESTS * 3
    assert histograms.read()["queue"].ns == 11 * FOLD_REQUESTS * 3 // 2
