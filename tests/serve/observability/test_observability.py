"""Which requests are looked at more closely, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from math import gcd
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import FailedPreconditionError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.observability.access_log import AccessLogger
from halfserve.serve.observability.inference_record import Caller, InferenceRecord
from halfserve.serve.observability.observability import Observability
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions
from halfserve.serve.observability.observer import Observer
from halfserve.serve.observability.outbox import Outbox
from halfserve.serve.observability.trace_settings import TIMESTAMPS, TraceControl, TraceSettings
from halfserve.serve.observability.tracing import Tracer, TraceRecord
from halfserve.serve.transports.grpc_framing import frame
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, Serving
from tests.serve.observability.test_traces import attributes, named, spans_of
from tests.serve.running_server import WAIT_S, MakeTransport, RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import call_headers, peer

periods = st.integers(0, 12)
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def observe(options: ObserveOptions) -> Observability:
    return Observability(options, InferenceCore([]), str)


@pytest.mark.parametrize("log", AccessLog, ids=str)
async def test_an_observer_has_listeners_only_while_something_is_on(log: AccessLog, tmp_path: Path) -> None:
    observability = await observe(ObserveOptions(access_log=log, access_log_file=tmp_path / "access.log"))
    observer = observability.observer
    seen = [observer.log]
    for mode in ("off", "errors"):
        observability.update_logs({"access_log": mode})
        seen.append(observer.log)
    observability.close()
    seen.append(observer.log)
    assert [listener is None for listener in seen] == [log is AccessLog.OFF, True, False, True]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (
            ObserveOptions(access_log_file=Path("/no/such/access.log")),
            "the access log cannot be written to /no/such/access.log: /no/such is not a folder",
        ),
        (
            ObserveOptions(trace_to="/no/such/traces.json"),
            "traces cannot be written to /no/such/traces.json: /no/such is not a folder",
        ),
        (ObserveOptions(trace_to="triton:"), "traces cannot be written to .: it is a folder, expected a file"),
    ],
    ids=["access-log", "traces", "no-file"],
)
def test_an_unwritable_destination_fails_at_the_start(options: ObserveOptions, what: str) -> None:
    with pytest.raises(FailedPreconditionError) as refused:
        asyncio.run(observe(options))
    assert str(refused.value) == f"{what}; choose another file"


def test_what_is_not_asked_for_is_not_imported() -> None:
    optional = ("prometheus_client", "opentelemetry", "pynvml")
    program = f"import sys, halfserve.serve.server; print([m for m in {optional} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "[]\n"


async def chosen(model: Model, log_every: int, trace_every: int, requests: int) -> tuple[list[int], list[int]]:
    """The numbers of the requests that are chosen for the log and for traces."""
    lines: Outbox[str] = Outbox(lambda _: None, name="lines")
    traces: Outbox[TraceRecord] = Outbox(lambda _: None, name="traces")
    log = AccessLogger(lines) if log_every else None
    tracer = Tracer(TraceControl(TraceSettings(levels=(TIMESTAMPS,))), traces) if trace_every else None
    observer = Observer(InferenceCore([]), str)
    observer.listen(log, log_every, tracer, trace_every)
    logged: list[int] = []
    traced: list[int] = []
    for number in range(1, requests + 1):
        record = InferenceRecord()
        record.caller, record.model, record.is_logged, record.trace = Caller("", {}), model, False, None
        observer.until -= 1
        if not observer.until:
            observer.select(record)
        logged += [number] if record.is_logged else []
        traced += [number] if record.trace is not None else []
    lines.close(1)
    traces.close(1)
    return logged, traced


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    held = held_model(HeldBackend(), "mlp")
    yield held
    for worker in held.batcher.instances:
        worker.stop()


@given(periods, periods)
def test_one_countdown_serves_two_periods(model: Model, log_every: int, trace_every: int) -> None:
    requests = 3 * (log_every * trace_every // gcd(log_every, trace_every) if log_every and trace_every else 12)
    logged, traced = asyncio.run(chosen(model, log_every, trace_every, requests))
    assert logged == [n for n in range(1, requests + 1) if log_every and n % log_every == 0]
    assert traced == [n for n in range(1, requests + 1) if trace_every and n % trace_every == 0]


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


@pytest.mark.long
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
            left = Counter(
                type(thing).__name__ for thing in gc.garbage if str(type(thing).__module__).startswith("halfserve.serve.")
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert max(left.values(), default=0) <= 1, left  # what a stream leaves as a whole may wait


def test_a_disconnected_client_is_logged(transport: MakeTransport, tmp_path: Path) -> None:
    log, traces = tmp_path / "access.log", tmp_path / "traces.json"
    backend = HeldBackend(held=True)
    options = ObserveOptions(access_log=AccessLog.ERRORS, access_log_file=log, trace_to=str(traces), trace_rate=1)
    request = pb.ModelInferRequest(model_name="held", id="gone", raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    with running_server(lambda: [held_model(backend)], transport, observe=options) as server:
        with grpc.insecure_channel(server.address) as channel:
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            waiting = infer.future(request.SerializeToString(), timeout=WAIT_S)
            assert backend.entered.wait(WAIT_S)
            waiting.cancel()
            # Another call on the same connection is answered after the server has seen the end of this one.
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=WAIT_S)
        backend.release.set()
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["id"], line["status"], line["model"]) == ("gone", "CANCELLED", "held")
    call = named(spans_of(traces), "inference.GRPCInferenceService/ModelInfer")
    told = attributes(call)
    assert (told["halfserve.request_id"], told["rpc.response.status_code"]) == ("gone", "CANCELLED")
