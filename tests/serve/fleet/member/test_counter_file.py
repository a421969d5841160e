"""What a member leaves behind, however it ends."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import BackendError
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.fleet.member.counter_file import HEAD, RECORDS, SIZE, CounterFile, read_counter_file
from halfserve.serve.protocol.rpcs import model_statistics
from tests.serve.engine.fakes import HeldBackend, held_model

START = 10**15  # on time.monotonic_ns()'s clock, after eleven days
EVENTS = st.lists(
    st.tuples(st.sampled_from(["batch", "hits", "miss", "failed"]), st.integers(1, 5), st.integers(0, 10**9)), max_size=40
)


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)


def count(model: object, kind: str, requests: int, ns: int) -> None:
    statistics = model.statistics  # type: ignore[attr-defined]  # a Model
    if kind == "batch":
        times = BatchTimes(started=START + ns, assembled=START + 2 * ns, computed=START + 3 * ns, split=START + 4 * ns)
        statistics.batch_done(times, [START - number for number in range(requests)], requests + 1)
    elif kind == "hits":
        arrived = START * requests
        statistics.cache_hits(requests, arrived_ns=arrived, asked_ns=arrived + ns, looked_ns=ns, ended_ns=START + 2 * ns)
    elif kind == "miss":
        statistics.cache_miss(ns)
    else:
        statistics.failed(time.monotonic_ns() - ns, BackendError("no"))


def without_time(counters: pb.ModelStatistics | None) -> pb.ModelStatistics | None:
    if counters is not None:
        counters.last_inference //= 10_000  # it is known by two clocks, whose readings lie some microseconds apart
    return counters


@settings(max_examples=30)
@given(EVENTS, st.integers(0, 2))
def test_a_ledger_has_what_was_counted_to_the_last_request(events: list[tuple[str, int, int]], times_full: int) -> None:
    model = held_model(HeldBackend())
    count(model, "batch", 3, 1000)  # before it has a ledger
    with folder() as path:
        ledger = CounterFile(path / "ledger", model)
        model.statistics.ledger = ledger
        for _ in range(RECORDS * times_full):
            count(model, "miss", 1, 7)
        for event in events:
            count(model, *event)
        shutil.copy(ledger.path, path / "as the kernel has it")  # nothing is closed or flushed
        assert without_time(read_counter_file(path / "as the kernel has it")) == without_time(model_statistics(model))


@given(st.integers(0, HEAD.size), st.integers(0, SIZE - 1))
def test_a_ledger_cut_off_while_it_is_written_has_the_totals_before(torn: int, size: int) -> None:
    model = held_model(HeldBackend())
    with folder() as path:
        ledger = CounterFile(path / "ledger", model)
        model.statistics.ledger = ledger
        count(model, "batch", 3, 1000)
        whole = ledger.path.read_bytes()
        # The first generation's totals lie in the second place; a process that is killed has written some bytes of the other.
        ledger.path.write_bytes(HEAD.pack(2, 5, 6)[:torn] + whole[torn:])
        assert without_time(read_counter_file(ledger.path)) == without_time(model_statistics(model))
        ledger.path.write_bytes(whole[:size])
        assert read_counter_file(ledger.path) is None
