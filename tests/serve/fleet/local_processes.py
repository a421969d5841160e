"""`halfserve serve --processes 2` on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from halfserve import Client, RetryPolicy
from tests.models import FLOAT32
from tests.serve.fleet.fleet import WAIT_S, Fleet

HOST = "127.0.0.1"
HALFSERVE = [sys.executable, "-m", "halfserve", "serve"]
PATIENT = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)


class Processes(Fleet):
    """Two servers behind one port, and connections to both."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], clients: list[Client]) -> None:
        self.process = process
        self.ready = ready
        self._clients = clients

    @property
    def clients(self) -> Sequence[Client]:
        return self._clients

    def url(self, port: str) -> str:
        return f"http://{HOST}:{self.ready[port]}"

    def lose_one(self, ask: Callable[[Client], object]) -> None:
        for client in self.clients:
            ask(client)
        killed = self.workers()[0]
        os.kill(killed, signal.SIGKILL)
        while killed in self.workers() or self.metric("halfserve_processes") < 2:
            assert self.process.poll() is None

    def workers(self) -> list[int]:
        """Their process numbers, the oldest first."""
        return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]


@contextmanager
def processes(*arguments: str | Path, **settings: Any) -> Iterator[Processes]:
    command = [*HALFSERVE, *map(str, arguments), "--processes", "2", "--grpc-port", "0", "--cpu", *FLOAT32, "--json"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        address = f"{HOST}:{ready['grpc_port']}"
        clients = [stack.enter_context(Client(address, timeout_s=WAIT_S, retries=PATIENT, **settings)) for _ in range(4)]
        for client in clients:
            assert client.is_live()
        yield Processes(process, ready, clients)
