from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.benchmark.errors import BenchmarkError
from serve.benchmark.load_generator import LoadGenerator, Order
from serve.client import InferenceClient
from tests.serve.running_server import RunningServer


def message(rows: int, version: str = "1") -> bytes:
    request = pb.ModelInferRequest(model_name="mlp", model_version=version)
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 64])
    request.raw_input_contents.append(np.zeros((rows, 64), np.float16).tobytes())
    return request.SerializeToString()


def order(concurrency: int, *, seconds: float | None = None, requests: int | None = None) -> Order:
    return Order(concurrency=concurrency, seconds=seconds, requests=requests, timeout_s=20)


def rows_served(client: InferenceClient) -> int:
    return client.statistics("mlp", "1")[0].inference_count


def test_sends_as_many_requests_as_ordered_whatever_the_processes(server: RunningServer, client: InferenceClient) -> None:
    with LoadGenerator(server.address, [message(1), message(3)], processes=2) as generator:
        before = rows_served(client)
        shared = generator.run(order(4, requests=20))
        alone = generator.run(order(1, requests=2))
    assert (len(shared.latencies_ns), shared.errors) == (20, Counter())
    assert rows_served(client) - before == 10 * 1 + 10 * 3 + 1 + 3
    assert len(alone.latencies_ns) == 2
    assert shared.latencies_ns.min() > 0
    # Each of the four slots works through its share one by one.
    assert shared.latencies_ns.sum() <= 4 * shared.seconds * 1e9


def test_ends_in_time_and_counts_every_failure(server: RunningServer) -> None:
    with LoadGenerator(server.address, [message(1), message(1, version="77")]) as generator:
        outcome = generator.run(order(3, seconds=0.2))
    assert 0.2 <= outcome.seconds < 5
    assert outcome.errors.keys() == {"NOT_FOUND"}
    assert "77" in outcome.messages["NOT_FOUND"]
    assert abs(len(outcome.latencies_ns) - outcome.errors.total()) <= 1


def test_nobody_at_the_address_is_counted_too() -> None:
    with LoadGenerator("127.0.0.1:1", [b""]) as generator:
        outcome = generator.run(order(2, requests=6))
    assert outcome.errors == Counter(UNAVAILABLE=6)
    assert len(outcome.latencies_ns) == 0


def test_a_process_that_died_is_an_error_and_no_hang() -> None:
    with LoadGenerator("127.0.0.1:1", [b""]) as generator:
        generator._processes[0].kill()
        generator._processes[0].join()
        with pytest.raises(BenchmarkError, match="a process of the load generator has died"):
            generator.run(order(1, requests=1))


def test_closing_twice_is_fine() -> None:
    generator = LoadGenerator("127.0.0.1:1", [b""])
    generator.close()
    generator.close()
    assert generator._processes == []
