"""Which requests are looked at more closely, and what is left of them."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from protos import inference_pb2 as pb
from serve.observability.options import AccessLog, ObserveOptions
from serve.transports.grpc_framing import frame
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, Serving
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.http2_peer import call_headers, peer

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def request(name: str = "") -> bytes:
    message = pb.ModelInferRequest(model_name="mlp", id=name, raw_input_contents=[bytes(128)])
    message.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    return message.SerializeToString()


def observing(folder: Path, every: int) -> ObserveOptions:
    return ObserveOptions(
        access_log=AccessLog.SAMPLED,
        access_log_file=folder / "access.log",
        access_log_every=every,
        trace_to=str(folder / "traces.json"),
        trace_rate=every,
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_as_many_as_asked_for_are_chosen_where_many_calls_begin_before_the_first_request(
    serving: Serving, tmp_path: Path
) -> None:
    with serving(observing(tmp_path, every=10)) as server, peer(server) as other:
        for _ in range(4):
            streams = [other.http2.send_request(call_headers()) for _ in range(25)]
            for stream in streams:  # after the headers of all
                other.http2.send_data(stream, frame(request()), end_stream=True)
            other.push()
            assert {other.status(stream) for stream in streams} == {(0, "")}
    assert lines(tmp_path / "access.log") == 10
    assert (tmp_path / "traces.json").read_text().count('"inference.GRPCInferenceService/ModelInfer"') == 10


def test_a_callers_own_trace_is_gone_on_with_between_those(serving: Serving, tmp_path: Path) -> None:
    with serving(observing(tmp_path, every=100)) as server, grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER)
        for metadata in ([], [("traceparent", TRACE.decode())], []):
            infer(request(), timeout=CLIENT_TIMEOUT_S, metadata=metadata)
    assert (tmp_path / "traces.json").read_text().count(
        '"0af7651916cd43dd8448eb211c80319c"'
    ) == 4  # request, queue, compute, link


def unary(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        infer = channel.unary_unary(INFER)
        for number in range(20):
            infer(request(str(number)), timeout=CLIENT_TIMEOUT_S)


def stream(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        asked = [request(str(number)) for number in range(20)]
        assert len(list(channel.stream_stream(STREAM)(iter(asked), timeout=CLIENT_TIMEOUT_S))) == 20


@pytest.mark.parametrize("every", [0, 1], ids=["by", "chosen"])
@pytest.mark.parametrize("load", [unary, stream])
def test_nothing_of_a_request_waits_for_the_garbage_collector(
    serving: Serving, tmp_path: Path, load: Callable[[RunningServer], None], every: int
) -> None:
    """Its message would wait too; and the collector took a fourth of a request's time when every logged one left a cycle."""
    observe = observing(tmp_path, every) if every else ObserveOptions()
    with serving(observe) as server:
        load(server)  # whatever the first requests make for good
        gc.collect()
        gc.disable()
        try:
            load(server)
            server.call(lambda: None)  # the turn of the loop in which the last answer left is over
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = Counter(type(thing).__name__ for thing in gc.garbage if str(type(thing).__module__).startswith("serve."))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert max(left.values(), default=0) <= 1, left  # what a stream leaves as a whole may wait
