"""Ports and limits of HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

MIB = 2**20
# After SIGCONT or a sleep of the machine, timers fire before sockets are read: a time limit is over only after this moment,
# in which bytes that have arrived are read, and waiting ones are written.
MOMENT_S = 0.5


def memory_of(size: int) -> int:
    """Return the bytes of memory that `size` bytes of a body take, with the copies and what the heap keeps between them.

    Measured with `python -m benchmarks.attacks unread_rest_answers`, two runs at a time on 2 cores: the process grows by 0.7 to
    0.95 times what is counted so. With 5/2 it grew by 1.1 to 1.4 times, and on 3 cores by 1.5.
    """
    return 7 * size // 2


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    max_body_bytes: int = 256 * MIB  # size limit of one request, as received
    # Size limit of a request without tensors or model files, as received and decompressed.
    max_small_body_bytes: int = 64 * 1024
    max_text_body_bytes: int = 2 * MIB  # size limit of a request whose texts are tokenized, as received and decompressed
    max_inflated_bytes: int = 64 * MIB  # size limit of a compressed request, decompressed
    max_header_bytes: int = 32 * 1024  # size limit of one request's line and headers
    max_connections: int = 1000  # open at the same time on one port; more are refused
    # Seconds for a request's headers to arrive, counted from its first byte, or from the connection's start.
    header_s: float = 10.0
    # Seconds without progress after which a body, an unread answer, or a client that still sends a refused body is given up.
    stall_s: float = 60.0
    short_stall_s: float = 5.0  # the same for answers of a connection that holds more memory than others, while memory is short
    # Seconds that a connection may stay open between two requests, or with an answered request incomplete.
    keep_alive_s: float = 75.0
    # Larger bodies are decoded and encoded on a thread, so that other requests do not wait for them.
    inline_bytes: int = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    port: int | None = 8000  # TCP port of the REST interface and the page; 0 for a free one, None for no such port
    metrics_port: int | None = 8002  # TCP port of the metrics alone; 0 for a free one, None for no such port
    page: bool = True  # whether the page for people is served at "/"
    # Names by which browsers may address this server, besides localhost, addresses and the machine's own name. If some are
    # given, or if the server listens on this machine alone, requests for other names are refused; otherwise only pages'
    # requests that change something are (DNS rebinding).
    allowed_hosts: tuple[str, ...] = ()
    # Origins that may send inference requests (CORS), such as "https://app.example"; "*" allows all.
    allowed_origins: tuple[str, ...] = ()
    limits: HttpLimits = HttpLimits()  # limits of each client


def checked_origin(text: str) -> str:
    """Return an origin as browsers write it, or "*". Raises ValueError: it is neither."""
    if text == "*":
        return text
    expected = "expected 'https://NAME', 'http://NAME:PORT', or '*' for all, without a path"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"{text!r} is no origin; {expected}") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname or "*" in parts.hostname:
        raise ValueError(f"{text!r} is no origin; {expected}")
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = {"http": 80, "https": 443}[parts.scheme]
    origin = f"{parts.scheme}://{name}" + ("" if port in (None, usual) else f":{port}")
    if text.lower() not in {origin, f"{origin}/", f"{origin}:{usual}"}:
        raise ValueError(f"{text!r} is no origin; {expected}")
    return origin
