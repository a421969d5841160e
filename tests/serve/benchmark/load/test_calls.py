from __future__ import annotations

import pytest

from protos import inference_pb2 as pb
from serve.benchmark.load.calls import _streamed_status, _timeout, call_headers, framed
from serve.benchmark.load.order import Target, TlsFiles
from serve.transports.grpc_framing import timeout_seconds


@pytest.mark.parametrize("seconds", [1e-9, 0.001, 0.25, 30.0, 3600.0, 1e7])
def test_a_deadline_is_written_as_servers_read_it(seconds: float) -> None:
    assert timeout_seconds(_timeout(seconds)) == pytest.approx(seconds, rel=1e-6, abs=1e-9)


def test_headers_without_a_deadline_have_none() -> None:
    target = Target(host="::1", port=1, path="/a/b")
    assert b"grpc-timeout" not in dict(call_headers(target, None))
    assert dict(call_headers(target, 2.0))[b":path"] == b"/a/b"


def test_metadata_goes_with_every_call() -> None:
    target = Target(host="h", port=1, path="/a/b", headers=(("authorization", "Bearer x"),), tls=TlsFiles())
    headers = dict(call_headers(target, None))
    assert (headers[b"authorization"], headers[b":scheme"]) == (b"Bearer x", b"https")


@pytest.mark.parametrize("length", [1, 127, 128, 20_000])
def test_errors_in_a_stream_are_read_without_protobuf(length: int) -> None:
    text = "é" * (length // 2) + "x" * (length % 2)
    failed = pb.ModelStreamInferResponse(error_message=text)
    failed.infer_response.id = "7"
    assert _streamed_status(failed.SerializeToString()) == ("UNKNOWN", text)


def test_answers_in_a_stream_are_successes() -> None:
    answer = pb.ModelStreamInferResponse()
    answer.infer_response.model_name = "mlp"
    assert _streamed_status(answer.SerializeToString()) == ("OK", "")


def test_a_message_is_framed_as_grpc_does() -> None:
    assert framed(b"abc") == b"\0\0\0\0\x03abc"
