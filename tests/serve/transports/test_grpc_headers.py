from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.errors import InvalidArgumentError
from serve.protocol.status import Status
from serve.transports.grpc_headers import refusal, timeout_seconds, trailers_of


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), (b"2H", 7200), (b"3M", 180), (b"4S", 4), (b"250m", 0.25), (b"99999999u", 99.999999), (b"5n", 5e-9)],
)
def test_timeouts(header: bytes | None, seconds: float | None) -> None:
    assert timeout_seconds(header) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("header", [b"", b"5", b"S", b"-1S", b"123456789S", b"1.5S", b"5s", b"\xff"])
def test_a_timeout_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="grpc-timeout is .*, expected digits and a unit, as in 250m"):
        timeout_seconds(header)


@given(st.integers(0, 16), st.text(max_size=300))
def test_every_text_travels_in_ascii(code: int, details: str) -> None:
    details = details.encode("utf-8", "replace").decode()
    trailers = dict(trailers_of(Status(code, details)))
    assert trailers[b"grpc-status"] == str(code).encode()
    assert all(0x20 <= byte < 0x7F for byte in trailers[b"grpc-message"])
    assert unquote(trailers[b"grpc-message"].decode()) == details


def test_a_long_text_does_not_cost_the_call_its_status() -> None:
    assert len(dict(trailers_of(Status(3, "x" * 100_000)))[b"grpc-message"]) < 5000


def test_trailers_of_a_status_go_along() -> None:
    assert (b"grpc-retry-pushback-ms", b"7") in trailers_of(Status(8, "full", (("grpc-retry-pushback-ms", "7"),)))
    assert (b"grpc-accept-encoding", b"identity,deflate,gzip") in trailers_of(Status(12, "no"))


def test_what_is_no_grpc_call_gets_a_plain_answer() -> None:
    call = {b":method": b"POST", b"content-type": b"application/grpc+proto"}
    assert refusal(call) is None
    assert (b":status", b"405") in (refusal({**call, b":method": b"GET"}) or [])
    assert (b":status", b"415") in (refusal({**call, b"content-type": b"text/html"}) or [])
