"""Where a server listens, by its options."""

from __future__ import annotations

from serve.server import ServerOptions
from serve.supervisor.handover import ADMIN, GRPC, HTTP, METRICS
from serve.transports.listening import Address


def addresses(options: ServerOptions) -> dict[str, Address]:
    """Everything that the server would open itself."""
    host, http, security = options.host, options.http, options.security
    found = {GRPC: Address(host, options.grpc_port, "--grpc-port")}
    if http is not None:
        found[HTTP] = Address(host, http.port, "--http-port")
        if http.metrics_port is not None:
            found[METRICS] = Address(host, http.metrics_port, "--metrics-port")
    if security.admin_socket is not None:
        found[ADMIN] = Address(host, 0, "--admin-socket", security.admin_socket)
    elif security.admin_port is not None:
        found[ADMIN] = Address(host, security.admin_port, "--admin-port")
    return found
