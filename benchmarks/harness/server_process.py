"""`halfserve serve` in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from halfserve.serve.benchmark.load.spec import LoadEndpoint
from halfserve.serve.benchmark.load_target import LoadTarget, RequestSettings

STOP_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """A running server."""

    process: subprocess.Popen[str]  # process of the operating system
    address: str  # HOST:PORT of gRPC
    http_address: str  # HOST:PORT of REST
    log: IO[bytes]  # file with its standard error

    def endpoint(self, path: str) -> LoadEndpoint:
        """Return a method of the server, for a load generator."""
        host, _, port = self.address.rpartition(":")
        return LoadEndpoint(host=host, port=int(port), path=path)

    def log_text(self) -> str:
        """Return the standard error output so far."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


@contextmanager
def server_process(
    path: Path,
    *options: str,
    grpc_port: int = 0,
    max_files: int | None = None,
    placement: str = "--cpu",
    threads: int = 1,
    cache: Path | None = None,
) -> Iterator[ServerProcess]:
    """Start a server, and end it after the block.

    Args:
        path: the model repository, or a model file.
        options: further options, as on the command line.
        grpc_port: gRPC port; 0 for a free one.
        max_files: limit on its open files; None for this process's limit.
        placement: "--cpu" or "--require-gpu".
        threads: CPU threads of one operator; 0 lets the runtime choose.
        cache: folder for what the server keeps between runs; None for the user's.

    Raises:
        SystemExit: the server did not start.
    """
    command = [sys.executable, "-m", "halfserve", "serve", str(path), "--json", placement, "--threads", str(threads)]
    command += ["--grpc-port", str(grpc_port), "--http-port", "0", "--metrics-port", "0", *options]
    if max_files is not None:
        command = ["bash", "-c", f'ulimit -n {max_files} && exec "$@"', "bash", *command]
    with tempfile.TemporaryFile() as log:
        environment = os.environ | ({} if cache is None else {"XDG_CACHE_HOME": str(cache)})
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        ports = _ports(process)
        server = ServerProcess(process, _local(ports.get("grpc_port")), _local(ports.get("http_port")), log)
        try:
            if not server.address:
                raise SystemExit(f"the server did not start:\n{server.log_text()}")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextmanager
def served(
    model: Path,
    rows: int,
    threads: int,
    options: RequestSettings | None = None,
    flags: Sequence[str] = (),
    placement: str = "--cpu",
) -> Iterator[LoadTarget]:
    """Provide a load target for a server of a model file, with batches of up to `rows`; see `server_process`."""
    size = ("--max-batch-size", str(rows))
    with (
        server_process(model, *size, *flags, placement=placement, threads=threads) as server,
        LoadTarget(server.address, [model.stem], options or RequestSettings()) as contestant,
    ):
        yield contestant


def _ports(process: subprocess.Popen[str]) -> dict[str, int]:
    """Return the ports from the ready line; empty if the server ends before it."""
    line = process.stdout.readline() if process.stdout is not None else ""
    told: dict[str, int] = json.loads(line) if line else {}
    return told


def _local(port: int | None) -> str:
    return f"127.0.0.1:{port}" if port else ""
