"""What one client may take of a transport."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class TransportLimits:
    """Bounds that hold whatever a client does. The defaults suit a server that faces its own clients.

    Attributes:
        max_message_bytes: one request message that carries tensors or a model's files, decompressed.
        max_inflated_bytes: the same of one that comes compressed. It is inflated on the event loop, where nothing else happens
            meanwhile.
        max_small_message_bytes: one request message of any other method, decompressed.
        max_connections: open at the same time; more are refused. There may be fewer files (see serve/protocol/open_files.py).
        max_streams: calls in flight on one connection; clients wait with more.
        max_header_bytes: of one call's headers, decompressed; a call with more is refused. With twice as many the connection
            ends.
        max_refused: calls of one connection that are refused for that; after as many it takes no new calls. A connection that
            has shown no token is closed after as many that memory was too short for.
        stream_window_bytes: what a client may send on one call before it is read.
        connection_window_bytes: the same over all calls of a connection; less where many connections are open, and 64 KiB
            until the connection has shown a token, where tokens are asked for.
        max_held_bytes: of unfinished messages on one connection; beyond it only the oldest of them goes on, and by sixteen
            calls' windows beyond it, the others are refused.
        max_unsent_bytes: of answers of one streaming call; beyond it the call's answers wait.
        reset_burst: calls that a client may give up at once; a connection with more is closed. Clients whose deadlines pass
            give up all of their calls, so it is not few; each costs no more than the request did.
        resets_per_s: of these in the long run.
        handshake_s: seconds for a new connection to say its first words of HTTP/2.
        stall_s: seconds after which a request message that does not grow is given up, and a connection that does not read its
            answers.
        short_stall_s: the same of the answers of a connection that holds more than others, while memory is short.
        keepalive_s: silence after which a connection is asked whether it still lives.
        keepalive_timeout_s: seconds for the answer.
        max_age_s: after which a connection is told to go elsewhere; None never.
        max_age_grace_s: seconds that calls in flight get then.
        sweep_s: how often these times are looked at.
    """

    max_message_bytes: int = 2**31 - 1
    max_inflated_bytes: int = 64 * MIB
    max_small_message_bytes: int = 4 * MIB
    max_connections: int = 10_000
    max_streams: int = 1024
    max_header_bytes: int = 16 * 1024
    max_refused: int = 64
    stream_window_bytes: int = 4 * MIB
    connection_window_bytes: int = 16 * MIB
    max_held_bytes: int = 64 * MIB
    max_unsent_bytes: int = MIB
    reset_burst: int = 10_000
    resets_per_s: int = 2_000
    handshake_s: float = 10.0
    stall_s: float = 60.0
    short_stall_s: float = 5.0
    keepalive_s: float = 600.0
    keepalive_timeout_s: float = 20.0
    max_age_s: float | None = None
    max_age_grace_s: float = 30.0
    sweep_s: float = 1.0
