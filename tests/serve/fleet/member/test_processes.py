"""`halfserve serve --processes 2`: two servers that answer as one."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from halfserve import Client, cli
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.channel_settings import Tls
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.tokens import new_token
from halfserve.serve.transports.listening import BindError
from tests.models import save_mlp
from tests.serve.fleet.fleet import WAIT_S, X, infer, rows
from tests.serve.fleet.local_processes import HALFSERVE, HOST, Processes, processes
from tests.serve.security.guarded import Certificates, write_tokens


def test_connections_are_spread_and_each_batch_is_counted(two_processes: Processes) -> None:
    def batches() -> tuple[float, float]:
        return two_processes.metric("nv_inference_exec_count"), two_processes.metric("halfserve_batch_rows_count")

    before = batches()
    for client in two_processes.clients:
        infer(client)
    assert batches() == tuple(count + len(two_processes.clients) for count in before)
    assert two_processes.metric("halfserve_ready") == 1
    assert two_processes.metric("halfserve_connections") >= len(two_processes.clients)


def test_shared_memory_holds_everywhere(two_processes: Processes) -> None:
    before = set(two_processes.clients[0].shared_regions())
    with two_processes.clients[1].shared_region(X.nbytes):
        assert two_processes.agree(lambda client: len(set(client.shared_regions()) - before)) == 1
    assert two_processes.agree(lambda client: set(client.shared_regions())) == before


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
def test_a_region_that_one_process_uses_ends_with_its_request(tmp_path: Path) -> None:
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
                for client in served.clients:
                    assert unregister(client.address, "") is grpc.StatusCode.OK
                seen = [set(client.shared_regions()) for client in served.clients]
                assert free.name not in set[str]().union(*seen)
                assert used.name in set[str]().union(*seen)
            finally:
                (tmp_path / "end").touch()
            np.testing.assert_array_equal(answer.result()["y"], [3, 3])
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


@pytest.mark.long
def test_a_process_that_is_killed_is_replaced_by_one_that_knows_what_it_knew(two_processes: Processes) -> None:
    first, second = two_processes.clients[0], two_processes.clients[-1]
    first.load_model("picky")
    first.log_settings(access_log_every=9)
    restarts = two_processes.metric("halfserve_worker_restarts_total")
    with second.shared_region(X.nbytes) as region:
        shared = region.array(X.shape, X.dtype)
        shared[...] = X
        two_processes.lose_one(infer)
        for client in two_processes.clients:  # those of the other process notice nothing, and these reconnect
            np.testing.assert_array_equal(infer(client), infer(first))
        assert two_processes.metric("halfserve_worker_restarts_total") == restarts + 1
        with Client(first.address, timeout_s=WAIT_S) as newcomer:  # of the process with the fewest connections
            assert newcomer.is_ready("picky")
            assert newcomer.log_settings()["access_log_every"] == 9
            np.testing.assert_array_equal(newcomer.infer("mlp", {"x": shared})["y"], infer(first))
            assert rows(newcomer) == two_processes.agree(rows)


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


@pytest.mark.long
def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    command = [*HALFSERVE, str(tmp_path / "broken.onnx"), "--processes", "2", "--grpc-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "broken.onnx" in done.stderr
