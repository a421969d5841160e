"""One load process: pacing, framing, sending and receiving against scripted servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve import Client
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.benchmark.load import calls
from halfserve.serve.benchmark.load.calls import _streamed_status, _timeout, call_headers
from halfserve.serve.benchmark.load.driver import ClosedLoop, Driver, OpenLoop, in_turn, intended_times, pacer_of
from halfserve.serve.benchmark.load.spec import Arrivals, LoadEndpoint, LoadSpec, LoadStatistics, TlsPaths
from halfserve.serve.transports.grpc_framing import timeout_seconds
from halfserve.serve.transports.grpcio_server import GrpcioServer
from tests.serve.benchmark.load.scripted_peer import HEADERS, OK, Peer, peer
from tests.serve.conftest import load_repository
from tests.serve.running_server import RunningServer, running_server

SECOND = 1_000_000_000
UNARY, STREAM = "/inference.GRPCInferenceService/ModelInfer", "/inference.GRPCInferenceService/ModelStreamInfer"
MAX_CONCURRENT_STREAMS = 3
UNUSED = ("127.0.0.1", 1)


def times(arrivals: Arrivals, rate: float, seconds: float, share: tuple[int, int] = (0, 1)) -> list[int]:
    return list(intended_times(LoadSpec(rate=rate, arrivals=arrivals, seconds=seconds, share=share), 0))


@given(st.integers(1, 5), st.integers(1, 2000), st.floats(0.05, 1))
def test_even_arrivals_of_all_processes_together_are_evenly_spaced(processes: int, rate: int, seconds: float) -> None:
    together = sorted(t for index in range(processes) for t in times("constant", rate, seconds, (index, processes)))
    assert abs(len(together) - rate * seconds) <= 1
    assert all(abs(late - early - SECOND / rate) <= 1 for early, late in pairwise(together))


def test_random_arrivals_are_a_poisson_process_of_the_rate() -> None:
    together = sorted(t for index in range(3) for t in times("poisson", 20_000, 1.0, (index, 3)))
    assert abs(len(together) - 20_000) < 5 * math.sqrt(20_000)
    gaps = np.diff(together)
    # Exponential gaps: the deviation equals the mean, and e^-1 of them are longer than it.
    assert 0.95 < gaps.std() / gaps.mean() < 1.05
    assert abs((gaps > gaps.mean()).mean() - math.exp(-1)) < 0.02


def test_random_arrivals_are_reproducible_and_differ_by_process() -> None:
    assert times("poisson", 100, 1) == times("poisson", 100, 1)
    assert times("poisson", 100, 1, (0, 2)) != times("poisson", 100, 1, (1, 2))


def test_arrivals_end_at_the_number_of_requests() -> None:
    spec = LoadSpec(rate=10, requests=3, arrivals="constant")
    assert list(intended_times(spec, 7)) == [7, 7 + SECOND // 10, 7 + SECOND // 5]


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 40))
def test_a_replay_sends_each_request_near_its_captured_place(processes: int, contents: int, arrivals: int) -> None:
    spec = LoadSpec(rate=1, times_s=np.arange(arrivals) / 4)
    requests = [(bytes([number]), 0) for number in range(contents)]
    sent: list[tuple[int, tuple[bytes, int]]] = []
    for index in range(processes):
        own = replace(spec, share=(index, processes))
        due = list(intended_times(own, 5))
        sent += zip(due, islice(in_turn(requests, own), len(due)), strict=True)
    assert [due for due, _ in sorted(sent)] == [5 + number * SECOND // 4 for number in range(arrivals)]
    assert [content for _, (content, _) in sorted(sent)] == [bytes([n * contents // arrivals]) for n in range(arrivals)]


def test_an_open_loop_ignores_answers() -> None:
    pacer = OpenLoop(LoadSpec(rate=10, requests=3, arrivals="constant"), 0)
    assert (pacer.due(0), pacer.next_ns()) == ([0], SECOND // 10)
    assert pacer.due(SECOND) == [SECOND // 10, SECOND // 5]
    pacer.answered(1)
    assert pacer.exhausted
    assert pacer.due(2 * SECOND) == []


def test_an_open_loop_lasts_until_its_end() -> None:
    pacer = pacer_of(LoadSpec(rate=2, seconds=1.0, arrivals="constant"), 0)
    assert pacer.due(SECOND // 2) == [0, SECOND // 2]
    assert (pacer.exhausted, pacer.next_ns()) == (False, SECOND)
    assert pacer.due(SECOND) == []
    assert (pacer.exhausted, pacer.next_ns()) == (True, None)
    told = pacer_of(LoadSpec(rate=2, seconds=1.0), 0)
    told.stop()
    assert (told.exhausted, told.due(SECOND)) == (True, [])


@given(st.integers(1, 20), st.lists(st.integers(0, 20), max_size=10), st.integers(0, 60))
def test_a_closed_loop_limits_requests_in_flight(concurrency: int, answers: list[int], requests: int) -> None:
    pacer = ClosedLoop(LoadSpec(concurrency=concurrency, requests=requests), 0)
    in_flight = sent = 0
    for count in [0, *answers]:
        for _ in range(min(count, in_flight)):
            pacer.answered(1)
            in_flight -= 1
        due = len(pacer.due(0))
        in_flight, sent = in_flight + due, sent + due
        assert in_flight == min(concurrency, in_flight + requests - sent)
        assert pacer.exhausted == (sent == requests)


def test_a_closed_loop_ends_in_time_and_when_stopped() -> None:
    pacer = pacer_of(LoadSpec(concurrency=2, seconds=1.0), 0)
    assert (pacer.due(5), pacer.next_ns()) == ([5, 5], SECOND)
    pacer.answered(1)
    assert pacer.due(SECOND) == []
    assert (pacer.exhausted, pacer.next_ns()) == (True, None)
    told = pacer_of(LoadSpec(concurrency=2), 0)
    told.stop()
    assert told.due(0) == []


@pytest.mark.parametrize("seconds", [1e-9, 0.001, 0.25, 30.0, 3600.0, 1e7])
def test_a_deadline_is_written_as_servers_read_it(seconds: float) -> None:
    assert timeout_seconds(_timeout(seconds)) == pytest.approx(seconds, rel=1e-6, abs=1e-9)


def test_headers_without_a_deadline_have_none() -> None:
    target = LoadEndpoint(host="::1", port=1, path="/a/b")
    assert b"grpc-timeout" not in dict(call_headers(target, None))
    assert dict(call_headers(target, 2.0))[b":path"] == b"/a/b"


def test_metadata_goes_with_every_call() -> None:
    target = LoadEndpoint(host="h", port=1, path="/a/b", headers=(("authorization", "Bearer x"),), tls=TlsPaths())
    headers = dict(call_headers(target, None))
    assert (headers[b"authorization"], headers[b":scheme"]) == (b"Bearer x", b"https")


@pytest.mark.parametrize("length", [1, 127, 128, 20_000])
def test_errors_in_a_stream_are_read_without_protobuf(length: int) -> None:
    text = "é" * (length // 2) + "x" * (length % 2)
    failed = pb.ModelStreamInferResponse(error_message=text)
    failed.infer_response.id = "7"
    assert _streamed_status(failed.SerializeToString()) == ("UNKNOWN", text)


def message(rows: int = 1, version: str = "1") -> bytes:
    request = pb.ModelInferRequest(model_name="mlp", model_version=version)
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 64])
    request.raw_input_contents.append(np.zeros((rows, 64), np.float16).tobytes())
    return request.SerializeToString()


def drive(
    place: tuple[str, int],
    spec: LoadSpec,
    *,
    messages: Sequence[bytes] = (b"",),
    models: Sequence[int] = (),
    streaming: bool = False,
) -> tuple[LoadStatistics, str | None]:
    """The whole tally, and why it ended early."""
    target = LoadEndpoint(host=place[0], port=place[1], path=STREAM if streaming else UNARY, streaming=streaming)
    driver = Driver(target, messages, models or [0] * len(messages), spec)
    driver.connect()
    windows: list[LoadStatistics] = []

    def tell(tally: LoadStatistics) -> bool:
        windows.append(tally)
        return True

    trouble = driver.run(tell)
    return windows[0].then(windows[1:]), trouble


def place_of(server: RunningServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
def test_sends_exactly_the_specified_requests(server: RunningServer, client: Client, streaming: bool) -> None:
    before = client.statistics("mlp", "1")[0].inference_count
    spec = LoadSpec(concurrency=4, requests=20)
    tally, trouble = drive(place_of(server), spec, messages=[message(1), message(3)], models=[0, 1], streaming=streaming)
    assert (tally.sent, tally.errors, trouble) == (20, Counter(), None)
    assert [latencies.total for latencies in tally.latencies] == [10, 10]
    assert client.statistics("mlp", "1")[0].inference_count - before == 10 * 1 + 10 * 3
    # Each of the four slots works through its share one by one.
    assert tally.latency.sum_ns <= 4 * tally.seconds * 1e9


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
def test_failures_are_counted_with_the_servers_messages(server: RunningServer, streaming: bool) -> None:
    messages = [message(), message(version="77")]
    tally, _ = drive(place_of(server), LoadSpec(concurrency=3, requests=9), messages=messages, streaming=streaming)
    assert (tally.latency.total, tally.failed) == (5, 4)
    (status,) = tally.errors
    assert status == ("UNKNOWN" if streaming else "NOT_FOUND")
    assert "77" in tally.messages[status]


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
def test_a_grpcio_server_can_be_loaded(repository: Path, streaming: bool) -> None:
    messages = [message(), message(version="77")]
    with running_server(lambda: load_repository(repository), GrpcioServer) as reference:
        tally, _ = drive(place_of(reference), LoadSpec(concurrency=4, requests=20), messages=messages, streaming=streaming)
    assert (tally.latency.total, tally.failed) == (10, 10)
    assert "77" in next(iter(tally.messages.values()))


def test_a_rate_is_kept_and_the_time_too(server: RunningServer) -> None:
    spec = LoadSpec(rate=200, arrivals="constant", seconds=0.2, window_s=0.05)
    tally, _ = drive(place_of(server), spec, messages=[message()])
    assert tally.sent == tally.latency.total == tally.lateness.total == 40
    assert tally.seconds >= 39 / 200


def test_large_messages_pass_the_flow_control_window(server: RunningServer, client: Client) -> None:
    request = pb.ModelInferRequest(model_name="echo_types")
    for tensor in client.model_metadata("echo_types").inputs:
        count = 500_000 if tensor.datatype == "FP32" else 1
        value = np.zeros((1, count), np.float32).tobytes() if tensor.datatype == "FP32" else b"\0" * 8
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1, count])
        sizes = {"BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "INT32": 4, "UINT32": 4, "BYTES": 4}
        size = sizes.get(tensor.datatype, 8)
        request.raw_input_contents.append(value if tensor.datatype == "FP32" else b"\0" * size)
    tally, _ = drive(place_of(server), LoadSpec(concurrency=2, requests=4), messages=[request.SerializeToString()])
    assert (tally.latency.total, tally.messages) == (4, {})


@pytest.mark.parametrize(("concurrency", "held_back"), [(6, 0), (7, 1), (10, 4)])
def test_only_requests_that_found_no_room_were_held_back(
    concurrency: int, held_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_CONNECTIONS", 2)
    with peer(lambda this, stream: this.answer(stream), {MAX_CONCURRENT_STREAMS: 3}) as place:
        tally, _ = drive(place, LoadSpec(concurrency=concurrency, requests=concurrency))
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
        tally, _ = drive(place, LoadSpec(rate=200, arrivals="constant", requests=20))
    assert tally.latency.total == 20
    assert tally.latency.max_ns >= 19 / 200 * 1e9
    assert tally.latency.percentiles_ms([50])[0] >= 9 / 200 * 1e3


def test_a_request_without_an_answer_ends_at_its_deadline() -> None:
    with peer(lambda this, stream: None) as place:
        tally, trouble = drive(place, LoadSpec(concurrency=2, requests=4, timeout_s=0.05))
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
        tally, _ = drive(place, LoadSpec(concurrency=5, requests=5))
    assert len({id(this) for this, _ in gathered[:5]}) == 5
    assert (tally.latency.total, tally.errors) == (1, Counter(UNAVAILABLE=4))


def test_a_closed_connection_fails_its_requests_and_is_replaced() -> None:
    def hang_up_at_the_first(this: Peer, stream: int) -> None:
        if len(this.asked) == 1:
            this.hang_up()
        else:
            this.answer(stream)

    with peer(hang_up_at_the_first) as place:
        tally, trouble = drive(place, LoadSpec(concurrency=1, requests=3))
    assert (tally.latency.total, tally.errors, trouble) == (2, Counter(UNAVAILABLE=1), None)
    assert "closed the connection" in tally.messages["UNAVAILABLE"] or "reset" in tally.messages["UNAVAILABLE"]


def one_each(this: Peer, stream: int) -> None:
    this.answer(stream)
    this.http2.send_goaway(0)


def test_goaway_moves_new_requests_to_another_connection() -> None:
    with peer(one_each) as place:
        tally, _ = drive(place, LoadSpec(concurrency=1, requests=4))
    assert (tally.latency.total, tally.failed) == (4, 0)


def test_closed_idle_connections_do_not_end_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GIVE_UP_S", 0.05)
    with peer(one_each) as place:
        tally, trouble = drive(place, LoadSpec(rate=5, arrivals="constant", requests=3, window_s=0.01))
    assert (tally.latency.total, tally.failed, trouble) == (3, 0, None)


def test_a_stopped_server_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(calls, "RETRY_S", 0.01)
    tally, trouble = drive(UNUSED, LoadSpec(concurrency=2, seconds=60))
    assert trouble == "connection refused"
    assert tally.errors == Counter(UNAVAILABLE=2)


def test_tls_to_a_plain_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GIVE_UP_S", 0.05)
    monkeypatch.setattr(calls, "RETRY_S", 0.01)
    with peer(lambda this, stream: this.answer(stream)) as place:
        target = LoadEndpoint(host=place[0], port=place[1], path=UNARY, tls=TlsPaths())
        driver = Driver(target, [b""], [0], LoadSpec(concurrency=1, requests=1))
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
        (
            [(b":status", b"200"), (b"grpc-status", b"0")],
            "INTERNAL",
            "the server ended the call with OK, but without a message",
        ),
    ],
    ids=["status", "unknown status", "plain HTTP", "no status", "no message"],
)
def test_invalid_answers_are_failures(headers: list[tuple[bytes, bytes]], status: str, text: str) -> None:
    with peer(lambda this, stream: this.refuse(stream, *headers)) as place:
        tally, _ = drive(place, LoadSpec(concurrency=1, requests=2))
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
        tally, _ = drive(place, LoadSpec(concurrency=1, requests=2))
    assert tally.errors == Counter({"INTERNAL": 2} if status else {})
    assert status is None or status in tally.messages["INTERNAL"]


@pytest.mark.parametrize("streaming", [False, True], ids=["unary", "streaming"])
@pytest.mark.parametrize(("code", "status"), [(0x7, "UNAVAILABLE"), (0xB, "RESOURCE_EXHAUSTED"), (0x2, "INTERNAL")])
def test_a_reset_call_has_the_status_that_grpc_gives_it(code: int, status: str, streaming: bool) -> None:
    with peer(lambda this, stream: this.http2.reset_stream(stream, code)) as place:
        tally, _ = drive(place, LoadSpec(concurrency=1, requests=2), streaming=streaming)
    assert tally.errors == Counter({status: 2})
    assert tally.messages[status] == f"the server reset the call (HTTP/2 error {code:#x})"


def test_stop_ends_the_sending() -> None:
    with peer(lambda this, stream: this.answer(stream)) as place:
        target = LoadEndpoint(host=place[0], port=place[1], path=UNARY)
        driver = Driver(target, [b""], [0], LoadSpec(concurrency=2, window_s=0.01))
        driver.connect()
        told: list[Any] = []

        def until_something_is_there(tally: LoadStatistics) -> bool:
            told.append(tally)
            return not any(one.latency.total for one in told)

        assert driver.run(until_something_is_there) is None
    assert sum(tally.latency.total for tally in told) == sum(tally.sent for tally in told) > 0
