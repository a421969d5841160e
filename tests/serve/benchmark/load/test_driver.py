"""The loop of one process, in this one: against the real server, and against peers that misbehave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.benchmark.load import links
from serve.benchmark.load.driver import Driver
from serve.benchmark.load.order import Order, Tally, Target, TlsFiles
from serve.client import InferenceClient
from serve.transports.grpcio_server import GrpcioServer
from tests.serve.benchmark.load.scripted_peer import HEADERS, OK, Peer, peer
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

UNARY, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_CONCURRENT_STREAMS = 3
UNUSED = ("127.0.0.1", 1)


def message(rows: int = 1, version: str = "1") -> bytes:
    request = pb.ModelInferRequest(model_name="mlp", model_version=version)
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 64])
    request.raw_input_contents.append(np.zeros((rows, 64), np.float16).tobytes())
    return request.SerializeToString()


def drive(
    place: tuple[str, int],
    order: Order,
    *,
    messages: Sequence[bytes] = (b"",),
    models: Sequence[int] = (),
    streaming: bool = False,
) -> tuple[Tally, str | None]:
    """The whole tally, and why it ended early."""
    target = Target(host=place[0], port=place[1], path=STREAM if streaming else UNARY, streaming=streaming)
    driver = Driver(target, messages, models or [0] * len(messages), order)
    driver.connect()
    windows: list[Tally] = []

    def tell(tally: Tally) -> bool:
        windows.append(tally)
        return True

    trouble = driver.run(tell)
    return windows[0].then(windows[1:]), trouble


def place_of(server: RunningServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
def test_sends_exactly_what_was_ordered(server: RunningServer, client: InferenceClient, streaming: bool) -> None:
    before = client.statistics("mlp", "1")[0].inference_count
    order = Order(concurrency=4, requests=20)
    tally, trouble = drive(place_of(server), order, messages=[message(1), message(3)], models=[0, 1], streaming=streaming)
    assert (tally.sent, tally.errors, trouble) == (20, Counter(), None)
    assert [latencies.total for latencies in tally.latencies] == [10, 10]
    assert client.statistics("mlp", "1")[0].inference_count - before == 10 * 1 + 10 * 3
    # Each of the four slots works through its share one by one.
    assert tally.latency.sum_ns <= 4 * tally.seconds * 1e9


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
def test_failures_are_counted_with_the_servers_words(server: RunningServer, streaming: bool) -> None:
    messages = [message(), message(version="77")]
    tally, _ = drive(place_of(server), Order(concurrency=3, requests=9), messages=messages, streaming=streaming)
    assert (tally.latency.total, tally.failed) == (5, 4)
    (status,) = tally.errors
    assert status == ("UNKNOWN" if streaming else "NOT_FOUND")
    assert "77" in tally.messages[status]


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
def test_a_server_of_grpcs_own_is_loaded_just_the_same(repository: Path, streaming: bool) -> None:
    messages = [message(), message(version="77")]
    with running_server(lambda: load_repository(repository), GrpcioServer) as reference:
        tally, _ = drive(place_of(reference), Order(concurrency=4, requests=20), messages=messages, streaming=streaming)
    assert (tally.latency.total, tally.failed) == (10, 10)
    assert "77" in next(iter(tally.messages.values()))


def test_a_rate_is_kept_and_the_time_too(server: RunningServer) -> None:
    order = Order(rate=200, arrivals="constant", seconds=0.2, window_s=0.05)
    tally, _ = drive(place_of(server), order, messages=[message()])
    assert tally.sent == tally.latency.total == tally.lateness.total == 40
    assert tally.seconds >= 39 / 200


def test_large_messages_pass_the_flow_control_window(server: RunningServer, client: InferenceClient) -> None:
    request = pb.ModelInferRequest(model_name="echo_types")
    for tensor in client.model_metadata("echo_types").inputs:
        count = 500_000 if tensor.datatype == "FP32" else 1
        value = np.zeros((1, count), np.float32).tobytes() if tensor.datatype == "FP32" else b"\0" * 8
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1, count])
        sizes = {"BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "INT32": 4, "UINT32": 4, "BYTES": 4}
        size = sizes.get(tensor.datatype, 8)
        request.raw_input_contents.append(value if tensor.datatype == "FP32" else b"\0" * size)
    tally, _ = drive(place_of(server), Order(concurrency=2, requests=4), messages=[request.SerializeToString()])
    assert (tally.latency.total, tally.messages) == (4, {})


@pytest.mark.parametrize(("concurrency", "held_back"), [(6, 0), (7, 1), (10, 4)])
def test_only_requests_that_found_no_room_were_held_back(
    concurrency: int, held_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "MAX_CONNECTIONS", 2)
    with peer(lambda this, stream: this.answer(stream), {MAX_CONCURRENT_STREAMS: 3}) as place:
        tally, _ = drive(place, Order(concurrency=concurrency, requests=concurrency))
    assert (tally.latency.total, tally.held_back) == (concurrency, held_back)


def test_latency_counts_from_when_a_request_was_to_be_sent() -> None:
    """A server that stalls until all twenty requests are there: the first one's latency spans the other nineteen's times."""
    waiting: list[int] = []

    def answer_all_at_the_twentieth(this: Peer, stream: int) -> None:
        waiting.append(stream)
        if len(waiting) == 20:
            for one in waiting:
                this.answer(one)

    with peer(answer_all_at_the_twentieth) as place:
        tally, _ = drive(place, Order(rate=200, arrivals="constant", requests=20))
    assert tally.latency.total == 20
    assert tally.latency.max_ns >= 19 / 200 * 1e9
    assert tally.latency.percentiles_ms([50])[0] >= 9 / 200 * 1e3


def test_a_request_without_an_answer_ends_at_its_deadline() -> None:
    with peer(lambda this, stream: None) as place:
        tally, trouble = drive(place, Order(concurrency=2, requests=4, timeout_s=0.05))
    assert (tally.errors, trouble) == (Counter(DEADLINE_EXCEEDED=4), None)
    assert tally.seconds >= 0.1


def test_more_connections_are_made_where_one_does_not_carry_enough() -> None:
    gathered: list[tuple[Peer, int]] = []

    def answer_five_at_once(this: Peer, stream: int) -> None:
        gathered.append((this, stream))
        if len(gathered) == 5:
            for other, one in gathered:
                if other is not this:
                    other.hang_up()
                else:
                    this.answer(one)

    with peer(answer_five_at_once, {MAX_CONCURRENT_STREAMS: 1}) as place:
        tally, _ = drive(place, Order(concurrency=5, requests=5))
    assert len({id(this) for this, _ in gathered[:5]}) == 5
    assert (tally.latency.total, tally.errors) == (1, Counter(UNAVAILABLE=4))


def test_a_closed_connection_fails_what_is_in_flight_and_is_made_anew() -> None:
    def hang_up_at_the_first(this: Peer, stream: int) -> None:
        if len(this.asked) == 1:
            this.hang_up()
        else:
            this.answer(stream)

    with peer(hang_up_at_the_first) as place:
        tally, trouble = drive(place, Order(concurrency=1, requests=3))
    assert (tally.latency.total, tally.errors, trouble) == (2, Counter(UNAVAILABLE=1), None)
    assert "closed the connection" in tally.messages["UNAVAILABLE"] or "reset" in tally.messages["UNAVAILABLE"]


def test_a_server_that_says_goodbye_is_asked_on_another_connection() -> None:
    def one_each(this: Peer, stream: int) -> None:
        this.answer(stream)
        this.http2.send_goaway(0)

    with peer(one_each) as place:
        tally, _ = drive(place, Order(concurrency=1, requests=4))
    assert (tally.latency.total, tally.failed) == (4, 0)


def test_a_server_that_closes_idle_connections_has_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GIVE_UP_S", 0.05)

    def one_each(this: Peer, stream: int) -> None:
        this.answer(stream)
        this.http2.send_goaway(0)

    with peer(one_each) as place:
        tally, trouble = drive(place, Order(rate=5, arrivals="constant", requests=3, window_s=0.01))
    assert (tally.latency.total, tally.failed, trouble) == (3, 0, None)


def test_a_server_that_has_gone_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(links, "RETRY_S", 0.01)
    tally, trouble = drive(UNUSED, Order(concurrency=2, seconds=60))
    assert trouble == "connection refused"
    assert tally.errors == Counter(UNAVAILABLE=2)


def test_a_server_without_tls_is_no_partner_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(links, "RETRY_S", 0.01)
    with peer(lambda this, stream: this.answer(stream)) as place:
        target = Target(host=place[0], port=place[1], path=UNARY, tls=TlsFiles())
        driver = Driver(target, [b""], [0], Order(concurrency=1, requests=1))
        driver.connect()
        trouble = driver.run(lambda _: True)
    assert trouble is not None
    assert "ssl" in trouble.lower() or "reset" in trouble or "eof" in trouble.lower()


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ([(b":status", b"200"), (b"grpc-status", b"8"), (b"grpc-message", b"too%20much")], "RESOURCE_EXHAUSTED", "too much"),
        ([(b":status", b"200"), (b"grpc-status", b"99")], "UNKNOWN", "no explanation"),
        ([(b":status", b"404")], "UNKNOWN", "HTTP 404"),
        ([(b":status", b"200")], "UNKNOWN", "the server ended the call without a status"),
        ([(b":status", b"200"), (b"grpc-status", b"0")], "INTERNAL", "the server ended the call well, but without a message"),
    ],
    ids=["status", "unknown status", "plain HTTP", "no status", "no message"],
)
def test_answers_that_are_refusals(headers: list[tuple[bytes, bytes]], status: str, text: str) -> None:
    with peer(lambda this, stream: this.refuse(stream, *headers)) as place:
        tally, _ = drive(place, Order(concurrency=1, requests=2))
    assert tally.errors == Counter({status: 2})
    assert text in tally.messages[status]


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([b"\0\0\0\0\3abc"], None),
        ([b"\0\0\0", b"\0\3", b"a", b"bc"], None),
        ([], "without a message"),
        ([b"\0\0\0"], "not one whole message"),
        ([b"\0\0\0\0\3ab"], "not one whole message"),
        ([b"\0\0\0\0\3abc", b"\0\0\0\0\0"], "not one whole message"),
    ],
)
def test_an_answer_is_one_whole_message(parts: list[bytes], status: str | None) -> None:
    def answer(this: Peer, stream: int) -> None:
        this.http2.send_response(stream, HEADERS)
        for part in parts:
            this.http2.send_data(stream, part)
        this.http2.send_trailers(stream, OK)

    with peer(answer) as place:
        tally, _ = drive(place, Order(concurrency=1, requests=2))
    assert tally.errors == Counter({"INTERNAL": 2} if status else {})
    assert status is None or status in tally.messages["INTERNAL"]


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
@pytest.mark.parametrize(("code", "status"), [(0x7, "UNAVAILABLE"), (0xB, "RESOURCE_EXHAUSTED"), (0x2, "INTERNAL")])
def test_a_reset_call_has_the_status_that_grpc_gives_it(code: int, status: str, streaming: bool) -> None:
    with peer(lambda this, stream: this.http2.reset_stream(stream, code)) as place:
        tally, _ = drive(place, Order(concurrency=1, requests=2), streaming=streaming)
    assert tally.errors == Counter({status: 2})
    assert tally.messages[status] == f"the server reset the call (HTTP/2 error {code:#x})"


def test_being_told_to_stop_ends_the_sending() -> None:
    with peer(lambda this, stream: this.answer(stream)) as place:
        target = Target(host=place[0], port=place[1], path=UNARY)
        driver = Driver(target, [b""], [0], Order(concurrency=2, window_s=0.01))
        driver.connect()
        told: list[Any] = []

        def until_something_is_there(tally: Tally) -> bool:
            told.append(tally)
            return not any(one.latency.total for one in told)

        assert driver.run(until_something_is_there) is None
    assert sum(tally.latency.total for tally in told) == sum(tally.sent for tally in told) > 0
