from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.engine.errors import InvalidArgumentError
from serve.protocol.status import CUT, Status
from serve.transports.grpc_headers import MAX_DETAILS, cut_details, refusal, timeout_seconds, trailers_of


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


@given(st.text(max_size=3), st.sampled_from(["x", "é", "€", "😀", "%", "a😀é"]))
def test_a_long_text_is_cut_by_what_it_takes_on_the_wire(start: str, unit: str) -> None:
    details = start.encode("utf-8", "replace").decode() + unit * 5000
    sent = dict(trailers_of(Status(3, details)))[b"grpc-message"]
    assert MAX_DETAILS - 12 < len(sent) <= MAX_DETAILS
    text = unquote(sent.decode(), errors="strict")
    assert text.endswith(CUT)
    assert details.startswith(text.removesuffix(CUT))


def test_a_text_that_just_fits_is_whole() -> None:
    assert cut_details("x" * MAX_DETAILS) == "x" * MAX_DETAILS
    assert cut_details("x" * (MAX_DETAILS + 1)) == "x" * (MAX_DETAILS - len(CUT)) + CUT


def test_trailers_of_a_status_go_along() -> None:
    assert (b"grpc-retry-pushback-ms", b"7") in trailers_of(Status(8, "full", (("grpc-retry-pushback-ms", "7"),)))
    assert (b"grpc-accept-encoding", b"identity,deflate,gzip") in trailers_of(Status(12, "no"))


def test_what_is_no_grpc_call_gets_a_plain_answer() -> None:
    call = {b":method": b"POST", b"content-type": b"application/grpc+proto"}
    assert refusal(call) is None
    assert (b":status", b"405") in (refusal({**call, b":method": b"GET"}) or [])


@pytest.mark.parametrize(
    "value", ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8", "Application/gRPC"]
)
def test_content_types_of_grpc(value: str) -> None:
    assert refusal({b":method": b"POST", b"content-type": value.encode()}) is None


@pytest.mark.parametrize("value", ["", "text/html", "application/grpcfoo", "application/grpc-web", "application/grpc+", "grpc"])
def test_what_is_of_no_content_type_of_grpc_is_refused(value: str) -> None:
    assert (b":status", b"415") in (refusal({b":method": b"POST", b"content-type": value.encode()}) or [])
