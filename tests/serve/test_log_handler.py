"""The log's lines, as text and as JSON, and logs whose reader stands still."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
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
from halfserve.serve.log_handler import JsonFormatter, NonBlockingHandler, TextFormatter
from tests.models import FLOAT32, save_mlp
from tests.serve.running_server import WAIT_S

ROOT = Path(__file__).parents[2]
MUCH = 2**20
TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


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


def record(text: str, *values: object, **about: object) -> logging.LogRecord:
    return logging.getLogger("serve").makeRecord("serve", logging.WARNING, __file__, 1, text, values, None, extra=about)


def test_a_line_of_text_begins_with_its_time_in_utc() -> None:
    one = record("%s: is up again", "mlp/1", model="mlp/1")
    one.created = 1_769_947_200.25
    assert TextFormatter().format(one) == "2026-02-01T12:00:00.250Z WARNING mlp/1: is up again"


FORGED = "a\n2026-02-01T12:00:00.250Z ERROR forged\r\x1b[2J\x9b1m\u2028\u202e\tü"
SHOWN = r"a\n2026-02-01T12:00:00.250Z ERROR forged\r\x1b[2J\x9b1m\u2028\u202e\tü"


@pytest.mark.parametrize("process", [None, 3])
def test_texts_of_others_cannot_forge_lines_of_text(process: int | None) -> None:
    one, cause = record("%s: is gone", FORGED), ValueError(FORGED)
    one.exc_info, one.created = (type(cause), cause, None), 1_769_947_200.25
    of_another = record("failed", trace=f"Traceback:\nValueError: {FORGED}\n")
    of_another.created = one.created
    prefix = "" if process is None else "[3] "
    first, second = SHOWN.split(r"\n")
    assert TextFormatter(process).format(one).split("\n") == [
        f"{prefix}2026-02-01T12:00:00.250Z WARNING {SHOWN}: is gone",
        f"{prefix}  ValueError: {first}",
        f"{prefix}  {second}",
    ]
    assert TextFormatter(process).format(of_another).split("\n") == [
        f"{prefix}2026-02-01T12:00:00.250Z WARNING failed",
        f"{prefix}  Traceback:",
        f"{prefix}  ValueError: {first}",
        f"{prefix}  {second}",
    ]


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, {}),
        ({"model": "mlp"}, {"model": "mlp"}),
        ({"model": "my model/12 instance 3"}, {"model": "my model", "version": "12"}),
        ({"model": "mlp/1", "id": 'a "quoted"\nid'}, {"model": "mlp", "version": "1", "id": 'a "quoted"\nid'}),
    ],
    ids=["nothing", "model", "instance", "request"],
)
def test_a_json_line_has_what_its_record_knows(about: dict[str, object], expected: dict[str, str]) -> None:
    (line,) = JsonFormatter().format(record("two\nlines %d", 3, **about)).splitlines()
    content = json.loads(line)
    assert re.fullmatch(TIME, content.pop("time"))
    assert content == {"level": "WARNING", "logger": "serve", "message": "two\nlines 3", **expected}


def test_a_traceback_stays_on_its_json_line() -> None:
    one, cause = record("failed"), ValueError("the cause")
    one.exc_info = (type(cause), cause, None)
    (line,) = JsonFormatter().format(one).splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: the cause")
    (line,) = JsonFormatter().format(record("failed", trace="of another\nprocess")).splitlines()
    assert json.loads(line)["exception"] == "of another\nprocess"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_of_long_texts_the_middle_is_left_out(formatter: logging.Formatter) -> None:
    line = formatter.format(record("failed: %s", "x" * 10_000_000, trace=f"Traceback:\n{'y' * 10_000_000}\nthe end"))
    assert re.search(r"failed: x+ \.\.\. \(99\d+ characters left out\) \.\.\. x+", line) is not None
    assert re.search(r"y+ \.\.\. \(99\d+ characters left out\) \.\.\. y+.*the end", line, re.DOTALL) is not None
    assert len(line) < 40_000


@pytest.mark.long
def test_a_server_and_its_supervisor_log_in_json_alone(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    save_mlp(tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    command = [sys.executable, "-m", "halfserve", "serve", str(tmp_path), "--keep-going", "--grpc-port", "0", "--supervise"]
    command += [*FLOAT32, "--no-http", "--cpu", "--log-format", "json", "--access-log", "all"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["level"], ready["message"]) == ("INFO", "ready")
            with Client(f"127.0.0.1:{ready['grpc_port']}", timeout_s=WAIT_S, retries=0) as client:
                client.infer("mlp", {"x": np.ones((1, 64), np.float16)})
            lines = [json.loads(process.stderr.readline()) for _ in range(2)]
            (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(worker), signal.SIGKILL)
            lines += [json.loads(process.stderr.readline()) for _ in range(3)]
            process.terminate()
            lines += map(json.loads, process.stderr)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
    refused, access, ended, *_ = lines
    assert (refused["level"], refused["model"]) == ("WARNING", "broken")
    assert (access["level"], access["model"], access["status"]) == ("INFO", "mlp", "OK")
    assert "SIGKILL; out of memory, or by hand" in ended["message"]
    assert all(re.fullmatch(TIME, line["time"]) for line in lines)


def test_why_a_server_cannot_start_is_a_json_line_too() -> None:
    command = [sys.executable, "-m", "halfserve", "serve", "/no/such/place", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    line = json.loads(done.stderr)
    assert line["level"] == "ERROR"
    assert line["message"] == "/no/such/place: not found; expected a model repository folder or an .onnx file"


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
        assert os.read(read, MUCH).decode() == "log lines lost because standard error was not read: 2\nfourth\nfifth\n"


def test_a_line_that_is_longer_than_the_room_is_torn(pipe: tuple[int, int]) -> None:
    read, write = pipe
    with open(write, "w", encoding="utf-8", closefd=False) as stream:
        handler = NonBlockingHandler(stream)
        tell(handler, "ä" * MUCH)
        torn = os.read(read, MUCH).decode()
        assert set(torn) == {"ä"}
        tell(handler, "next")
        assert os.read(read, MUCH).decode() == "\nlog lines lost because standard error was not read: 1\nnext\n"


@pytest.mark.long
def test_an_unread_log_costs_lines_and_nothing_else(tmp_path: Path, pipe: tuple[int, int]) -> None:
    read, write = pipe
    model = save_mlp(tmp_path / "mlp.onnx")
    command = [sys.executable, "-m", "halfserve", "serve", str(model), "--json", "--grpc-port", "0", "--no-http", *FLOAT32]
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
