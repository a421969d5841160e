"""Run one attack against a server of its own, beside a well-behaved client."""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks.bystander import Account, ask
from benchmarks.soaking.models import save_models
from benchmarks.soaking.server_process import ServerProcess, server_process
from serve.security.roles import Role
from serve.security.token_file import new_token

WARM_UP_S = 1.0
RESET_PEAK = "5"  # written to clear_refs, see proc_pid_clear_refs(5)
ATTACKER_NICENESS = 19  # the attacker stands for other machines: it is not to take the server's processor


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What an attacker does.

    Attributes:
        name: for the table and the command line.
        run: takes the gRPC address and the REST address (HOST:PORT each) and how many seconds to go on; returns a note of what
            it reached. Runs in a process of its own, without a token.
        server_options: more of them for `halfserve serve`.
        budget_mb: what the server may hold for clients in all; the peak may exceed it by 20 %. None: nothing is bounded.
    """

    name: str
    run: Callable[[str, str, float], str]
    server_options: Sequence[str] = ()
    budget_mb: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one attack did to the server and to a client beside it.

    Attributes:
        idle_mb: resident memory before it.
        peak_mb: the highest resident memory during it.
        quiet: what the client saw before it.
        attacked: what the client saw during it.
        note: what the attacker says it reached.
        log_lines: that the server wrote during it.
        tracebacks: among them.
        exit_code: of the server after SIGTERM.
    """

    idle_mb: float
    peak_mb: float
    quiet: Account
    attacked: Account
    note: str
    log_lines: int
    tracebacks: int
    exit_code: int


def measure(attack: Attack, seconds: float) -> Outcome:
    """Start a server with tokens, ask it in quiet for `seconds`, then as long again under the attack."""
    token, line = new_token("bystander", [Role.INFER])
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder) / "models")
        tokens = Path(folder) / "tokens.txt"
        tokens.write_text(f"{line}\n")
        with server_process(Path(folder) / "models", "--token-file", str(tokens), *attack.server_options) as server:
            _beside(server, token, lambda: time.sleep(WARM_UP_S))
            quiet, _ = _beside(server, token, lambda: time.sleep(seconds))
            idle_mb, lines = _memory_mb(server, "VmRSS"), server.log_text().count("\n")
            Path(f"/proc/{server.process.pid}/clear_refs").write_text(RESET_PEAK)
            attacked, note = _beside(server, token, lambda: _attacker(attack, server, seconds))
            peak_mb = _memory_mb(server, "VmHWM")
            log = "\n".join(server.log_text().split("\n")[lines:])
        return Outcome(
            idle_mb=idle_mb,
            peak_mb=peak_mb,
            quiet=quiet,
            attacked=attacked,
            note=note or "",
            log_lines=log.count("\n"),
            tracebacks=log.count("Traceback"),
            exit_code=server.process.returncode,
        )


def _beside(server: ServerProcess, token: str, work: Callable[[], str | None]) -> tuple[Account, str | None]:
    """Do something while the client asks; what the client saw, and what the work returned."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        account = pool.submit(ask, server.address, token, stop)
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
