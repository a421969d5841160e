"""A model behind a server of its own, with each way for a client on this machine to send tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from benchmarks.bare_session import served
from benchmarks.cuda_device.networks import Network
from halfserve.serve.benchmark import BenchmarkError
from halfserve.serve.benchmark.level import Level, Load
from halfserve.serve.benchmark.load_target import RequestSettings, SharedMemory
from halfserve.serve.benchmark.measurement import Bench, Goal, Measurement, best_of, measure, search
from halfserve.serve.engine.backend import DevicePlacement

LOWEST, HIGHEST = 0.25, 1.5  # bounds of the search, relative to the rate alone


def each_way(network: Network, precision: str, placement: DevicePlacement, size: int) -> Iterator[tuple[str, Bench]]:
    """Name of each way to send tensors, and a server that receives requests of one row in this way.

    Args:
        network: network whose file is served.
        precision: precision of the file.
        placement: device to run on.
        size: largest batch size.
    """
    where = "--require-gpu" if placement.use_gpu else "--cpu"
    ways: dict[str, SharedMemory | None] = {"gRPC": None, "system memory": "system"}
    if placement.use_gpu:
        ways["CUDA memory"] = "cuda"
    for name, kind in ways.items():
        requests = RequestSettings(given=network.feeds(precision, 1), shared_memory=kind)
        with served(network.path(precision), size, placement.threads, requests, ["--shared-memory"], where) as contestant:
            yield name, contestant.bench


def highest(bench: Bench, goal: Goal, alone: float, how: Measurement) -> Level | None:
    """The level with the highest rate that meets a goal; None if none does.

    Args:
        bench: the server.
        goal: latency limit.
        alone: rows a second without a server.
        how: settings of each measurement.
    """
    levels = []
    with suppress(BenchmarkError):  # raised if the lowest rate does not meet the goal
        for level in search([Load(rate=LOWEST * alone), Load(rate=HIGHEST * alone)], goal, partial(measure, bench, how=how)):
            levels.append(level)  # noqa: PERF402  (as far as it comes)
    return best_of(levels, goal)
