"""Headers of a call that become parameters of its inference requests, as Triton's --grpc-header-forward-pattern makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.protocol.codec import RESERVED
from halfserve.serve.protocol.inference import Cancel, ManyReplies, Reply, Watch, WatchableInference

CASE_SENSITIVE = "(?-i)"  # Triton's spelling at a pattern's start; Python's syntax allows it only with a group
# The transport's own headers, which Triton does not show as metadata either, and parameters that this server would obey.
NEVER = re.compile(rf":.*|grpc-.*|te|content-type|{RESERVED.pattern}")


class HeaderPattern:
    """Selects headers by their names, with a regular expression that any part of a name may match."""

    def __init__(self, text: str) -> None:
        """Compile a pattern, which ignores case unless it begins with "(?-i)".

        Raises:
            ValueError: the text is not a regular expression; the message gives the reason.
        """
        pattern = text.removeprefix(CASE_SENSITIVE)
        try:
            self._pattern = re.compile(pattern, 0 if pattern != text else re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression ({error}); expected one such as 'x-tenant.*'") from None

    def forwarding(self, inference: WatchableInference, headers: Mapping[bytes, bytes]) -> WatchableInference:
        """Return the entry for requests with these headers, names in lower case; the given entry if no header is selected."""
        parameters = ModelInferRequest()
        for key, value in headers.items():
            name = key.decode("latin-1")
            if self._pattern.search(name) and not NEVER.fullmatch(name):
                parameters.parameters[name].string_param = value.decode("latin-1")
        serialized = parameters.SerializeToString(deterministic=True)
        return ForwardingInference(inference, serialized) if serialized else inference


@dataclass(frozen=True, kw_only=True)
class ForwardedHeaders:
    """Patterns that select the headers that become parameters; None selects none.

    Attributes:
        grpc: applies to gRPC calls.
        http: applies to HTTP requests.
    """

    grpc: HeaderPattern | None = None
    http: HeaderPattern | None = None


class ForwardingInference:
    """Entry that adds parameters to each request; they replace the client's own ones of the same names."""

    __slots__ = ("_inference", "_parameters")

    def __init__(self, inference: WatchableInference, parameters: bytes) -> None:
        """`parameters`: a serialized ModelInferRequest that contains only the parameters to add."""
        self._inference = inference
        self._parameters = parameters

    def infer(
        self,
        data: bytes | memoryview,
        time_left_s: float | None,
        reply: Reply,
        watch: Watch | None = None,
        *,
        many: ManyReplies | None = None,
    ) -> Cancel:
        # protobuf merges concatenated messages
        return self._inference.infer(b"".join((data, self._parameters)), time_left_s, reply, watch, many=many)

    def failed(self, data: bytes, error: Exception) -> None:
        self._inference.failed(data, error)

    def gone(self, data: bytes) -> None:
        self._inference.gone(data)
