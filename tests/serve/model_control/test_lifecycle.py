"""Health, reloads under load, and shutdown."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ngh2 import GoAwayReceived
from tritonclient.utils import InferenceServerException

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.model import Model
from halfserve.serve.model_control.control_options import ControlMode
from halfserve.serve.transports.grpc_framing import frame
from tests.models import save_mlp
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.model_control.controlled import ask, controlled_server, wait_for
from tests.serve.running_server import RunningServer, running_server
from tests.serve.transports.nghttp2.http2_peer import SERVER_LIVE, Http2Peer, call_headers, mlp_request

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with controlled_server(tmp_path, ControlMode.EXPLICIT) as running:
        yield running


@pytest.fixture
def health(server: RunningServer) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


def test_a_model_is_checked_by_name(server: RunningServer, health: health_pb2_grpc.HealthStub) -> None:
    statuses = [health.Check(asked("mlp"), timeout=60).status]
    server.run(server.core.load("mlp"))
    statuses.append(health.Check(asked("mlp"), timeout=60).status)
    server.run(server.core.unload("mlp"))
    statuses.append(health.Check(asked("mlp"), timeout=60).status)
    assert statuses == [NOT_SERVING, SERVING, NOT_SERVING]
    assert health.Check(asked(""), timeout=60).status == SERVING
    with pytest.raises(grpc.RpcError, match="'nope' is neither a service nor a model here"):
        health.Check(asked("nope"), timeout=60)


def test_watchers_get_changes_only(server: RunningServer, health: health_pb2_grpc.HealthStub, tmp_path: Path) -> None:
    watched = {name: health.Watch(asked(name), timeout=60) for name in ("mlp", "late", "")}
    assert {name: next(watch).status for name, watch in watched.items()} == {
        "mlp": NOT_SERVING,
        "late": UNKNOWN,
        "": SERVING,
    }
    server.run(server.core.load("mlp"))
    assert next(watched["mlp"]).status == SERVING
    server.run(server.core.load("mlp", '{"max_batch_size": 2}'))  # serves all the while
    server.run(server.core.unload("mlp"))
    assert next(watched["mlp"]).status == NOT_SERVING
    save_mlp(tmp_path / "late" / "1" / "model.onnx")
    server.run(server.core.load("late"))
    statuses = [next(watched["late"]).status]
    while statuses[-1] != SERVING:  # it may have been seen while it was loaded
        statuses.append(next(watched["late"]).status)
    assert statuses in ([SERVING], [NOT_SERVING, SERVING])
    server.call(server.core.retire)
    assert [next(watched[name]).status for name in ("late", "")] == [NOT_SERVING, NOT_SERVING]
    assert health.Check(asked(""), timeout=60).status == NOT_SERVING
    assert health.Check(asked("late"), timeout=60).status == NOT_SERVING


RELOADS = 20
CLIENTS = 4


class Load:
    """Clients that ask one after the other until they are stopped.

    Attributes:
        answers: what they got, and from which version.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._asked = threading.Condition()
        self.answers: list[tuple[str, tuple[float, ...]]] = []

    def run(self) -> None:
        x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
        with triton.InferenceServerClient(self._address) as client:
            while not self._stop.is_set():
                result = client.infer("mlp", [x], client_timeout=60)
                answer = (result.get_response().model_version, tuple(float(v) for v in result.as_numpy("y")[0]))
                with self._asked:
                    self.answers.append(answer)
                    self._asked.notify_all()

    def wait_for_more(self, count: int) -> None:
        """Until so many more answers have come."""
        with self._asked:
            enough = len(self.answers) + count
            assert self._asked.wait_for(lambda: len(self.answers) >= enough, 60)

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def under_load(address: str) -> Iterator[Load]:
    load = Load(address)
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(load.run) for _ in range(CLIENTS)]
        try:
            yield load
        finally:
            load.stop()
    for client in clients:
        client.result()  # raises what the client met


