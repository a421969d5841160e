from __future__ import annotations

from pathlib import Path

import pytest

from serve.addresses import addresses
from serve.http.options import HttpOptions
from serve.security.options import SecurityOptions
from serve.server import ServerOptions
from serve.transports.listening import Address

HOST = "127.0.0.1"
GRPC = {"grpc": Address(HOST, 1, "--grpc-port")}
HTTP = {"http": Address(HOST, 2, "--http-port")}
METRICS = {"metrics": Address(HOST, 3, "--metrics-port")}


@pytest.mark.parametrize(
    ("http", "security", "expected"),
    [
        (None, SecurityOptions(), GRPC),
        (HttpOptions(port=2, metrics_port=None), SecurityOptions(), GRPC | HTTP),
        (HttpOptions(port=2, metrics_port=3), SecurityOptions(), GRPC | HTTP | METRICS),
        (None, SecurityOptions(admin_port=0), GRPC | {"admin": Address(HOST, 0, "--admin-port")}),
        (
            None,
            SecurityOptions(admin_socket=Path("/run/admin")),
            GRPC | {"admin": Address(HOST, 0, "--admin-socket", Path("/run/admin"))},
        ),
    ],
    ids=["grpc alone", "http", "metrics", "admin port", "admin socket"],
)
def test_everything_that_is_asked_for_is_listened_on(
    http: HttpOptions | None, security: SecurityOptions, expected: dict[str, Address]
) -> None:
    assert addresses(ServerOptions(path=Path("m"), host=HOST, grpc_port=1, http=http, security=security)) == expected
