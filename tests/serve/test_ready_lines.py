from __future__ import annotations

import pytest

from serve.client.connection.address import target_of
from serve.ready_lines import print_text
from serve.server import Ready


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")])
def test_addresses_are_told_as_clients_take_them(host: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    ready = Ready(models=[], host=host, grpc_port=1, http_port=2, metrics_port=3, admin_port=4, seconds=0.5)
    print_text(ready, "http")
    assert capsys.readouterr().out.splitlines() == [
        f"REST and a page on http://{shown}:2/, metrics on {shown}:3",
        f"administration on {shown}:4",
        f"gRPC on {shown}:1, ready in 0.50 s; Ctrl-C stops",
    ]
    assert target_of(f"{shown}:1").is_local
