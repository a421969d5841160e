"""A gRPC server that answers as it is told: what no well-behaved server does can be seen by a client all the same."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb


@dataclass(frozen=True)
class Failure:
    """A status to answer with."""

    code: str
    details: str = ""
    trailers: tuple[tuple[str, str], ...] = ()


ENDED = Failure("OK")  # in a stream's script: the stream ends here, whatever was asked


class ScriptedServer(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Each method takes its answers from `answers[method]` in turn and then keeps giving the last one.

    Attributes:
        address: "127.0.0.1:port".
        answers: method -> messages, bytes in their place, and failures; a method that is not there is unimplemented.
        calls: (method, request bytes, seconds that the client allows) in the order of arrival.
        headers: the metadata of the last call.
        endless: whether a stream whose requests are answered is left open until `release`.
        cancelled: set when a client has given up a call that waits for `release`.
        release: calls of methods in `held` wait for it.
    """

    def __init__(self, credentials: Any = None, *, port: int = 0, answers: dict[str, list[Any]] | None = None) -> None:
        self.answers: dict[str, list[Message | bytes | Failure]] = {**(answers or {})}
        self.calls: list[tuple[str, bytes, float | None]] = []
        self.held: set[str] = set()
        self.arrived, self.cancelled, self.release = threading.Event(), threading.Event(), threading.Event()
        self.endless = False
        self.headers: dict[str, Any] = {}
        self._server = grpc.server(ThreadPoolExecutor(4), handlers=[self])
        self.address = f"127.0.0.1:{self._listen(credentials, port)}"
        self._server.start()

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method not in self.answers:
            return None
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._answer_stream)
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._answer(method, request, context))

    def serve_model(self, datatype: str = "FP32") -> None:
        """Answer ModelMetadata for a model "m" with one input "x" [-1, 2]."""
        metadata = pb.ModelMetadataResponse(name="m", versions=["1"])
        metadata.inputs.add(name="x", datatype=datatype, shape=[-1, 2])
        self.answers["ModelMetadata"] = [metadata]

    def count(self, method: str) -> int:
        return sum(called == method for called, _, _ in self.calls)

    def stop(self) -> None:
        self.release.set()
        self._server.stop(0).wait()

    def _listen(self, credentials: Any, port: int) -> int:
        bound: int = (
            self._server.add_insecure_port(f"127.0.0.1:{port}")
            if credentials is None
            else self._server.add_secure_port(f"127.0.0.1:{port}", credentials)
        )
        return bound

    def _answer_stream(self, requests: Any, context: Any) -> Any:
        """One answer of the script for each request; the script's last one, if it is a failure, ends the call."""
        for request in requests:
            if self.answers["ModelStreamInfer"][0] == ENDED:
                return
            yield self._answer("ModelStreamInfer", request, context)
        if self.endless:
            self._notice_the_end(context)
            self.arrived.set()
            self.release.wait(60)

    def _notice_the_end(self, context: Any) -> None:
        if not context.add_callback(self.cancelled.set):  # the client has given up already
            self.cancelled.set()

    def _answer(self, method: str, request: bytes, context: Any) -> bytes:
        self.headers = dict(context.invocation_metadata())
        self.calls.append((method, request, context.time_remaining()))
        if method in self.held:
            self._notice_the_end(context)
            self.arrived.set()
            self.release.wait(60)
        script = self.answers[method]
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, Failure):
            context.set_trailing_metadata(answer.trailers)
            context.abort(getattr(grpc.StatusCode, answer.code), answer.details)
        assert isinstance(answer, Message | bytes)
        return answer if isinstance(answer, bytes) else answer.SerializeToString()
