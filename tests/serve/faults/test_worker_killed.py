"""`halfserve serve --supervise`: workers that end, and a supervisor that does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from halfserve import Client, ClientError, RetryPolicy, ServerUnavailable
from halfserve.cli import main
from tests.models import save_mlp, save_picky
from tests.serve.faults.server_process import ROOT, WAIT_S, under_load

pytestmark = pytest.mark.long

HALFSERVE = [sys.executable, "-m", "halfserve", "serve"]
SMALL = ["--supervise", "--cpu", "--threads", "1", "--grpc-port", "0"]
PATIENT = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)
IMPATIENT = RetryPolicy(retries=1, initial_backoff_s=0.1)
KILLS = 2


@contextmanager
def started(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and the first line that it prints; it and its workers are ended."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.kill()


def worker_of(process: subprocess.Popen[str]) -> int:
    """The number of the worker's process; it may be there in a moment only."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (found := children.read_text().split()):
        assert process.poll() is None
    return int(found[0])


def kill(pid: int) -> None:
    """Returns once the process computes and answers no more."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass


def page(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
        text: str = answer.read().decode()
    return text


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    save_mlp(folder / "mlp" / "1" / "model.onnx")
    save_picky(folder / "fragile" / "1" / "model.onnx")
    return folder


def test_workers_that_are_killed_under_load_cost_patient_clients_nothing(repository: Path, tmp_path: Path) -> None:
    admin = tmp_path / "admin"
    with started(*HALFSERVE, str(repository), *SMALL, "--json", "--admin-socket", str(admin)) as (process, line):
        ready = json.loads(line)
        address = f"127.0.0.1:{ready['grpc_port']}"
        with (
            under_load([address], askers=2, streams=0, retry=PATIENT) as load,
            under_load([address], askers=1, streams=0, retry=IMPATIENT, may_refuse=True) as others,
        ):
            for _ in range(KILLS):
                kill(worker_of(process))
                assert json.loads(page(ready["http_port"], "/v2/models/mlp"))["name"] == "mlp"  # waits, and is not refused
                load.wait_for_more(50)
                others.wait_for_more(50)
        assert {type(error) for error in others.refused} <= {ServerUnavailable}
        assert f"halfserve_worker_restarts_total {KILLS}" in page(ready["metrics_port"], "/metrics")
        with Client(f"unix:{admin}", timeout_s=WAIT_S) as client:
            assert client.is_live()
        process.terminate()
        told, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, told, admin.exists()) == (0, "", False)
    # Where nvidia-ml-py is installed, and no driver, the server says that too.
    lines = [line for line in errors.splitlines() if " WARNING " in line]
    ends, starts = lines[::2], lines[1::2]
    assert len(lines) == 2 * KILLS
    assert all("SIGKILL; out of memory, or by hand; the next one starts" in end for end in ends)
    assert [start.split("; ")[1] for start in starts] == [f"restarts: {number + 1}" for number in range(KILLS)]
    assert "Traceback" not in errors


def test_the_supervisors_end_ends_its_worker_and_frees_the_ports(repository: Path, free_port: int) -> None:
    with started(*HALFSERVE, str(repository), *SMALL, "--grpc-port", str(free_port), "--no-http") as (process, _):
        with Client(f"127.0.0.1:{free_port}", timeout_s=WAIT_S, retries=0) as client:
            assert client.is_live()
            process.kill()
            process.wait(WAIT_S)
            assert process.stderr is not None
            # Up to the end of standard error: the worker, which had it open too, is gone.
            assert process.stderr.read().endswith(
                "the supervisor has ended; what was taken is answered, and this server ends too\n"
            )
        socket.create_server(("127.0.0.1", free_port)).close()


def test_a_process_that_has_lost_its_device_is_replaced(repository: Path) -> None:
    with started(sys.executable, "-m", "tests.serve.faults.supervised_program", str(repository)) as (process, line):
        address = f"127.0.0.1:{line.strip()}"
        with Client(address, timeout_s=WAIT_S, retries=0) as client:
            assert pick(client, 1) == 20.0
            assert pick(client, -1) == "UNAVAILABLE"  # the model cannot be loaded again
        with Client(address, timeout_s=WAIT_S, retries=PATIENT) as client:
            assert pick(client, 0) == 10.0
        process.terminate()
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "a device computes for this process no more; another process takes over" in errors
    assert "exit code 75: its device was lost; the next one starts now" in errors


def pick(client: Client, index: int) -> float | str:
    try:
        return float(client.infer("fragile", {"i": np.array([[index]])})["y"][0, 0])
    except ClientError as error:
        return error.code


def test_a_first_worker_that_cannot_serve_is_the_end_of_it() -> None:
    command = [*HALFSERVE, "/no/such/place", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "halfserve serve: /no/such/place: not found; expected a model repository folder or an .onnx file\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--transport", "grpcio"], 2, "--supervise needs --transport nghttp2: grpcio cannot take over sockets"),
        (["--host", "8.8.8.8"], 1, "cannot listen on 8.8.8.8:0: Cannot assign requested address; choose another --grpc-port"),
        (["--admin-socket", "/no/such/folder/a"], 1, "cannot listen on /no/such/folder/a: No such file or directory; choose"),
    ],
)
def test_usage_errors_say_what_to_do(arguments: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "x", *SMALL, *arguments])
    out, errors = capsys.readouterr()
    assert (ended.value.code, out) == (code, "")
    assert text in " ".join(errors.replace("│", " ").split())
