"""How a server is guarded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The files of an encrypted server. They may change while it runs.

    Attributes:
        certificate: PEM file with the server's certificate, and after it those that lead to its authority.
        key: PEM file with the certificate's private key, without a pass phrase.
        client_authorities: PEM file with the certificates that may have signed a client's; clients must show one then (mTLS).
            None asks clients for no certificate.
    """

    certificate: Path
    key: Path
    client_authorities: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """What one client may take: one token where there are tokens, one address where there are none.

    Attributes:
        requests_per_s: in the long run; None sets no bound.
        burst: requests at once after a pause; None stands for one second's worth, and at least one.
        max_concurrent: inference requests in progress; None sets no bound.
    """

    requests_per_s: float | None = None
    burst: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """How a server is guarded. All of it is off unless asked for.

    Attributes:
        tls: encrypts gRPC and HTTP; None leaves both plain.
        token_file: hashed bearer tokens, one a line (see `token_file`); None lets anybody in.
        admin_port: where the RPCs that change the server are served alone; 0 finds a free one, None has no such port.
        admin_socket: the same as a Unix socket that only the server's own user can open. One of the two at most.
        client_limits: what one client may take; None sets no bounds.
        watch_s: seconds between two looks at the files.
    """

    tls: TlsOptions | None = None
    token_file: Path | None = None
    admin_port: int | None = None
    admin_socket: Path | None = None
    client_limits: ClientLimits | None = None
    watch_s: float = 1.0
