"""Calls by hand to the nghttp2 server."""

from __future__ import annotations

from collections.abc import Callable

from protos import inference_pb2 as pb
from serve.transports.grpc_framing import frame
from tests.serve.running_server import RunningServer
from tests.serve.transports.nghttp2.http2_peer import call_headers, peer

SERVER_LIVE = b"/inference.GRPCInferenceService/ServerLive"
INFER_STREAM = b"/inference.GRPCInferenceService/ModelStreamInfer"
INITIAL_WINDOW_SIZE = 4
Limited = Callable[..., RunningServer]


def mlp_request(rows: int = 1) -> bytes:
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(128 * rows)])
    request.inputs.add(name="x", datatype="FP16", shape=[rows, 64])
    return request.SerializeToString()


def serves(server: RunningServer) -> bool:
    with peer(server) as other:
        stream = other.http2.send_request(call_headers())
        other.http2.send_data(stream, frame(mlp_request()), end_stream=True)
        other.push()
        return other.status(stream) == (0, "") and len(pb.ModelInferResponse.FromString(other.body(stream)[5:]).outputs) == 1
