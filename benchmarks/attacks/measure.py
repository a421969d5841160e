"""Run one attack against a server of its own, beside a well-behaved client."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.attacks.bystander import Account, ask, becomes_ready
from benchmarks.harness.models import save_models
from benchmarks.harness.server_process import ServerProcess, server_process
from halfserve.serve.client.channel_settings import Tls
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.tokens import new_token

WARM_UP_S = 1.0
POLL = ("--model-control", "poll", "--poll-seconds", "0.5")
CERTIFICATE, KEY = "server.pem", "server.key"
RESET_PEAK = "5"  # written to clear_refs, see proc_pid_clear_refs(5)
ATTACKER_NICENESS = 19  # the attacker stands for other machines: it is not to take the server's processor


@dataclass(frozen=True, kw_only=True)
class Attack:
    """An attack, and the server that it meets.

    Attributes:
        name: name in the table and on the command line.
        run: takes the gRPC address and the REST address (HOST:PORT each) and how many seconds to go on; returns a note of what
            it reached. Runs in a process of its own, without a token.
        save_models: writes the models that the attack needs into a repository, beside those of the client.
        bystander: the client beside it; takes the gRPC address, the REST address, a token or None, the TLS, the
            seconds from one of its requests to the next, and what ends it.
        asks_for_tokens: whether the server does; the attacker has none either way.
        server_options: more of them for `halfserve serve`.
        max_files: number of files that the server may open; None leaves the limit of this process.
        tls: whether the server speaks it.
        budget_mb: memory limit for all clients together, in MB; the peak may exceed it by 20 %. None: nothing is bounded.
    """

    name: str
    run: Callable[[str, str, float], str]
    save_models: Callable[[Path], None] | None = None
    bystander: Callable[[str, str, str | None, Tls | None, float, threading.Event], Account] = ask
    asks_for_tokens: bool = True
    server_options: Sequence[str] = ()
    max_files: int | None = None
    tls: bool = False
    budget_mb: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Effect of one attack on the server and on a client beside it.

    Attributes:
        idle_mb: resident memory before it.
        peak_mb: the highest resident memory during it.
        quiet: the client's answers before the attack.
        attacked: the client's answers during the attack.
        note: the attacker's report of what it reached.
        log_lines: lines of the server's log during the attack.
        tracebacks: among them.
        has_reloaded: whether a version of a model that came during it was served, then or soon after its end.
        exit_code: exit code of the server after SIGTERM.
    """

    idle_mb: float
    peak_mb: float
    quiet: Account
    attacked: Account
    note: str
    log_lines: int
    tracebacks: int
    has_reloaded: bool
    exit_code: int


def compute(grpc_address: str, http_address: str, seconds: float) -> str:
    """Compute and send the server nothing: what it costs the client that the attacker shares its machine."""
    del grpc_address, http_address
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        sum(range(10_000))
        rounds += 1
    return f"{rounds} sums of 10,000 numbers"


def measure(attack: Attack, seconds: float, rate: float = 50.0) -> Outcome:
    """Start a server, ask it in quiet for `seconds`, `rate` times a second, then as long again under the attack."""
    token: str | None
    token, line = new_token("bystander", [Role.INFER])
    options = list(attack.server_options)
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder) / "models")
        if attack.save_models is not None:
            attack.save_models(Path(folder) / "models")
        tokens = Path(folder) / "tokens.txt"
        tokens.write_text(f"{line}\n")
        options = [*POLL, *attack.server_options]
        if attack.asks_for_tokens:
            options += ["--token-file", str(tokens)]
        tls = _certificate(Path(folder)) if attack.tls else None
        if tls is not None:
            options += ["--tls-cert", str(tls.authorities), "--tls-key", str(Path(folder) / KEY)]
        with server_process(Path(folder) / "models", *options, max_files=attack.max_files) as server:
            shown = token if attack.asks_for_tokens else None
            grpc_address = server.address.replace("127.0.0.1", "localhost")
            ask_it = partial(attack.bystander, grpc_address, server.http_address, shown, tls, 1 / rate)
            _beside(ask_it, lambda: time.sleep(WARM_UP_S))
            quiet, _ = _beside(ask_it, lambda: time.sleep(seconds))
            idle_mb, lines = _memory_mb(server, "VmRSS"), server.log_text().count("\n")
            Path(f"/proc/{server.process.pid}/clear_refs").write_text(RESET_PEAK)
            version = Path(folder) / "models" / "flip" / "2"
            copying = threading.Timer(seconds / 2, lambda: shutil.copytree(version.with_name("1"), version))
            copying.start()
            attacked, note = _beside(ask_it, lambda: _attacker(attack, server, seconds))
            peak_mb = _memory_mb(server, "VmHWM")
            has_reloaded = becomes_ready("flip", "2", grpc_address, shown, tls)
            log = "\n".join(server.log_text().split("\n")[lines:])
        return Outcome(
            idle_mb=idle_mb,
            peak_mb=peak_mb,
            quiet=quiet,
            attacked=attacked,
            note=note or "",
            log_lines=log.count("\n"),
            tracebacks=log.count("Traceback"),
            has_reloaded=has_reloaded,
            exit_code=server.process.returncode,
        )


def _certificate(folder: Path) -> Tls:
    """Return a certificate of the server's own, which its clients trust."""
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(folder / KEY)]
    certificate = ["-x509", "-days", "2", "-subj", "/CN=localhost", "-addext", names, "-out", str(folder / CERTIFICATE)]
    subprocess.run(["openssl", "req", *key, *certificate], check=True, capture_output=True)
    return Tls(authorities=folder / CERTIFICATE)


def _beside(client: Callable[[threading.Event], Account], work: Callable[[], str | None]) -> tuple[Account, str | None]:
    """Do something while the client asks; what the client saw, and what the work returned."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        account = pool.submit(client, stop)
        try:
            done = work()
        finally:
            stop.set()
        return account.result(), done


def _attacker(attack: Attack, server: ServerProcess, seconds: float) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare) as pool:
        return pool.submit(attack.run, server.address, server.http_address, seconds).result()


def _prepare() -> None:
    os.nice(ATTACKER_NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _memory_mb(server: ServerProcess, field: str) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(f"{field}:")).split()[1]) / 1024
