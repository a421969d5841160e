"""gRPC's words in HTTP/2 headers and trailers.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote_to_bytes

from serve.engine.errors import InvalidArgumentError
from serve.protocol.status import CUT, Status
from serve.transports.grpc_framing import ACCEPTED_ENCODINGS

Headers = list[tuple[bytes, bytes]]

RESPONSE: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
OK_TRAILERS: Headers = [(b"grpc-status", b"0")]

# With the name of an encoding, which our messages do not have another of, and parameters.
CONTENT_TYPE = re.compile(rb"application/grpc(\+[\w.-]+)?[ \t]*(;.*)?", re.IGNORECASE)
TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
UNIT_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
# Printable ASCII but for the percent sign: what grpc-message may hold as it is.
PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
# Bytes on the wire. Clients refuse header lists over 8 KiB: a long text must not cost the call its status.
MAX_DETAILS = 4096
FIELD_BYTES = 32  # that HTTP/2 counts for a header, beyond its name and value


def timeout_seconds(value: bytes | None) -> float | None:
    """The seconds that a `grpc-timeout` header leaves; None where there is none.

    Raises:
        InvalidArgumentError: it is not a number of at most 8 digits and a unit.
    """
    if value is None:
        return None
    match = TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidArgumentError(
            f"grpc-timeout is {value.decode('ascii', 'replace')!r}, expected digits and a unit, as in 250m"
        )
    return int(match[1]) * UNIT_SECONDS[match[2]]


def refusal(headers: Mapping[bytes, bytes]) -> Headers | None:
    """The plain HTTP answer to what is no gRPC call; None for one that is."""
    if headers.get(b":method") != b"POST":
        return [(b":status", b"405"), (b"allow", b"POST")]
    if CONTENT_TYPE.fullmatch(headers.get(b"content-type", b"")) is None:
        return [(b":status", b"415"), (b"accept", b"application/grpc")]
    return None


def oversize(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> Headers | None:
    """The answer to a call whose headers are too many bytes; None for one with fewer."""
    size = sum(len(name) + len(value) + FIELD_BYTES for name, value in headers)
    if size <= max_bytes:
        return None
    text = f"the call's headers take {size} bytes, expected at most {max_bytes}; send less metadata"
    return RESPONSE + trailers_of(Status(RESOURCE_EXHAUSTED, text))


def cut_details(text: str) -> str:
    """A status's text, cut after a whole character where it would be over MAX_DETAILS on the wire."""
    encoded = _encoded(text)
    if len(encoded) <= MAX_DETAILS:
        return text
    kept = encoded[: MAX_DETAILS - len(CUT)]
    start = kept.find("%", len(kept) - 2)  # of a byte that is not whole
    return unquote_to_bytes(kept if start < 0 else kept[:start]).decode(errors="ignore") + CUT


def trailers_of(status: Status) -> Headers:
    """A status as trailers."""
    text = _encoded(cut_details(status.details))
    trailers = [(b"grpc-status", b"%d" % status.code), (b"grpc-message", text.encode("ascii"))]
    if status.code == UNIMPLEMENTED:
        trailers.append((b"grpc-accept-encoding", ACCEPTED_ENCODINGS))
    return trailers + [(name.encode("ascii"), value.encode("ascii")) for name, value in status.trailers]


def _encoded(text: str) -> str:
    return quote(text, safe=PLAIN)


RESOURCE_EXHAUSTED, UNIMPLEMENTED = 8, 12
