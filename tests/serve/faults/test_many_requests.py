"""Many requests of many shapes: each gets its own answer, and memory does not grow with their number."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.models import save_models
from benchmarks.harness.process_watch import Sample, look
from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from halfserve.serve.benchmark.load.calls import framed
from tests.scale import SCALE, scaled
from tests.serve.faults.exchange import INFER_PATH, Exchange, call_headers, messages_in, turn
from tests.serve.faults.soaking.judgement import BLOCKS, Rise, rise
from tests.serve.faults.soaking.known_answers import ID_BYTES, Known, known_requests, large_requests

COUNT = scaled(4000)  # TEST_SCALE=250 sends a million
CONNECTIONS, IN_FLIGHT = 4, 8
LARGE_EVERY = 100  # one request in so many has 256 KiB a row
ENOUGH = 100_000  # requests after which memory is judged; fewer end while the server still allocates what it keeps
MILLION = 1_000_000
MAX_MB_PER_MILLION = 1.0
SETTLED_AFTER = 0.1  # fraction of the requests; by then every kind of batch has been run
SPARE_DESCRIPTORS, SPARE_THREADS = 2, 2
SAMPLES = 400


@pytest.mark.long
@pytest.mark.timeout(600 * max(1.0, SCALE))
def test_a_real_server_answers_all_of_them(tmp_path: Path) -> None:
    save_models(tmp_path)
    with server_process(tmp_path) as server:
        right, samples = answered(server, COUNT)
    assert right.total() == COUNT
    assert any(kind.startswith("large") for kind in right)
    first, last = samples[0][1], samples[-1][1]
    assert last.descriptors <= first.descriptors + SPARE_DESCRIPTORS
    assert last.threads <= first.threads + SPARE_THREADS
    if COUNT >= ENOUGH:
        growth = grown([(number, sample.resident_mb) for number, sample in samples])
        logging.getLogger(__name__).info("MB a million requests: %s", growth)
        assert growth.low <= MAX_MB_PER_MILLION


def answered(server: ServerProcess, count: int) -> tuple[Counter[str], list[tuple[int, Sample]]]:
    """Right answers by kind of request, and the server's resources by number of answers, after the first ones."""
    exchanges: list[Exchange[tuple[int, Known]]] = [Exchange(server.address) for _ in range(CONNECTIONS)]
    numbers, headers = itertools.islice(enumerate(requests()), count), call_headers(INFER_PATH)
    right, samples = Counter[str](), list[tuple[int, Sample]]()
    next_sample = int(SETTLED_AFTER * count)
    while right.total() < count:
        for exchange in exchanges:
            for number, known in itertools.islice(numbers, IN_FLIGHT - len(exchange)):
                exchange.start((number, known), headers, known.request(number))
        for (number, known), answer in turn(exchanges):
            assert answer.code == 0, f"{known.kind}: status {answer.code} {answer.text}"
            assert known.is_right(number, answer.body), f"{known.kind}: a wrong answer of {len(answer.body)} bytes"
            right[known.kind] += 1
        if right.total() >= next_sample:
            samples.append((right.total(), look(server.process.pid)))
            next_sample += max(1, count // SAMPLES)
    for exchange in exchanges:
        exchange.close()
    return right, samples


def requests() -> Iterator[Known]:
    """An endless sequence."""
    small, large = itertools.cycle(known_requests(0)), itertools.cycle(large_requests(0))
    for number in itertools.count(1):
        yield next(small) if number % LARGE_EVERY else next(large)


def grown(memory_mb: Sequence[tuple[int, float]]) -> Rise:
    """MB a million requests, from resident memory by number of answers; at least 2 * BLOCKS values."""
    assert len(memory_mb) >= 2 * BLOCKS
    return rise([number for number, _ in memory_mb], [mb for _, mb in memory_mb]).times(MILLION)


def test_memory_that_grows_with_requests_is_found() -> None:
    numbers, noise = range(0, MILLION, MILLION // SAMPLES), np.random.default_rng(0).normal(0, 0.1, SAMPLES)
    for per_million, is_leak in ((0.5, False), (1.5, True)):
        memory = [(n, 100 + per_million * n / MILLION + float(extra)) for n, extra in zip(numbers, noise, strict=True)]
        assert (grown(memory).low > MAX_MB_PER_MILLION) is is_leak


def answer_to(known: Known, number: int, *, spoilt: bool = False) -> bytes:
    request = ModelInferRequest.FromString(messages_in(known.request(number))[0])
    raw = known.expected.tobytes()
    response = ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    response.outputs.add(name="y", datatype=request.inputs[0].datatype, shape=known.expected.shape)
    response.raw_output_contents.append(raw[:-1] + bytes([raw[-1] ^ 1]) if spoilt else raw)
    return framed(response.SerializeToString())


@pytest.mark.parametrize("first", [True, False])
def test_only_the_very_answer_is_right(first: bool) -> None:
    for known in [*known_requests(0, 1), *large_requests(0, 3)]:
        if not first:
            assert known.is_right(1, answer_to(known, 1))
        assert not known.is_right(7, answer_to(known, 7, spoilt=True))
        assert not known.is_right(7, answer_to(known, 8))  # another request's
        assert not known.is_right(7, b"")
        assert not known.is_right(7, answer_to(known, 7)[:-2])
        assert known.is_right(7, answer_to(known, 7))
        assert known.is_right(10**ID_BYTES - 1, answer_to(known, 10**ID_BYTES - 1))


def test_a_truncated_message_is_an_error() -> None:
    assert messages_in(framed(b"a") + framed(b"")) == [b"a", b""]
    for broken in (framed(b"abc")[:-1], b"\1" + framed(b"abc")[1:], b"\0\0"):
        with pytest.raises(ValueError, match="are no message"):
            messages_in(broken)
