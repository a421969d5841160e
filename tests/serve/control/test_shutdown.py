"""How a server process takes its leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ngh2 import GoAwayReceived

from protos import inference_pb2 as pb
from serve.transports.grpc_framing import frame
from tests.models import save_mlp
from tests.serve.control.controlled import ask
from tests.serve.transports.nghttp2.calls import SERVER_LIVE, mlp_request
from tests.serve.transports.nghttp2.http2_peer import Http2Peer, call_headers

ROOT = Path(__file__).parents[3]
NOT_SERVING = 2


@contextmanager
def serving(path: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.serve.control.server_program", str(path), json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    return tmp_path


@pytest.mark.parametrize(("name", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_lame_duck_still_answers_and_a_second_signal_ends_it(repository: Path, name: signal.Signals, code: int) -> None:
    with serving(repository, lame_duck_s=600) as process:
        address = f"127.0.0.1:{line(process)}"
        with grpc.insecure_channel(address) as channel, triton.InferenceServerClient(address) as client:
            watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
            assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
            process.send_signal(name)
            assert next(watched).status == NOT_SERVING
            assert not client.is_server_ready()
            assert not client.is_model_ready("mlp")
            assert client.is_server_live()
            assert len(ask(client)) == 10
            process.send_signal(name)
            _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (code, "")


def test_a_lame_duck_leaves_when_its_time_is_up(repository: Path) -> None:
    with serving(repository, lame_duck_s=0.1) as process:
        line(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")


def test_a_call_that_crosses_the_word_to_go_is_computed(repository: Path) -> None:
    with serving(repository) as process, Http2Peer(f"127.0.0.1:{line(process)}") as client:
        live = client.greet().http2.send_request(call_headers(SERVER_LIVE))
        client.http2.send_data(live, frame(b""), end_stream=True)
        client.push()
        assert client.status(live) == (0, "")
        stream = client.http2.send_request(call_headers())
        client.http2.send_data(stream, frame(mlp_request()), end_stream=True)
        crossing = client.http2.data_to_send()
        process.send_signal(signal.SIGTERM)
        while not any(isinstance(event, GoAwayReceived) for event in client.events):
            client.http2.receive_data(client.socket.recv(65536))
            client.events += client.http2.events()
        client.socket.sendall(crossing)
        client.push()
        assert client.status(stream) == (0, "")
        assert process.wait(20) == 0


def test_a_model_that_never_answers_does_not_hold_the_server_up(repository: Path) -> None:
    (repository / "mlp" / "config.pbtxt").write_text('parameters { key: "halfserve.warm_up" value { string_value: "off" } }')
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[np.ones(64, np.float16).tobytes()])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    with (
        serving(repository, hang=True, drain_s=0.2) as process,
        grpc.insecure_channel(f"127.0.0.1:{line(process)}") as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        waiting = infer.future(request.SerializeToString(), timeout=60)
        assert line(process) == "running"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as ended:
            waiting.result(60)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "requests were still running after 0.2 s; they end unanswered\n")


def test_a_signal_ends_a_server_that_is_still_loading(repository: Path) -> None:
    with serving(repository, hang=True) as process:
        assert line(process) == "running", "it is tried out before it serves"
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=20)
        assert (process.returncode, told, errors) == (0, "", "")