@pytest.mark.long
def test_twenty_reloads_fail_no_request(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT, load_at_start=("mlp",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        expected = tuple(ask(client))
        with under_load(server.address) as load:
            for reload in range(RELOADS):
                load.wait_for_more(2 * CLIENTS)
                if reload % 2:
                    client.load_model("mlp", config=f'{{"max_batch_size": {reload + 2}}}')  # the same version, another way
                else:
                    save_mlp(tmp_path / "mlp" / str(reload + 2) / "model.onnx")
                    client.load_model("mlp")
            load.wait_for_more(2 * CLIENTS)
    assert {answer for _, answer in load.answers} == {expected}
    assert {version for version, _ in load.answers} >= {"1", str(RELOADS)}


def test_a_broken_version_under_load_is_not_noticed_either(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (tmp_path / "mlp" / "2").mkdir()
    (tmp_path / "mlp" / "2" / "model.onnx").write_bytes(b"this is no model")
    specific = '{"version_policy": {"specific": {"versions": [1]}}}'
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.load_model("mlp", config=specific)
        with under_load(server.address) as load:
            for _ in range(5):
                load.wait_for_more(CLIENTS)
                with pytest.raises(InferenceServerException, match="mlp/2/model.onnx: is not"):
                    client.load_model("mlp", config="{}")
            load.wait_for_more(CLIENTS)
    assert {version for version, _ in load.answers} == {"1"}


def test_an_unloaded_model_answers_its_accepted_requests(tmp_path: Path) -> None:
    backend = HeldBackend(held=True)
    x = triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    with (
        running_server(lambda: [held_model(backend)]) as server,
        triton.InferenceServerClient(server.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        taken = pool.submit(client.infer, "held", [x])
        assert backend.entered.wait(60)
        (leaving,) = server.call(lambda: server.core.replace("held", []))
        assert [(m.version, m.state) for m in client.get_model_repository_index().models] == [("1", "UNLOADING")]
        with pytest.raises(InferenceServerException, match="model 'held' is not served now"):
            client.infer("held", [x])
        assert not leaving.done()
        backend.release.set()
        assert taken.result(60).as_numpy("y").tolist() == [[2]]
        wait_for(server, [("held", "1", "UNAVAILABLE", "unloaded")])
        assert leaving.done()


def living(kind: type) -> int:
    """The number of its objects. A compiled class has no weak references to tell of one."""
    return sum(type(found) is kind for found in gc.get_objects())  # isinstance() would wake lazy modules


def test_replaced_models_are_freed_by_reference_counting(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    with (
        controlled_server(tmp_path, ControlMode.EXPLICIT, load_at_start=("mlp",)) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        ask(client)
        backend = server.call(lambda: weakref.ref(server.core.model("mlp").backends[0]))
        gc.disable()
        try:
            before = living(Model)
            client.load_model("mlp", config='{"max_batch_size": 3}')
            ask(client)
            client.unload_model("mlp")
            client.load_model("mlp")
            server.call(lambda: None)
            assert backend() is None
            assert living(Model) == before
        finally:
            gc.enable()


ROOT = Path(__file__).parents[3]


@contextmanager
def serving(path: Path, **options: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.serve.model_control.server_program", str(path), json.dumps(options)]
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
            _, errors = process.communicate(timeout=500)
        assert (process.returncode, errors) == (code, "")


def test_a_lame_duck_leaves_when_its_time_is_up(repository: Path) -> None:
    with serving(repository, lame_duck_s=0.1) as process:
        line(process)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=500)
        assert (process.returncode, errors) == (0, "")


def test_a_call_that_crosses_the_goaway_is_computed(repository: Path) -> None:
    with serving(repository) as process, Http2Peer(f"127.0.0.1:{line(process)}") as client:
        assert client.status(client.greet().call(frame(b""), SERVER_LIVE)) == (0, "")
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
        assert process.wait(60) == 0


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
        _, errors = process.communicate(timeout=500)
        assert (process.returncode, errors) == (0, "requests were still running after 0.2 s; they end unanswered\n")


def test_a_signal_ends_a_server_that_is_still_loading(repository: Path) -> None:
    with serving(repository, hang=True) as process:
        assert line(process) == "running", "it is tried out before it serves"
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=500)
        assert (process.returncode, told, errors) == (0, "", "")
