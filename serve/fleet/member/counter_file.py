"""Counters of a model in a memory-mapped file, exact at any time: they survive if the process is killed.

The file has two places for the totals, and records of what was counted since. When the records are full, totals that include
them are written to the unused place with the next generation number. Each record has the number of its generation, so that
records of an earlier generation are ignored.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from pathlib import Path

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_statistics import BatchTimes
from halfserve.serve.protocol.rpcs import model_statistics

SUFFIX = ".ledger"
PLACE_BYTES = 2**14
RECORDS = 1024
HEAD = struct.Struct("<qqq")  # generation, size and checksum of the totals
RECORD = struct.Struct("<9q")  # kind, seven numbers, and the generation, which is written last
RECORD_BYTES = RECORD.size
FIRST = 2 * PLACE_BYTES
SIZE = FIRST + RECORDS * RECORD_BYTES
BATCH, HITS, MISS, FAILED = 1, 2, 3, 4


class CounterFile:
    """File with the counters of one model, written by the process that serves the model; see `StatisticsLedger`."""

    def __init__(self, path: Path, model: Model) -> None:
        """Create the file.

        Raises:
            OSError: the disk has no space for it.
        """
        self.path = path
        self._model = model
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, SIZE)  # allocate now: a missing page would kill the process later
            self._map = mmap.mmap(file, SIZE)
        finally:
            os.close(file)
        self._generation = 0
        self._at = FIRST
        self._settle()

    def batch(self, times: BatchTimes, arrivals_ns: list[int], rows: int) -> None:
        # One function for all of it, as it runs for every batch: 0.5 us.
        count, at = len(arrivals_ns), self._at
        started, assembled, computed, split = times.started, times.assembled, times.computed, times.split
        RECORD.pack_into(
            self._map,
            at,
            BATCH,
            count,
            rows,
            started * count - sum(arrivals_ns),
            assembled - started,
            computed - assembled,
            split - computed,
            split,
            self._generation,
        )
        self._at = at = at + RECORD_BYTES
        if at == SIZE:
            self._settle()

    def cache_hits(self, count: int, success_ns: int, queue_ns: int, looked_ns: int) -> None:
        self._write(HITS, count, success_ns, queue_ns, looked_ns)

    def cache_miss(self, spent_ns: int) -> None:
        self._write(MISS, spent_ns)

    def failed(self, spent_ns: int) -> None:
        self._write(FAILED, spent_ns)

    def close(self) -> None:
        """Remove the file, because the model is no longer served."""
        self.path.unlink(missing_ok=True)

    def _write(self, kind: int, a: int, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0, g: int = 0) -> None:
        RECORD.pack_into(self._map, self._at, kind, a, b, c, d, e, f, g, self._generation)
        self._at += RECORD_BYTES
        if self._at == SIZE:
            self._settle()

    def _settle(self) -> None:
        """Write the totals, which include all records, and start with empty records."""
        totals = model_statistics(self._model)
        data = totals.SerializeToString()
        if len(data) > PLACE_BYTES - HEAD.size:
            totals.ClearField("batch_stats")  # large if there are thousands of batch sizes
            data = totals.SerializeToString()
        generation = self._generation + 1
        place = PLACE_BYTES * (generation % 2)
        self._map[place + HEAD.size : place + HEAD.size + len(data)] = data
        HEAD.pack_into(self._map, place, generation, len(data), _checksum(generation, data))
        self._generation, self._at = generation, FIRST


def read_counter_file(path: Path) -> pb.ModelStatistics | None:
    """Read the counters in a file; None if its process ended before it was complete."""
    data = path.read_bytes()
    found: list[tuple[int, bytes]] = []
    for place in (0, PLACE_BYTES):
        generation, size, checksum = HEAD.unpack_from(data, place) if len(data) == SIZE else (0, 0, 0)
        totals = data[place + HEAD.size : place + HEAD.size + size]
        if generation and _checksum(generation, totals) == checksum:
            found.append((generation, totals))
    if not found:
        return None
    generation, totals = max(found)
    statistics = pb.ModelStatistics.FromString(totals)
    for kind, *numbers, of_generation in RECORD.iter_unpack(data[FIRST:]):
        if of_generation != generation:
            break
        _count(statistics, kind, *numbers)
    sizes = sorted(statistics.batch_stats, key=lambda one: one.batch_size)
    del statistics.batch_stats[:]
    statistics.batch_stats.extend(sizes)
    return statistics


def _checksum(generation: int, totals: bytes) -> int:
    return zlib.crc32(totals, zlib.crc32(b"%d" % generation))


def _count(statistics: pb.ModelStatistics, kind: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int) -> None:
    """Add one record to the statistics, as `Totals` does."""
    stats = statistics.inference_stats
    if kind == BATCH:
        statistics.inference_count += b
        statistics.execution_count += 1
        statistics.last_inference = max(statistics.last_inference, (time.time_ns() - time.monotonic_ns() + g) // 1_000_000)
        size = next((one for one in statistics.batch_stats if one.batch_size == b), None)
        if size is None:
            size = statistics.batch_stats.add(batch_size=b)
        _add(stats.queue, c, a)
        _add(stats.success, c + (d + e + f) * a, a)
        for name, ns in (("compute_input", d), ("compute_infer", e), ("compute_output", f)):
            _add(getattr(stats, name), ns * a, a)
            _add(getattr(size, name), ns)
    elif kind == HITS:
        _add(stats.success, b, a)
        _add(stats.queue, c, a)
        _add(stats.cache_hit, d, a)
    elif kind == MISS:
        stats.success.ns += a
        _add(stats.cache_miss, a)
    elif kind == FAILED:
        _add(stats.fail, a)


def _add(duration: pb.StatisticDuration, ns: int, count: int = 1) -> None:
    duration.count += count
    duration.ns += ns
