"""Bodies that travel compressed: Content-Encoding of requests, Accept-Encoding for answers."""

from __future__ import annotations

import gzip
import zlib

from serve.engine.errors import UnsupportedError
from serve.protocol.messages import WINDOW_BITS, inflate

LEVEL = 1  # tensors hardly shrink further, and higher levels take several times as long
SMALLEST_WORTH_BYTES = 1024


def decompressed(body: bytes, coding: str, limit: int) -> bytes:
    """A request's body as it was before it was compressed.

    Args:
        body: as received.
        coding: the Content-Encoding; "" or "identity" is none.
        limit: bytes that it may have; no more than one beyond these are ever inflated.

    Raises:
        UnsupportedError: the coding is not known here.
        InvalidArgumentError: the body is not what the coding makes.
        MessageTooLargeError: it would be longer than the limit.
    """
    coding = coding.strip().lower()
    if coding in {"", "identity"}:
        return body
    if coding not in WINDOW_BITS:
        raise UnsupportedError(f"Content-Encoding {coding!r} is not known here; expected gzip, deflate or none")
    return inflate(body, coding, limit, what="the body", advice="send it uncompressed")


def accepted_coding(accept: str) -> str | None:
    """Which of the codings that are known here a client prefers; None where it wants none of them."""
    best, best_weight = None, 0.0
    for entry in accept.lower().split(","):
        name, _, parameter = entry.partition(";")
        weight = _weight(parameter)
        if name.strip() in WINDOW_BITS and weight > best_weight:
            best, best_weight = name.strip(), weight
    return best


def compressed(body: bytes, coding: str) -> bytes:
    """The body in a coding that `accepted_coding` gave."""
    return gzip.compress(body, LEVEL, mtime=0) if coding == "gzip" else zlib.compress(body, LEVEL)


def _weight(parameter: str) -> float:
    name, _, value = parameter.strip().partition("=")
    if name != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0
