"""Effect of server restarts on retrying clients, which should see no errors.

    python -m benchmarks.rolling_restart
    python -m benchmarks.rolling_restart --kill

Two servers run on fixed ports, and clients know both. In turn, one of them is ended (SIGTERM; with --kill SIGKILL) and
restarted, while the other serves. Every answer is checked. Exits with 1 if a client saw an error or a wrong answer, or if a
server ended by SIGTERM did not exit with code 0.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from benchmarks.soaking.clients import TIMEOUT_S, ask_affine
from benchmarks.soaking.models import save_models
from benchmarks.soaking.server_process import ServerProcess, server_process
from benchmarks.soaking.tally import Tally
from halfserve import Client, ClientError, RetryPolicy
from halfserve.serve.client.channel_settings import Balancing

ENDS_S = 60.0
RETRIES = RetryPolicy(retries=5, wait_for_server=True)


class Replica:
    """A server that restarts on the same port."""

    def __init__(self, repository: Path, port: int) -> None:
        self._repository = repository
        self._port = port
        self._life = contextlib.ExitStack()
        self._server: ServerProcess | None = None
        self.address = f"127.0.0.1:{port}"

    def start(self) -> float:
        """Start the server; returns the seconds until it takes requests."""
        began = time.monotonic()
        self._server = self._life.enter_context(server_process(self._repository, grpc_port=self._port))
        return time.monotonic() - began

    def end(self, how: signal.Signals) -> int:
        """Send a signal and wait for the end; returns the process's exit code."""
        if self._server is None:
            return 0
        self._server.process.send_signal(how)
        code = self._server.process.wait(ENDS_S)
        self._life.close()
        return code

    def close(self) -> None:
        """End the server in any state."""
        self._life.close()


def main(
    restarts: Annotated[int, typer.Option(min=1, help="How often a server is restarted, in all.")] = 20,
    count: Annotated[int, typer.Option("--clients", min=1, help="Clients that ask one thing after the other.")] = 4,
    kill: Annotated[bool, typer.Option("--kill", help="SIGKILL in place of SIGTERM.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Restart servers under load and count errors of the clients."""
    tally, stop = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        save_models(Path(folder))
        replicas = [Replica(Path(folder), port) for port in _free_ports(2)]
        for replica in replicas:
            stack.callback(replica.close)
            replica.start()
        addresses = [replica.address for replica in replicas]
        threads = [threading.Thread(target=_ask, args=(addresses, number, stop, tally)) for number in range(count)]
        for thread in threads:
            thread.start()
        try:
            codes, starts_s = _roll(replicas, restarts, signal.SIGKILL if kill else signal.SIGTERM, tally)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    counted = tally.counted()
    milliseconds = np.array([seconds for _, seconds in counted.latencies]) * 1e3
    figures = {
        "restarts": restarts,
        "signal": "SIGKILL" if kill else "SIGTERM",
        "exit_codes": dict(codes),
        "right_answers": len(milliseconds),
        "errors_and_wrong_answers": counted.wrongs,
        "first_of_them": counted.wrong,
        "slowest_start_s": round(max(starts_s), 2),
        **{f"p{q:g}_ms": round(float(np.percentile(milliseconds, q)), 2) for q in (50, 99, 99.9, 100)},
    }
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        Console().print("\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in figures.items()), highlight=False)
    expected = -signal.SIGKILL if kill else 0
    raise typer.Exit(1 if counted.wrongs or set(codes) != {expected} else 0)


def _roll(replicas: list[Replica], restarts: int, how: signal.Signals, tally: Tally) -> tuple[Counter[int], list[float]]:
    codes: Counter[int] = Counter()
    starts_s = []
    for number in range(restarts):
        replica = replicas[number % len(replicas)]
        _wait_for_answers(tally)
        codes[replica.end(how)] += 1
        starts_s.append(replica.start())
    _wait_for_answers(tally)
    return codes, starts_s


def _wait_for_answers(tally: Tally, count: int = 100) -> None:
    """Wait until clients have received `count` more answers, so that a restart happens under load."""
    enough = sum(tally.counted().answered.values()) + count
    until = time.monotonic() + ENDS_S
    while sum(tally.counted().answered.values()) < enough:
        if time.monotonic() > until:
            raise SystemExit(f"clients got fewer than {count} answers in {ENDS_S:g} s")
        time.sleep(0.05)


def _ask(addresses: list[str], seed: int, stop: threading.Event, tally: Tally) -> None:
    """Send requests to the first server that answers, or (every other client) to all in turn."""
    random = np.random.default_rng(seed)
    balancing: Balancing = "round_robin" if seed % 2 else "pick_first"
    with Client(addresses, timeout_s=TIMEOUT_S, retries=RETRIES, balancing=balancing) as client:
        while not stop.is_set():
            try:
                ask_affine(client, random, tally)
            except ClientError as error:
                tally.fault(f"{error.code}: {error}")


def _free_ports(count: int) -> list[int]:
    """Find free ports."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


if __name__ == "__main__":
    typer.run(main)
