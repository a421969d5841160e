"""Decoupled models that answer faster than their clients read."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from halfserve import Client
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.protocol.service import INFER_STREAM_PATH
from tests.serve.backends.python.python_models import save_python_model, serving
from tests.serve.engine.ensembles.configurations import ensemble, step
from tests.serve.ensemble_folders import save_ensemble
from tests.serve.running_server import TRANSPORTS
from tests.serve.test_server import serving as serve_process

MIB = 2**20
# x: number of responses, and their bytes. The request [0, 0] is answered by the number of responses that were sent.
CONFIG = """
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }\n"
ON_A_THREAD = 'parameters { key: "halfserve.python_isolation" value { string_value: "thread" } }\n'
FLOODS = """
class TritonPythonModel:
    sent = 0

    def execute(self, requests):
        for request in requests:
            number, size = map(int, request.inputs()[0].as_numpy())
            threading.Thread(target=self.answer, args=(request.get_response_sender(), number, size)).start()

    def answer(self, sender, number, size):
        if not number:
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([self.sent], np.float32))]), flags=1)
            return
        for at in range(number):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(size // 4, at, np.float32))]))
            self.sent += 1
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Reads the responses of "floods" one by one, itself or in a fork; y: the most responses that "floods" was ahead by, and all.
CALLER = """
from multiprocessing import Pool

def ask(number, size):
    x = pb_utils.Tensor("x", np.array([number, size], np.float32))
    call = pb_utils.InferenceRequest(model_name="floods", requested_output_names=["y"], inputs=[x])
    return (r.output_tensors()[0].as_numpy()[0] for r in call.exec(decoupled=True) if r.output_tensors())

def read_all(number, size):
    ahead, read = 0, 0
    for _ in ask(number, size):
        read += 1
        ahead = max(ahead, next(ask(0, 0)) - read)
    return ahead, read

class TritonPythonModel:
    def initialize(self, args):
        self.pool = Pool(1)

    def execute(self, requests):
        number, size, forks = requests[0].inputs()[0].as_numpy()
        found = self.pool.apply(read_all, (number, size)) if forks else read_all(number, size)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(found, np.float32))])]
"""
# What the transport, the sockets and a gRPC client hold of a stream, in responses of 1 MiB; 25 were seen, and 300 are all.
MOST_AHEAD = 40


@contextmanager
def reading(address: str, number: int, size: int, model: str = "floods") -> Iterator[Any]:
    """The responses to one request; each is read from the connection when it is asked for. Cancelled at the end."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[2])
    request.raw_input_contents.append(np.array([number, size], np.float32).tobytes())
    with grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)]) as channel:
        call = channel.stream_stream(INFER_STREAM_PATH, None, pb.ModelStreamInferResponse.FromString)
        responses = call(iter([request.SerializeToString()]))
        yield responses
        responses.cancel()


def value(response: pb.ModelStreamInferResponse) -> float:
    assert not response.error_message
    return float(np.frombuffer(response.infer_response.raw_output_contents[0], np.float32)[0])


def sent(client: Client) -> int:
    """The number of responses that the model has sent."""
    (answer, *_) = client.stream_infer("floods", [{"x": np.zeros(2, np.float32)}])
    return int(answer.outputs["y"][0])


def model_process(server: int) -> int:
    """The process of the server's one model, below the one that ends all of its processes together."""
    (parent,) = _children(server)
    (model,) = _children(parent)
    return model


def _children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def segments(process: int) -> tuple[int, int]:
    """The number of shared memory files that a process has open, and the bytes that it has mapped of them."""
    files = [str(file.readlink()) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()]
    mapped = [line.split()[0] for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "halfserve-tensors" in line]
    ends = [[int(end, 16) for end in places.split("-")] for places in mapped]
    return sum("halfserve-tensors" in file for file in files), sum(end - start for start, end in ends)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int, int]]:
    """A server in a process of its own: its address, its process, and the model's, neither of which may open 256 files."""
    save_python_model(folder, "floods", FLOODS, DECOUPLED)
    with serve_process(folder, "--trust-python-models", "--no-http") as (process, told):
        model = model_process(process.pid)
        for one in (process.pid, model):
            resource.prlimit(one, resource.RLIMIT_NOFILE, (256, 256))
        yield f"127.0.0.1:{told['grpc_port']}", process.pid, model


