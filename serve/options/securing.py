"""Options of TLS, tokens, the admin port and the limits of each client."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from halfserve.serve.model_control.control_options import ControlOptions
from halfserve.serve.options.as_triton import AsTriton
from halfserve.serve.security.security_options import ClientLimits, SecurityOptions, TlsOptions

_security = partial(typer.Option, rich_help_panel="Security")


@dataclass(frozen=True, kw_only=True)
class Securing:
    """Options of who may call a server, and how often."""

    tls_cert: Annotated[
        Path | None, _security(help="PEM file of the server's certificate chain; turns TLS on, for REST too.")
    ] = None
    tls_key: Annotated[Path | None, _security(help="PEM file of the certificate's private key.")] = None
    tls_client_ca: Annotated[
        Path | None,
        _security(help="PEM file of the authorities that sign clients' certificates; other clients are refused (mTLS)."),
    ] = TlsOptions.client_authorities
    token_file: Annotated[
        Path | None,
        _security(help="File that `halfserve token --add-to` writes; clients without one of its tokens are refused."),
    ] = SecurityOptions.token_file
    certificate_key: Annotated[
        Path | None,
        _security(
            help="PEM file of an Ed25519 public key: certificates of models have to be signed with its private key, as "
            "`halfserve export --certificate-key` does."
        ),
    ] = ControlOptions.certificate_key
    admin_port: Annotated[
        int | None,
        _security(min=0, max=65535, help="Port for loading, unloading and settings, which the other ports then refuse."),
    ] = SecurityOptions.admin_port
    admin_socket: Annotated[
        Path | None, _security(help="Unix socket for loading, unloading and settings, which only this user can open.")
    ] = SecurityOptions.admin_socket
    client_rate: Annotated[float | None, _security(min=0.001, help="Requests a second that one token or address may send.")] = (
        ClientLimits.requests_per_s
    )
    client_burst: Annotated[
        int | None, _security(min=1, help="Requests that one token or address may send at once after a pause.")
    ] = ClientLimits.burst
    client_concurrency: Annotated[
        int | None, _security(min=1, help="Requests of one token or address that may be in progress at once.")
    ] = ClientLimits.max_concurrent

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise typer.BadParameter("TLS takes --tls-cert and --tls-key together, and its other options only with them")

    def security(self, as_triton: AsTriton) -> SecurityOptions:
        """Certificates, tokens and access rules."""
        limits = ClientLimits(requests_per_s=self.client_rate, burst=self.client_burst, max_concurrent=self.client_concurrency)
        return SecurityOptions(
            tls=self._tls(),
            token_file=self.token_file,
            admin_port=self.admin_port,
            admin_socket=self.admin_socket,
            client_limits=None if limits == ClientLimits() else limits,
            grpc_restricted=as_triton.grpc_restricted(),
            http_restricted=as_triton.http_restricted(),
        )

    def _tls(self) -> TlsOptions | None:
        if not (self.tls_cert and self.tls_key):
            return None
        return TlsOptions(
            certificate=self.tls_cert,
            key=self.tls_key,
            client_authorities=self.tls_client_ca,
        )
