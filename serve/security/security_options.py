"""The security options of a server: TLS, tokens, the admin port, and limits of each client. All of them are off by default."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class SecurityError(Exception):
    """A security setting or one of its files cannot be used; the text names the file and says what to do."""


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """The files of an encrypted server. They may change while it runs.

    Attributes:
        certificate: PEM file with the server's certificate, followed by its chain.
        key: PEM file with the certificate's private key, without a pass phrase.
        client_authorities: PEM file with the authorities that sign clients' certificates; clients must show one then (mTLS).
            None asks clients for no certificate.
    """

    certificate: Path
    key: Path
    client_authorities: Path | None = None

    @property
    def files(self) -> list[Path]:
        given = (self.certificate, self.key, self.client_authorities)
        return [path for path in given if path is not None]


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Limits of one client: one token where tokens are required, otherwise one address.

    Attributes:
        requests_per_s: long-term rate limit; None is no limit.
        burst: most requests at once after a pause; None stands for the requests of one second, but at least one.
        max_concurrent: most inference requests in progress; None is no limit.
    """

    requests_per_s: float | None = None
    burst: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, kw_only=True)
class RestrictedGroup:
    """APIs that require a header with a certain value."""

    apis: tuple[str, ...]  # Triton's names of the APIs; see `restricted_apis`
    header: str  # name of the header, in lower case
    value: str  # the value that the header must have


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """The security options of a server.

    Attributes:
        tls: encrypts gRPC and HTTP; None leaves both plain.
        token_file: hashed bearer tokens, one a line (see `tokens`); None requires no token.
        admin_port: TCP port that alone serves the RPCs that change the server; 0 finds a free one, None has no such port.
        admin_socket: Unix socket in place of the admin port, which only the server's own user can open. At most one of the two.
        client_limits: limits of each client; None is no limit.
        grpc_restricted: APIs of gRPC that require a header, in addition to any token.
        http_restricted: APIs of HTTP that require a header.
        watch_s: seconds between two checks of the files.
    """

    tls: TlsOptions | None = None
    token_file: Path | None = None
    admin_port: int | None = None
    admin_socket: Path | None = None
    client_limits: ClientLimits | None = None
    grpc_restricted: tuple[RestrictedGroup, ...] = ()
    http_restricted: tuple[RestrictedGroup, ...] = ()
    watch_s: float = 1.0

    @property
    def files(self) -> list[Path]:
        of_tls = [] if self.tls is None else self.tls.files
        return of_tls if self.token_file is None else [*of_tls, self.token_file]

    def check(self) -> None:
        """Check that the settings fit together; the files are not read.

        Raises:
            SecurityError: two settings contradict each other, or a limit is not positive.
        """
        for groups in (self.grpc_restricted, self.http_restricted):
            names = [name for group in groups for name in group.apis]
            for name in names:
                if names.count(name) > 1:
                    raise SecurityError(f"the API {name!r} is restricted twice, expected it in one group")
        if self.admin_port is not None and self.admin_socket is not None:
            raise SecurityError("an admin port and an admin socket are both asked for; expected one of the two")
        limits = self.client_limits or ClientLimits()
        for name, value in vars(limits).items():
            if value is not None and not value > 0:
                raise SecurityError(f"the client limit {name} is {value:g}, expected more than 0; leave it out for no limit")
        if limits.burst is not None and limits.requests_per_s is None:
            raise SecurityError("the client limit burst means nothing without requests_per_s; give both")