@pytest.mark.parametrize("size", [MIB, MIB // 2])
def test_large_responses_leave_neither_memory_nor_files_behind(tmp_path: Path, size: int) -> None:
    with served(tmp_path) as (address, *processes), reading(address, 300, size) as responses:
        assert [value(next(responses)) for _ in range(300)] == list(range(300))
        for process in processes:
            files, mapped = segments(process)
            assert files <= 16
            assert mapped <= 32 * MIB


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("isolation", ["", ON_A_THREAD])
def test_a_model_waits_for_a_slow_client(tmp_path: Path, transport: str, isolation: str) -> None:
    save_python_model(tmp_path, "floods", FLOODS, DECOUPLED + isolation)
    with serving(tmp_path, TRANSPORTS[transport]) as server, Client(server.address) as other:
        with reading(server.address, 300, MIB) as responses:
            for at in range(300):
                assert value(next(responses)) == at
                if at % 10 == 0:  # another request of the model is answered meanwhile
                    assert sent(other) - at <= MOST_AHEAD
        assert sent(other) == 300


def test_a_model_waits_for_a_slow_client_of_its_ensemble(tmp_path: Path) -> None:
    save_python_model(tmp_path, "floods", FLOODS, DECOUPLED)
    save_python_model(tmp_path, "twice")
    save_ensemble(
        tmp_path / "pipeline",
        ensemble(step("floods", "x=x", "y=t"), step("twice", "x=t", "y=y"), input="x:FP32:2", output="y:FP32:-1"),
        max_batch_size=0,
    )
    with serve_process(tmp_path, "--trust-python-models", "--no-http") as (_, told):
        address = f"127.0.0.1:{told['grpc_port']}"
        with Client(address) as other, reading(address, 100, MIB, "pipeline") as responses:
            for at in range(100):
                assert value(next(responses)) == 2 * at
                if at % 10 == 0:
                    assert sent(other) - at <= MOST_AHEAD


@pytest.mark.parametrize("forks", [False, True])
def test_a_model_waits_for_the_model_that_calls_it(tmp_path: Path, forks: bool) -> None:
    save_python_model(tmp_path, "floods", FLOODS, DECOUPLED)
    save_python_model(tmp_path, "caller", CALLER, CONFIG.replace("dims: [ 2 ]", "dims: [ 3 ]"))
    with serving(tmp_path) as server, Client(server.address) as client:
        ahead, read = client.infer("caller", {"x": np.array([50, MIB, forks], np.float32)})["y"]
    assert (read, ahead <= 3) == (50, True)


def test_a_model_waits_for_a_slow_client_of_rest(tmp_path: Path) -> None:
    save_python_model(tmp_path, "floods", FLOODS, DECOUPLED)
    with (
        serve_process(tmp_path, "--trust-python-models") as (_, told),
        Client(f"127.0.0.1:{told['grpc_port']}") as other,
        httpx.stream(
            "POST",
            f"http://127.0.0.1:{told['http_port']}/v2/models/floods/generate_stream",
            json={"x": [100, MIB // 4]},
            timeout=60,
        ) as events,
    ):
        lines = (line for line in events.iter_lines() if line)
        for at in range(100):
            assert json.loads(next(lines)[6:])["y"][0] == at
            if at % 10 == 0:
                assert sent(other) - at <= 2 * MOST_AHEAD


@pytest.mark.parametrize("isolation", ["", ON_A_THREAD])
def test_a_client_that_reads_nothing_holds_up_only_its_own_request(tmp_path: Path, isolation: str) -> None:
    save_python_model(tmp_path, "floods", FLOODS, DECOUPLED + isolation)
    with (
        serving(tmp_path) as server,
        reading(server.address, 300, MIB) as first,
        reading(server.address, 300, MIB) as second,
        reading(server.address, 40, MIB) as responses,
    ):
        assert value(next(first)) == value(next(second)) == 0
        assert [value(response) for response in responses if response.infer_response.outputs] == list(range(40))


def memory_mb(process: int, field: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def test_a_model_that_ignores_a_cancellation_holds_no_memory(tmp_path: Path) -> None:
    """Its sends neither wait, as nothing reads any more, nor keep what they send."""
    with served(tmp_path) as (address, server, model), Client(address) as other:
        assert sent(other) == 0
        before = memory_mb(server, "VmRSS"), memory_mb(model, "VmRSS")
        for process in (server, model):
            Path(f"/proc/{process}/clear_refs").write_text("5")  # the peak begins anew
        with reading(address, 500, MIB) as responses:
            assert value(next(responses)) == 0
        ends_s = time.monotonic() + 60
        while sent(other) < 500:
            assert time.monotonic() < ends_s, "the model never came to its end"
        grown = memory_mb(server, "VmHWM") - before[0], memory_mb(model, "VmHWM") - before[1]
        assert max(grown) < 100
        with reading(address, 3, MIB) as responses:
            assert [value(next(responses)) for _ in range(3)] == [0, 1, 2]
