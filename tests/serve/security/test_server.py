"""The guard of a whole server: its settings, its warnings, its signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from pathlib import Path

import pytest

from serve.backends.onnxruntime_backend import OnnxRuntime
from serve.engine.backend import Placement
from serve.http.options import HttpOptions
from serve.security.errors import SecurityError
from serve.security.options import ClientLimits, SecurityOptions
from serve.security.roles import Role
from serve.security.security import Security
from serve.server import Ready, ServerOptions, serve
from tests.models import save_mlp
from tests.serve.security.guarded import Certificates, tokens_in


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (SecurityOptions(admin_port=0, admin_socket=Path("x")), "expected one of the two"),
        (SecurityOptions(client_limits=ClientLimits(requests_per_s=0)), "requests_per_s is 0, expected more than 0"),
        (SecurityOptions(client_limits=ClientLimits(max_concurrent=-1)), "max_concurrent is -1, expected more than 0"),
        (SecurityOptions(client_limits=ClientLimits(requests_per_s=float("nan"))), "requests_per_s is nan"),
        (SecurityOptions(client_limits=ClientLimits(burst=2)), "burst means nothing without requests_per_s"),
        (SecurityOptions(token_file=Path("none")), "token file none cannot be read"),
    ],
    ids=["two-admins", "no-rate", "no-places", "nan", "burst-alone", "no-file"],
)
def test_settings_that_make_no_sense_are_refused(options: SecurityOptions, text: str) -> None:
    with pytest.raises(SecurityError) as refused:
        Security(options, print)
    assert text in str(refused.value)


def test_an_exposed_server_is_warned_of(certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    guarded = Security(SecurityOptions(tls=certificates.options, token_file=tmp_path / "tokens"), print)
    guarded.warn_if_exposed("0.0.0.0")  # noqa: S104  (nothing listens)
    for host in ("127.0.0.1", "::1", "localhost"):
        Security(SecurityOptions(), print).warn_if_exposed(host)
    assert not caplog.text
    Security(SecurityOptions(), print).warn_if_exposed("::")
    assert "listening on :: without TLS (--tls-cert) and without tokens (--token-file): whoever reaches" in caplog.text
    caplog.clear()
    Security(SecurityOptions(tls=certificates.options), print).warn_if_exposed("192.0.2.1")
    assert "listening on 192.0.2.1 without tokens (--token-file): whoever reaches" in caplog.text


def test_a_server_listens_on_this_machine_alone_unless_asked() -> None:
    options = ServerOptions(path=Path("x"))
    assert (options.host, options.security, options.shared_memory) == ("127.0.0.1", SecurityOptions(), False)


def test_a_whole_server_reads_its_files_again_on_sighup(certificates: Certificates, tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp.onnx")
    security = SecurityOptions(tls=certificates.options, admin_port=0, watch_s=3600)
    options = ServerOptions(
        path=path,
        grpc_port=0,
        placement=Placement(use_gpu=False, threads=1),
        http=HttpOptions(port=0, metrics_port=None),
        security=security,
    )
    shown: list[str] = []

    async def look(told: Ready) -> None:
        ports = [port for port in (told.grpc_port, told.http_port, told.admin_port) if port]
        assert len(ports) == 3
        for again in (False, True):
            shown.extend([await asyncio.to_thread(ssl.get_server_certificate, (told.host, p), timeout=20) for p in ports])
            if not again:
                certificates.renew()
                os.kill(os.getpid(), signal.SIGHUP)
                while await asyncio.to_thread(ssl.get_server_certificate, (told.host, ports[0]), timeout=20) == shown[0]:
                    pass
        os.kill(os.getpid(), signal.SIGTERM)

    async def run() -> None:
        looking: list[asyncio.Task[None]] = []
        await serve(options, OnnxRuntime(), lambda told: looking.append(asyncio.create_task(look(told))))
        await looking[0]

    asyncio.run(run())
    assert len(set(shown[:3])) == len(set(shown[3:])) == 1
    assert shown[0] != shown[3]
