"""Calls with wrong gRPC framing, compression or headers, and unreadable messages for other methods."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError, Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.benchmark.load.calls import framed
from tests.serve.faults.exchange import INFER_PATH, Headers, call_headers
from tests.serve.faults.malforming.case import INFER_HEADERS, Case, infer_case, refused, turned_away
from tests.serve.faults.malforming.interfaces import good_request

Random = random.Random
OK, INVALID, NOT_FOUND, EXHAUSTED, UNSUPPORTED, INTERNAL = 0, 3, 5, 8, 12, 13
SERVICE = "/inference.GRPCInferenceService"
# Methods that name a model; each must refuse other messages than its own.
METHODS: dict[str, type[Message]] = {
    "ModelReady": pb.ModelReadyRequest,
    "ModelMetadata": pb.ModelMetadataRequest,
    "ModelConfig": pb.ModelConfigRequest,
    "ModelStatistics": pb.ModelStatisticsRequest,
}
TIMEOUTS = (b"", b"1", b"m", b"-1S", b"1.5S", b"123456789S", b"1 S", b"1s", b"1M2S", b"\xc2\xb2S")
PATHS = ("/", "/inference.GRPCInferenceService/", f"{SERVICE}/ModelInfe", f"{SERVICE}/ModelInfer/", "/x.Y/Z", "//", "/%2e%2e")


def truncated_frame(chance: Random) -> Case:
    """The call ends before its message does: within the prefix, or within the message."""
    data = framed(good_request(chance).SerializeToString())
    end = chance.choice([chance.randint(1, 4), chance.randrange(5, len(data))])
    return refused("truncated frame", data[:end], INVALID)


def second_message(chance: Random) -> Case:
    """More data than the single message that the method takes."""
    data = framed(good_request(chance).SerializeToString())
    more = chance.choice([data, data[:3], framed(b""), chance.randbytes(9)])
    # Random bytes may announce a message over the size limit.
    return refused("second message", data + more, INVALID, EXHAUSTED, UNSUPPORTED)


def no_message(_: Random) -> Case:
    return refused("no message", b"", INVALID)


def too_long(chance: Random) -> Case:
    """A prefix that announces more than the size limit; it must be refused before the message arrives."""
    length = chance.choice([2**31, 2**32 - 1, 2**31 + 7])
    data = b"\0" + length.to_bytes(4, "big") + chance.randbytes(chance.choice([0, 100]))
    return refused("too long", data, EXHAUSTED, end=False)


def compression_flag(chance: Random) -> Case:
    """A compression flag that contradicts the call's encoding, or is invalid."""
    message = good_request(chance).SerializeToString()
    flag = chance.choice([1, 2, 0x80, 255])
    extra = [] if flag == 1 else chance.choice([[], [(b"grpc-encoding", b"gzip")]])
    body = _gzipped(message) if extra else message
    data = bytes([flag]) + len(body).to_bytes(4, "big") + body
    return refused("compression flag", data, INVALID, INTERNAL, headers=call_headers(INFER_PATH, *extra))


def bad_compression(chance: Random) -> Case:
    """Compressed data that is invalid, cut off, or in an unknown encoding."""
    whole: dict[bytes, Callable[[bytes], bytes]] = {b"gzip": _gzipped, b"deflate": zlib.compress}
    encoding = chance.choice([b"gzip", b"deflate", b"snappy", b"br", b""])
    body = whole.get(encoding, zlib.compress)(good_request(chance).SerializeToString())
    body = chance.choice([body[: chance.randrange(1, len(body) - 1)], chance.randbytes(30), b""])
    codes = (INVALID,) if encoding in whole else (INVALID, UNSUPPORTED)
    headers = call_headers(INFER_PATH, (b"grpc-encoding", encoding))
    return refused("bad compression", b"\1" + len(body).to_bytes(4, "big") + body, *codes, headers=headers)


def bad_timeout(chance: Random) -> Case:
    headers = call_headers(INFER_PATH, (b"grpc-timeout", chance.choice(TIMEOUTS)))
    return refused("bad timeout", framed(good_request(chance).SerializeToString()), INVALID, headers=headers)


def no_method(chance: Random) -> Case:
    headers = call_headers(chance.choice(PATHS))
    return refused("no method", framed(chance.randbytes(chance.randrange(40))), UNSUPPORTED, headers=headers)


def no_grpc(chance: Random) -> Case:
    """HTTP/2 without gRPC, for which HTTP statuses are right."""
    without, status = chance.choice([((b":method", b"GET"), 405), ((b"content-type", b"text/html"), 415), ((b"", b""), 415)])
    headers = (
        _replaced(INFER_HEADERS, without) if without[0] else [pair for pair in INFER_HEADERS if pair[0] != b"content-type"]
    )
    return turned_away("no gRPC", framed(good_request(chance).SerializeToString()), status, headers)


def odd_headers(chance: Random) -> Case:
    """Allowed headers without a meaning here: the call must be answered as without them."""
    case = infer_case("odd headers", good_request(chance).SerializeToString())
    extra = [(b"x-%d" % number, chance.choice([b"", b"\xff\xfe", b"a" * 500])) for number in range(chance.randrange(1, 20))]
    return Case(case.kind, case.data, case.check, call_headers(INFER_PATH, *extra))


def other_methods(chance: Random) -> Case:
    """Random bytes, or an unknown model, for methods that describe models."""
    name, message = chance.choice(list(METHODS.items()))
    data = chance.choice([chance.randbytes(chance.randrange(1, 30)), message(name="nobody\0").SerializeToString()])
    return refused("other methods", framed(data), *_codes(message, data), headers=call_headers(f"{SERVICE}/{name}"))


def _codes(kind: type[Message], data: bytes) -> Sequence[int]:
    """Statuses that are right for a message to one of `METHODS`."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        return (INVALID,)
    name = getattr(message, "name")  # noqa: B009  (the four have no common class that declares it)
    version = getattr(message, "version")  # noqa: B009  (see above)
    if not name and kind is pb.ModelStatisticsRequest:  # an empty name means all models
        return (OK,) if not version else (OK, INVALID, NOT_FOUND)
    absent = OK if kind is pb.ModelReadyRequest else NOT_FOUND  # an unknown model is not ready
    return (absent,) if not version else (absent, INVALID)


def _gzipped(message: bytes) -> bytes:
    return gzip.compress(message, 1, mtime=0)


def _replaced(headers: Headers, pair: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [pair if name == pair[0] else (name, value) for name, value in headers]


MAKERS: tuple[Callable[[Random], Case], ...] = (
    truncated_frame,
    second_message,
    no_message,
    too_long,
    compression_flag,
    bad_compression,
    bad_timeout,
    no_method,
    no_grpc,
    odd_headers,
    other_methods,
)
