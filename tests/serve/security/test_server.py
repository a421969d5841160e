"""The guard of a whole server: its settings, its warnings, its signal."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.server_process import server_process
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement, ModelInterface
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security import Security
from halfserve.serve.security.security_options import ClientLimits, SecurityError, SecurityOptions
from halfserve.serve.security.tokens import new_token
from halfserve.serve.server import ServerOptions, serve
from halfserve.serve.startup_report import StartupReport
from tests.models import save_mlp
from tests.serve.security.guarded import Certificates, tokens_in

ROOT = Path(__file__).parents[3]
NAMED = re.findall(r"^\|.*\| (tests/\S+\.py)::(\w+) \|$", (ROOT / "docs" / "guides" / "security.md").read_text(), re.MULTILINE)


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
    assert "listening on :: without TLS (--tls-cert) and without tokens (--token-file): any client that reaches" in caplog.text
    caplog.clear()
    Security(SecurityOptions(tls=certificates.options), print).warn_if_exposed("192.0.2.1")
    assert "listening on 192.0.2.1 without tokens (--token-file): any client that reaches" in caplog.text


def test_a_server_listens_on_this_machine_alone_unless_asked() -> None:
    options = ServerOptions(path=Path("x"))
    assert (options.host, options.security, options.shared_memory) == ("127.0.0.1", SecurityOptions(), False)


class HangingUp(OnnxRuntime):
    """Somebody sends SIGHUP while a model is loaded."""

    def describe(self, path: Path) -> ModelInterface:
        os.kill(os.getpid(), signal.SIGHUP)
        return super().describe(path)


def test_sighup_while_models_are_loaded_ends_nothing(tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp.onnx")
    tokens_in(tmp_path / "tokens", alice=Role.INFER)
    options = ServerOptions(
        path=path,
        grpc_port=0,
        placement=DevicePlacement(use_gpu=False, threads=1),
        security=SecurityOptions(token_file=tmp_path / "tokens"),
    )
    ended_by: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: ended_by.append(number))
    try:
        asyncio.run(serve(options, HangingUp(), lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not ended_by


@pytest.mark.long
@pytest.mark.parametrize("supervise", [(), ("--supervise",)])
def test_sighup_before_the_files_are_read_ends_nothing(tmp_path: Path, supervise: tuple[str, ...]) -> None:
    path, pipe = save_mlp(tmp_path / "mlp.onnx"), tmp_path / "tokens"
    os.mkfifo(pipe, 0o600)
    options = ["--grpc-port", "0", "--no-http", "--cpu", "--json", "--token-file", str(pipe), *supervise]
    with subprocess.Popen(
        [sys.executable, "-m", "halfserve", "serve", str(path), *options], stdout=subprocess.PIPE, text=True
    ) as process:
        with pipe.open("w") as tokens:  # once the server begins to read
            process.send_signal(signal.SIGHUP)
            tokens.write(new_token("alice", [Role.INFER])[1])
        assert process.stdout is not None
        assert "grpc_port" in process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 0


def test_sighup_ends_no_server_that_has_nothing_to_read(tmp_path: Path) -> None:
    with server_process(save_mlp(tmp_path / "mlp.onnx")) as server:
        server.process.send_signal(signal.SIGHUP)  # which a system delivers before SIGTERM
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_a_server_reads_its_files_again_on_sighup(certificates: Certificates, tmp_path: Path) -> None:
    path = save_mlp(tmp_path / "mlp.onnx")
    security = SecurityOptions(tls=certificates.options, admin_port=0, watch_s=3600)
    options = ServerOptions(
        path=path,
        grpc_port=0,
        placement=DevicePlacement(use_gpu=False, threads=1),
        http=HttpOptions(port=0, metrics_port=None),
        security=security,
    )
    shown: list[str] = []

    async def look(told: StartupReport) -> None:
        ports = [port for port in (told.grpc_port, told.http_port, told.admin_port) if port]
        assert len(ports) == 3
        for again in (False, True):
            shown.extend([await asyncio.to_thread(ssl.get_server_certificate, (told.host, p), timeout=60) for p in ports])
            if not again:
                certificates.renew()
                os.kill(os.getpid(), signal.SIGHUP)
                while await asyncio.to_thread(ssl.get_server_certificate, (told.host, ports[0]), timeout=60) == shown[0]:
                    pass
        os.kill(os.getpid(), signal.SIGTERM)

    async def run() -> None:
        looking: list[asyncio.Task[None]] = []
        await serve(options, OnnxRuntime(), lambda told: looking.append(asyncio.create_task(look(told))))
        await looking[0]

    asyncio.run(run())
    assert len(set(shown[:3])) == len(set(shown[3:])) == 1
    assert shown[0] != shown[3]


def test_every_threat_names_a_test() -> None:
    text = (ROOT / "docs" / "guides" / "security.md").read_text().partition("## Threats")[2].partition("## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(NAMED) > 30
