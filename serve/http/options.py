"""What the HTTP ports do and allow."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
# A process that was stopped, or whose machine slept, looks at its clock first and then at its sockets. Nobody's time is over
# before it has had this moment to read what has come, or to write what has been waiting.
MOMENT_S = 0.5


def memory_of(size: int) -> int:
    """Bytes of memory that so many bytes of bodies take: with what is copied on the way, and what the heap keeps."""
    return size + size // 2


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Bounds that hold whatever a client does.

    Attributes:
        max_body_bytes: of one request, as received.
        max_small_body_bytes: the same of one that carries neither tensors nor a model's files, decompressed too.
        max_inflated_bytes: of one that comes compressed, decompressed.
        max_header_bytes: of one request's line and headers.
        max_connections: open at the same time on one port; more are refused.
        header_s: seconds for a request's headers to arrive, counted from its first byte, or from the connection's start.
        stall_s: seconds after which a body that does not grow, an answer that is not read, or a client that goes on sending
            what was refused, is given up.
        short_stall_s: the same of the answers of a connection that holds more than others, while memory is short.
        keep_alive_s: seconds that a connection may stay open between two requests, or without the rest of one that is answered.
        inline_bytes: bodies above this size are decoded and encoded on a thread, so that other requests do not wait for them.
    """

    max_body_bytes: int = 256 * MIB
    max_small_body_bytes: int = 64 * 1024
    max_inflated_bytes: int = 64 * MIB
    max_header_bytes: int = 32 * 1024
    max_connections: int = 1000
    header_s: float = 10.0
    stall_s: float = 60.0
    short_stall_s: float = 5.0
    keep_alive_s: float = 75.0
    inline_bytes: int = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How to serve HTTP.

    Attributes:
        port: of the REST interface and the page; 0 finds a free one.
        metrics_port: of the metrics alone, without the rest; 0 finds a free one, None has none.
        page: whether there is a page for people at "/".
        allowed_hosts: names by which browsers may address this server, besides localhost, addresses and the machine's own name.
            Where some are given, or where the server listens on this machine alone, requests for other names are refused;
            elsewhere those of pages that would change something are (DNS rebinding).
        limits: what clients may take.
    """

    port: int = 8000
    metrics_port: int | None = 8002
    page: bool = True
    allowed_hosts: tuple[str, ...] = ()
    limits: HttpLimits = HttpLimits()
