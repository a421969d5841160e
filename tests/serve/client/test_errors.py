from __future__ import annotations

from typing import Any

import grpc
import pytest

from serve.client import errors
from serve.client.connection.rpc_errors import WRITE_FAILED, from_rpc_error
from serve.client.errors import InferenceClientError, Repeat


class FailedCall:
    """What grpc and grpc.aio raise, as far as it is looked at."""

    def __init__(self, code: str, details: str | None, trailers: Any = ()) -> None:
        self._code, self._details, self._trailers = grpc.StatusCode[code], details, trailers

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def translated(code: str, details: str | None, trailers: Any = ()) -> InferenceClientError:
    return from_rpc_error(FailedCall(code, details, trailers), method="ModelInfer", address="h:1", timeout_s=2.5)


@pytest.mark.parametrize(
    ("code", "details", "kind", "text"),
    [
        ("INVALID_ARGUMENT", "bad shape", errors.InvalidRequest, "bad shape"),
        ("NOT_FOUND", "no model", errors.ModelNotFound, "no model"),
        ("RESOURCE_EXHAUSTED", "queue full", errors.Overloaded, "queue full"),
        ("UNAVAILABLE", "the server is stopping", errors.ServerUnavailable, "the server is stopping"),
        ("DEADLINE_EXCEEDED", "expired in the queue", errors.DeadlineExceeded, "expired in the queue"),
        ("INTERNAL", "the model failed", InferenceClientError, "the model failed"),
        ("UNIMPLEMENTED", "no shared memory here", errors.Unsupported, "no shared memory here"),
        ("UNIMPLEMENTED", "Method not found!", errors.Unsupported, "the server at h:1 does not offer ModelInfer"),
        ("INTERNAL", None, InferenceClientError, "h:1 answered ModelInfer with INTERNAL and no explanation"),
        (
            "RESOURCE_EXHAUSTED",
            "Received message larger than max (9 vs. 4)",
            errors.InvalidRequest,
            r"the message is too big for the server at h:1: Received message larger than max \(9 vs. 4\)",
        ),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", errors.DeadlineExceeded, r"h:1 did not answer ModelInfer within 2.5 s; .*"),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused (111)",
            errors.ServerUnavailable,
            r"no server answers at h:1 \(connection refused\); start one with: halfserve serve PATH",
        ),
        (
            "UNAVAILABLE",
            "connections to all backends failing; last error: UNKNOWN: ipv4:1.2.3.4:1: Failed to connect: Connection refused",
            errors.ServerUnavailable,
            r"no server answers at h:1 \(connection refused\); start one with: halfserve serve PATH",
        ),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNAVAILABLE: Handshake read failed",
            errors.ServerUnavailable,
            r"the TLS handshake with h:1 failed; does the server ask for a client certificate\? \(.*\)",
        ),
        ("INTERNAL", "Internal error from Core", errors.ServerUnavailable, "h:1 closed the connection; is the server.*"),
        ("UNAVAILABLE", "DNS resolution failed for h:1", errors.ServerUnavailable, "no server answers at h:1; .*"),
        ("UNAVAILABLE", "Socket closed", errors.ServerUnavailable, "h:1 closed the connection; is the server still running.*"),
        (
            "UNAVAILABLE",
            "Trying to connect an http1.x server",
            errors.ServerUnavailable,
            "h:1 answers in HTTP/1, not gRPC; is it the HTTP port.*",
        ),
    ],
)
def test_a_status_becomes_an_exception(code: str, details: str | None, kind: type[Exception], text: str) -> None:
    error = translated(code, details)
    assert type(error) is kind
    assert error.code == ("UNAVAILABLE" if details == WRITE_FAILED else code)
    with pytest.raises(kind, match=f"^{text}$"):
        raise error


@pytest.mark.parametrize(
    ("details", "repeat"),
    [
        ("connections to all backends failing; last error: UNKNOWN: ipv4:1.2.3.4:1: Connection refused", Repeat.SAFE),
        ("connections to all backends failing; last error: UNAVAILABLE: ipv4:1.2.3.4:1: Socket closed", Repeat.SAFE),
        ("failed to connect to all addresses; last error: UNAVAILABLE: recvmsg:Connection reset by peer", Repeat.SAFE),
        ("Socket closed", Repeat.IF_IDEMPOTENT),
        ("recvmsg:Connection reset by peer", Repeat.IF_IDEMPOTENT),
    ],
)
def test_a_call_that_was_never_sent_may_be_made_again(details: str, repeat: Repeat) -> None:
    assert translated("UNAVAILABLE", details).repeat is repeat


@pytest.mark.parametrize(
    ("trailers", "seconds"),
    [
        ((("grpc-retry-pushback-ms", "1500"),), 1.5),
        ((("other", "1"), ("grpc-retry-pushback-ms", "0")), 0.0),
        ((("grpc-retry-pushback-ms", "-1"),), None),
        ((("grpc-retry-pushback-ms", "9" * 10),), 9_999_999.999),
        ((("grpc-retry-pushback-ms", "9" * 19),), None),
        ((("grpc-retry-pushback-ms", "9" * 400),), None),
        ((("grpc-retry-pushback-ms", "9" * 5000),), None),
        ((), None),
        (None, None),
    ],
)
def test_the_retry_hint(trailers: Any, seconds: float | None) -> None:
    assert translated("RESOURCE_EXHAUSTED", "full", trailers).retry_after_s == seconds


def test_a_hint_that_is_no_time_is_the_word_for_never() -> None:
    assert translated("UNAVAILABLE", "full", (("grpc-retry-pushback-ms", "9" * 400),)).repeat is Repeat.NO


def test_a_deadline_that_the_server_cannot_meet_is_no_reason_to_repeat() -> None:
    assert translated("DEADLINE_EXCEEDED", "the model's queue is too long").repeat is Repeat.NO


def test_every_error_can_be_caught_as_one() -> None:
    kinds = InferenceClientError.__subclasses__()
    assert len({kind.code for kind in kinds} | {InferenceClientError.code}) == len(kinds) + 1 == 10
