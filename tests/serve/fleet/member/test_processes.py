"""`halfserve serve --processes 2`: two servers that answer as one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from halfserve import Client, InvalidRequest, RetryPolicy, cli
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.channel_settings import Tls
from halfserve.serve.security.roles import Role
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.listening import BindError
from tests.models import FLOAT32, save_mlp, save_picky
from tests.serve.security.guarded import Certificates, write_tokens

T = TypeVar("T")
HOST, WAIT_S = "127.0.0.1", 60.0
HALFSERVE = [sys.executable, "-m", "halfserve", "serve"]
X = np.ones((1, 64), np.float16)
PATIENT = RetryPolicy(initial_backoff_s=0.05, max_backoff_s=0.2, wait_for_server=True)


class Processes:
    """Two servers behind one port, and connections to both."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], clients: list[Client]) -> None:
        self.process = process
        self.ready = ready
        self.clients = clients

    def page(self, port: str, path: str, data: bytes | None = None) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self.ready[port]}{path}", data, timeout=WAIT_S) as answer:
            text: str = answer.read().decode()
        return text

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", self.page("metrics_port", "/metrics"), re.MULTILINE)
        return sum(map(float, values))

    def workers(self) -> list[int]:
        """Their process numbers, the oldest first."""
        return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def agree(self, ask: Callable[[Client], T]) -> T:
        """What each connection gets: it must be the same."""
        answers = [ask(client) for client in self.clients]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]


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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    repository = tmp_path_factory.mktemp("members")
    save_mlp(repository / "mlp" / "1" / "model.onnx")
    save_picky(repository / "picky" / "1" / "model.onnx")
    options = ("--model-control", "explicit", "--load-model", "mlp", "--shared-memory", "--warm-up-seconds", "0")
    with processes(repository, *options) as found:
        yield found


def rows(client: Client) -> int:
    (counters,) = client.statistics("mlp")
    assert counters.inference_stats.success.count == counters.execution_count
    return int(counters.inference_count)


def test_connections_are_spread_and_counters_are_sums(served: Processes) -> None:
    before = served.agree(rows)
    sent = [len([client.infer("mlp", {"x": X}) for _ in range(number)]) for number, client in enumerate(served.clients, 1)]
    assert served.agree(rows) == before + sum(sent)
    listed = json.loads(served.page("http_port", "/v2/models/stats"))["model_stats"]
    assert [one["inference_count"] for one in listed if one["name"] == "mlp"] == [served.agree(rows)]
    assert served.metric("nv_inference_count") == served.agree(rows)
    assert served.metric("nv_inference_exec_count") == served.metric("halfserve_batch_rows_count")
    assert served.metric("halfserve_processes") == 2
    assert served.metric("halfserve_ready") == 1
    assert served.metric("halfserve_connections") >= len(served.clients)


def test_a_model_is_loaded_and_unloaded_everywhere(served: Processes) -> None:
    def states(client: Client) -> dict[str, str]:
        return {one.name: one.state for one in client.models()}

    first, second = served.clients[:2]
    first.load_model("picky")
    assert served.agree(lambda client: client.is_ready("picky"))
    assert served.agree(states) == {"mlp": "READY", "picky": "READY"}
    for client in served.clients:
        client.infer("picky", {"i": np.zeros((1, 1), np.int64)})
    assert served.page("http_port", "/v2/models/picky/ready") == "", "its status says that it is ready"
    second.unload_model("picky")
    assert not served.agree(lambda client: client.is_ready("picky"))
    assert served.agree(states) == {"mlp": "READY", "picky": "UNAVAILABLE"}


def test_what_one_refuses_no_other_one_does(served: Processes) -> None:
    with pytest.raises(InvalidRequest, match="log_verbose_level is 'loud'"):
        served.clients[0].log_settings(log_verbose_level="loud")
    assert served.agree(lambda client: client.log_settings()["log_verbose_level"]) == 0


def test_settings_and_shared_memory_hold_everywhere(served: Processes) -> None:
    served.clients[0].log_settings(access_log_every=7)
    assert served.agree(lambda client: client.log_settings()["access_log_every"]) == 7
    before = set(served.clients[0].shared_regions())
    with served.clients[1].shared_region(X.nbytes):
        assert served.agree(lambda client: len(set(client.shared_regions()) - before)) == 1
    assert served.agree(lambda client: set(client.shared_regions())) == before


WAITS = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        Path("FOLDER/begun").touch()
        while not Path("FOLDER/end").exists():
            time.sleep(0.01)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
