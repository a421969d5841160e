"""Processes that are stopped, ended and killed, on either side, and whole servers that end under load."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from serve.client import DeadlineExceeded, InferenceClient, RetryPolicy, ServerUnavailable
from serve.transports.grpc_framing import frame
from tests.models import save_mlp
from tests.serve.faults.load import Load, under_load
from tests.serve.faults.processes import WAIT_S, ServerProcess
from tests.serve.transports.nghttp2.http2_peer import Http2Peer, call_headers

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
CLIENTS = 20


def test_a_stopped_server_goes_on_where_it_was(mad_process: ServerProcess, load: Load, client: InferenceClient) -> None:
    counter = {"n": np.array([20_000])}
    with InferenceClient(mad_process.address, timeout_s=0.6, retries=0) as impatient, ThreadPoolExecutor(1) as pool:
        begun = pool.submit(client.infer, "counter", counter)
        mad_process.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded):  # stopped for longer than a batch of this model may take
                impatient.infer("counter", counter)
        finally:
            mad_process.process.send_signal(signal.SIGCONT)
        assert begun.result(WAIT_S)["y"].tolist() == [20_000]
    load.wait_for_more()


def test_clients_that_die_in_the_middle_of_a_message_leave_nothing(
    mad_process: ServerProcess, load: Load, client: InferenceClient
) -> None:
    client.is_live()
    before = mad_process.open_files()
    for number in range(CLIENTS):
        peer = Http2Peer(mad_process.address).greet()
        stream = peer.http2.send_request(call_headers())
        peer.http2.send_data(stream, frame(bytes(100_000))[: 1 + 4000 * number])
        peer.push()
        if number % 2:
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        peer.socket.close()
    mad_process.until(lambda: mad_process.open_files() <= before, client.is_live)


@contextmanager
def halfserve(repository: Path, *, grpc_port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command."""
    command = [sys.executable, "-m", "halfserve", "serve", str(repository), "--json", "--cpu", "--threads", "1", "--no-http"]
    command += ["--grpc-port", str(grpc_port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, f"127.0.0.1:{json.loads(process.stdout.readline())['grpc_port']}"
        finally:
            process.kill()


def test_sigterm_under_load_answers_all_that_was_taken(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with (
        halfserve(tmp_path) as (process, address),
        under_load([address], askers=6, streams=0, may_refuse=True) as load,
    ):
        process.terminate()
        load.wait_for_refusals(6)
        _, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, errors) == (0, "")
    assert {type(error) for error in load.refused} == {ServerUnavailable}


def test_a_killed_server_that_is_started_anew_costs_retrying_clients_nothing(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    patient = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)
    with ExitStack() as servers:
        process, address = servers.enter_context(halfserve(tmp_path))
        with under_load([address], streams=0, retry=patient) as load:
            process.kill()
            process.wait(WAIT_S)
            servers.enter_context(halfserve(tmp_path, grpc_port=int(address.rpartition(":")[2])))
            load.wait_for_more(200)
