"""Logs whose reader stands still."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client
from halfserve.serve.log_handler import NonBlockingHandler
from tests.models import save_mlp

ROOT = Path(__file__).parents[2]
WAIT_S = 30.0
MUCH = 2**20


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its ends, to read from and to write to."""
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def fill(write: int) -> int:
    """Write to a pipe until it takes no more; how much that was."""
    os.set_blocking(write, False)
    size = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            size += os.write(write, b"." * 4096)
    os.set_blocking(write, True)
    return size


def tell(handler: logging.Handler, text: str) -> None:
    """Log a line, within reasonable time."""
    record = logging.LogRecord("serve", logging.INFO, __file__, 1, text, (), None)
    thread = threading.Thread(target=handler.handle, args=(record,), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits for a reader"


def test_lines_that_would_wait_are_counted_in_the_next(pipe: tuple[int, int]) -> None:
    read, write = pipe
    with open(write, "w", encoding="utf-8", closefd=False) as stream:
        handler = NonBlockingHandler(stream)
        tell(handler, "first")
        assert os.read(read, MUCH) == b"first\n"
        size = fill(write)
        tell(handler, "second")
        tell(handler, "third")
        assert os.read(read, MUCH) == b"." * size
        tell(handler, "fourth")
        tell(handler, "fifth")
        assert os.read(read, MUCH).decode() == "WARNING log lines lost because standard error was not read: 2\nfourth\nfifth\n"


def test_a_line_that_is_longer_than_the_room_is_torn(pipe: tuple[int, int]) -> None:
    read, write = pipe
    with open(write, "w", encoding="utf-8", closefd=False) as stream:
        handler = NonBlockingHandler(stream)
        tell(handler, "ä" * MUCH)
        torn = os.read(read, MUCH).decode()
        assert set(torn) == {"ä"}
        tell(handler, "next")
        assert os.read(read, MUCH).decode() == "\nWARNING log lines lost because standard error was not read: 1\nnext\n"


def test_an_unread_log_costs_lines_and_nothing_else(tmp_path: Path, pipe: tuple[int, int]) -> None:
    read, write = pipe
    model = save_mlp(tmp_path / "mlp.onnx")
    command = [sys.executable, "-m", "halfserve", "serve", str(model), "--json", "--grpc-port", "0", "--no-http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=write, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            address = ("127.0.0.1", int(json.loads(process.stdout.readline())["grpc_port"]))
            size = fill(write)
            with socket.create_connection(address) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")  # which a line tells of
                stranger.settimeout(WAIT_S)
                while stranger.recv(4096):
                    pass
            with Client(f"127.0.0.1:{address[1]}", timeout_s=WAIT_S, retries=0) as client:
                assert client.infer("mlp", {"x": np.ones((1, 64), np.float16)})["y"].shape == (1, 10)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    os.close(write)
    assert os.read(read, MUCH) == b"." * size