WAITS_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP16 dims: -1 }
output { name: "y" data_type: TYPE_FP16 dims: -1 }
"""


@pytest.mark.long
def test_a_region_that_one_process_uses_stays_registered_in_all(tmp_path: Path) -> None:
    model = tmp_path / "models" / "waits" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text(WAITS.replace("FOLDER", str(tmp_path)))
    (model.parent.parent / "config.pbtxt").write_text(WAITS_CONFIG)
    with processes(tmp_path / "models", "--trust-python-models", "--shared-memory") as served:
        first = served.clients[0]
        with first.shared_region(4) as used, first.shared_region(4) as free, ThreadPoolExecutor() as threads:
            shared = used.array((2,), np.float16)
            shared[...] = 3
            answer = threads.submit(first.infer, "waits", {"x": shared})
            try:
                while not (tmp_path / "begun").exists():
                    assert not answer.done(), answer.result()
                for name in (used.name, ""):
                    for client in served.clients:
                        assert unregister(client.address, name) is grpc.StatusCode.INTERNAL
                        assert used.name in served.agree(lambda one: set(one.shared_regions()))
                assert free.name not in served.agree(lambda one: set(one.shared_regions()))
            finally:
                (tmp_path / "end").touch()
            np.testing.assert_array_equal(answer.result()["y"], [3, 3])
            for client in served.clients:
                np.testing.assert_array_equal(client.infer("waits", {"x": shared})["y"], [3, 3])
            assert unregister(first.address, used.name) is grpc.StatusCode.OK
            assert not served.agree(lambda one: set(one.shared_regions()))


def unregister(address: str, name: str) -> grpc.StatusCode:
    """The status of unregistering, over a connection of its own."""
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryUnregister")
        try:
            call(pb.SystemSharedMemoryUnregisterRequest(name=name).SerializeToString(), timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_a_process_that_is_killed_is_replaced_by_one_that_knows_what_it_knew(served: Processes) -> None:
    first, second = served.clients[0], served.clients[-1]
    first.load_model("picky")
    first.log_settings(access_log_every=9)
    restarts = served.metric("halfserve_worker_restarts_total")
    with second.shared_region(X.nbytes) as region:
        shared = region.array(X.shape, X.dtype)
        shared[...] = X
        killed = served.workers()[0]
        os.kill(killed, signal.SIGKILL)
        for client in served.clients:  # those of the other process notice nothing, and these reconnect
            np.testing.assert_array_equal(client.infer("mlp", {"x": X})["y"], first.infer("mlp", {"x": X})["y"])
        while served.metric("halfserve_processes") < 2:
            assert served.process.poll() is None
        assert killed not in served.workers()
        assert served.metric("halfserve_worker_restarts_total") == restarts + 1
        with Client(first.address, timeout_s=WAIT_S) as newcomer:  # of the process with the fewest connections
            assert newcomer.is_ready("picky")
            assert newcomer.log_settings()["access_log_every"] == 9
            np.testing.assert_array_equal(newcomer.infer("mlp", {"x": shared})["y"], first.infer("mlp", {"x": X})["y"])
            assert rows(newcomer) == served.agree(rows)
    first.unload_model("picky")


@pytest.mark.long
def test_tls_and_tokens_hold_for_all_and_a_signal_ends_all(tmp_path: Path) -> None:
    certificates, root = Certificates(tmp_path), tmp_path / "root.pem"
    root.write_bytes(certificates.trusted)
    made = (
        new_token("boss", [Role.ADMIN]),
        new_token("tenant", [Role.INFER], models=["m"]),
        new_token("other", [Role.INFER], models=["n"]),
    )
    boss, tenant, other = write_tokens(tmp_path / "tokens", *made)
    files = ("--tls-cert", certificates.options.certificate, "--tls-key", certificates.options.key)
    model = save_mlp(tmp_path / "m.onnx")
    log = ("--access-log", "all", "--access-log-file", tmp_path / "access.log")
    options = (*files, *log, "--token-file", tmp_path / "tokens", "--no-http")
    tls = Tls(authorities=root)
    with processes(model, *options, tls=tls, token=boss) as served:
        for client in served.clients:
            client.infer("m", {"x": X})
        for token, seen in ((boss, [len(served.clients)]), (tenant, [len(served.clients)]), (other, [])):
            with Client(served.clients[0].address, tls=tls, token=token, timeout_s=WAIT_S) as client:
                assert [counters.inference_count for counters in client.statistics()] == seen
                assert [one.name for one in client.models()] == ["m"] * len(seen)
        served.process.terminate()
        _, errors = served.process.communicate(timeout=WAIT_S)
    assert served.process.returncode == 0
    lines = (tmp_path / "access.log").read_text().splitlines()
    assert sorted(json.loads(line)["process"] for line in lines) == [1, 1, 2, 2]
    assert [line for line in errors.splitlines() if not re.match(r"\[2\] \S+ INFO serving, ready in", line)] == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--processes", "0"], "--processes is '0', expected 'auto' or a whole number from 1"),
        (["--processes", "all"], "--processes is 'all', expected 'auto' or a whole number from 1"),
        (["--processes", "2", "--transport", "grpcio"], "--processes 2 needs --transport nghttp2"),
    ],
)
def test_wrong_usage_says_what_to_do(options: list[str], text: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "x", *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


def test_more_processes_than_memory_is_one_line() -> None:
    with pytest.raises(Exception, match=r"--processes 999999 needs \d+ MiB before any model is loaded, and \d+ MiB are"):
        CliRunner().invoke(cli.app, ["serve", "x", "--processes", "999999"], catch_exceptions=False)


def test_a_port_of_another_program_is_one_line() -> None:
    with socket.create_server((HOST, 0)) as taken:
        command = ["serve", "x", "--processes", "2", "--grpc-port", str(taken.getsockname()[1])]
        with pytest.raises(BindError, match="Address already in use"):
            CliRunner().invoke(cli.app, command, catch_exceptions=False)


def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    command = [*HALFSERVE, str(tmp_path / "broken.onnx"), "--processes", "2", "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "broken.onnx" in done.stderr
