from __future__ import annotations

import json
from pathlib import Path

import grpc

from protos import inference_pb2 as pb
from serve.observability.options import AccessLog, ObserveOptions
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.observability.test_traces import attributes, named, spans_of
from tests.serve.running_server import MakeTransport, running_server

WAIT_S = 20.0


def test_a_client_that_has_gone_is_told_of(transport: MakeTransport, tmp_path: Path) -> None:
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
