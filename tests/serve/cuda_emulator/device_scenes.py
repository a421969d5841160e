"""A server's models and shared memory on two emulated devices; see scenes.py."""

from __future__ import annotations

import base64
import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve import Client
from halfserve.protos.model_config_pb2 import ModelInstanceGroup
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.cuda_driver import DRIVER_NAMES
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.execution.instance import Instance
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from tests.serve.backends.python.python_models import X_TO_Y, save_python_model, serving
from tests.serve.cuda_emulator.conftest import DEVICES
from tests.serve.cuda_emulator.copying_model import COLUMNS, log, rows, save
from tests.serve.cuda_emulator.owner import owner
from tests.serve.faults.test_worker_killed import HALFSERVE, PATIENT, started, worker_of
from tests.serve.running_server import WAIT_S, RunningServer, running_server

SIZE = 2 * COLUMNS * 4  # of a request of two rows
SLOW = 1e6  # bytes a second, so that copies of a request take longer than handing the next one to another device


def write_served(folder: Path, config: str = "") -> None:
    (folder / "m" / "1").mkdir(parents=True, exist_ok=True)
    save(folder / "m" / "1" / "model.onnx")
    (folder / "m" / "config.pbtxt").write_text(config)


def load_served(folder: Path, config: str = "") -> Model:
    write_served(folder, config)
    (files,) = find_models(folder)
    return load_model(files, OnnxRuntime(), DevicePlacement(), Defaults())


@contextmanager
def served(folder: Path, config: str = "") -> Iterator[tuple[RunningServer, Client]]:
    with (
        running_server(lambda: [load_served(folder, config)], shared_memory=True) as server,
        Client(server.address) as client,
    ):
        yield server, client


def used(device: ctypes.CDLL) -> list[int]:
    """Bytes of memory in use on each device."""
    gc.collect()
    return [device.emulated_used(number) for number in range(DEVICES)]


def devices_in(lines: Sequence[str]) -> set[int]:
    """The devices to which requests were copied."""
    return {int(line.startswith("device 1: ")) for line in lines if " to the device" in line}


def ask_many(client: Client, count: int) -> None:
    """Send requests of two rows at once, and check each answer."""

    def ask(number: int) -> None:
        asked = rows(2, 100 * number)
        assert client.infer("m", asked)["y"].ravel().tolist() == asked["x"].ravel().tolist()

    with ThreadPoolExecutor(count) as clients:
        list(clients.map(ask, range(count)))


def instances(server: RunningServer) -> Sequence[Instance]:
    (model,) = server.call(server.core.models)
    return model.batcher.instances


def test_a_model_has_a_copy_on_each_device_until_it_leaves(tmp_path: Path, device: ctypes.CDLL) -> None:
    before = used(device)
    with served(tmp_path) as (server, client):
        (group,) = client.model_config("m").instance_group
        assert (group.name, group.kind, group.count) == ("m", ModelInstanceGroup.KIND_GPU, 1)
        assert list(group.gpus) == [0, 1]
        assert len(instances(server)) == 2
        log(device)
        device.emulated_copy_rate(SLOW)
        ask_many(client, 16)
        assert devices_in(log(device)) == {0, 1}
        assert all(now > then for now, then in zip(used(device), before, strict=True))
    del server
    assert used(device) == before


def test_a_group_takes_the_devices_that_it_names(tmp_path: Path, device: ctypes.CDLL) -> None:
    before = used(device)
    with served(tmp_path, "instance_group { count: 2 kind: KIND_GPU gpus: 1 }") as (server, client):
        ask_many(client, 4)
        assert len(instances(server)) == 2
        assert devices_in(log(device)) == {1}
        assert used(device)[0] == before[0]


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"instance_group 'm_0' has gpus \[2\], but there are 2 CUDA devices here"):
        load_served(tmp_path, "instance_group { gpus: 2 }")


@pytest.mark.parametrize(("visible", "physical"), [("1", ["_1_"]), ("1,0", ["_1_", "_0_"]), ("0,7,1", ["_0_"]), ("-1", [])])
def test_hidden_devices_are_not_used(visible: str, physical: list[str]) -> None:
    program = """if True:
        from halfserve.serve.engine.cuda_driver import cuda_driver, device_count
        for number in range(device_count()):
            memory, handle = cuda_driver().allocate_shared(4, number)
            print(handle.decode())
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    handles = ran.stdout.split()
    assert len(handles) == len(physical)
    assert all(number in handle for number, handle in zip(physical, handles, strict=True))


KEEPS_SEQUENCES = """sequence_batching {
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
}"""


@pytest.mark.parametrize(
    ("config", "places"),
    [
        ("", ["GPU0", "GPU1"]),
        ("instance_group { gpus: 1 }", ["GPU1"]),
        ("instance_group { kind: KIND_CPU }", ["CPU0"]),
        (KEEPS_SEQUENCES, ["GPU0", "GPU1"]),
    ],
)
def test_a_python_model_has_a_process_for_each_device(tmp_path: Path, config: str, places: list[str]) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            place = args["model_instance_kind"] + args["model_instance_device_id"]
            open(os.path.join(args["model_repository"], "at_" + place), "w").close()

        def execute(self, requests):
            return []
    """
    save_python_model(tmp_path, "placed", code, X_TO_Y + config)
    with serving(tmp_path, placement=DevicePlacement()):
        assert sorted(path.name for path in tmp_path.glob("placed/at_*")) == [f"at_{place}" for place in places]


@pytest.mark.parametrize("code", [700, 999])
def test_a_lost_device_leaves_the_other_serving(tmp_path: Path, device: ctypes.CDLL, code: int) -> None:
    lost: list[str] = []
    with served(tmp_path) as (server, client):
        first, second = instances(server)
        for instance in (first, second):
            instance.recovery.on_lost_device = lost.append
        device.emulated_copy_rate(SLOW)
        device.emulated_fault(1, code)
        ask_many(client, 16)  # those of the lost device are computed by the other one
        server.until(lambda: bool(lost))
        assert f"CUDA failure {code}" in lost[0]
        assert (first.is_up, second.is_up) == (True, False)
        log(device)
        ask_many(client, 16)
        assert devices_in(log(device)) == {0}
        device.emulated_lose(1, 0)  # as if another process had it
        server.until(lambda: second.is_up)
        assert (first.restarts, second.restarts) == (0, 1)
        ask_many(client, 16)
        assert devices_in(log(device)) == {0, 1}


def test_a_supervised_server_gets_a_lost_device_back(tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda:
        pytest.skip("this torch brings the real CUDA runtime along, which hides the emulated one")
    models, fault = tmp_path / "models", tmp_path / "fault"
    write_served(models)
    monkeypatch.setenv("EMULATED_CUDA_FAULT", str(fault))
    options = ("--supervise", "--require-gpu", "--no-http", "--grpc-port", str(free_port))
    with started(*HALFSERVE, str(models), *options) as (process, _):
        with Client(f"127.0.0.1:{free_port}", timeout_s=WAIT_S, retries=PATIENT) as client:
            ask_many(client, 4)
            first = worker_of(process)
            (tmp_path / "written").write_text("1 999")
            (tmp_path / "written").rename(fault)
            while worker_of(process) == first:
                ask_many(client, 4)
            ask_many(client, 4)
            assert list(client.model_config("m").instance_group[0].gpus) == [0, 1]
        process.terminate()
        _, errors = process.communicate(timeout=WAIT_S)
    assert (process.returncode, fault.exists()) == (0, False)
    assert "m/1 instance 1: is taken out (the model failed on this request: CUDA failure 999" in errors
    assert "exit code 75: its device was lost; the next one starts now" in errors


@contextmanager
def registered(server: RunningServer, device_id: int) -> Iterator[tuple[triton.InferenceServerClient, Any]]:
    """Another process's memory on a device, which the server knows by the device's number."""
    size = 2 * SIZE
    with owner(DRIVER_NAMES[0], size, device_id) as memory, triton.InferenceServerClient(server.address) as client:
        client.register_cuda_shared_memory(str(device_id), base64.b64encode(memory.handle), device_id, size)
        yield client, memory


def infer_from(client: triton.InferenceServerClient, device_id: int) -> None:
    x, y = triton.InferInput("x", (2, COLUMNS), "FP32"), triton.InferRequestedOutput("y")
    x.set_shared_memory(str(device_id), SIZE)
    y.set_shared_memory(str(device_id), SIZE, offset=SIZE)
    client.infer("m", [x], outputs=[y])


def test_tensors_of_each_device_outlive_the_other_one(tmp_path: Path, device: ctypes.CDLL) -> None:
    with served(tmp_path) as (server, _), registered(server, 0) as (_, zero), registered(server, 1) as (client, one):
        for number, memory in enumerate((zero, one)):
            x = np.arange(number, number + 2 * COLUMNS, dtype=np.float32)
            memory.write(0, x.tobytes())
            infer_from(client, number)
            assert memory.read(SIZE, SIZE) == x.tobytes()
        assert {"cuMemcpyDtoH", "device 1: cuMemcpyDtoH"} <= set(log(device))
        lost: list[str] = []
        server.service.memory.on_lost_device = lost.append
        device.emulated_lose(1, 700)
        with pytest.raises(InferenceServerException, match="CUDA device 1, which holds shared memory region '1', was lost"):
            infer_from(client, 1)
        server.until(lambda: bool(lost))
        assert instances(server)[0].is_up, "no batch of its own has failed"
        infer_from(client, 0)
        device.emulated_lose(1, 0)
        client.unregister_cuda_shared_memory()


def test_memory_of_another_device_needs_peer_access(tmp_path: Path, device: ctypes.CDLL) -> None:
    with served(tmp_path) as (_, client), owner(DRIVER_NAMES[0], SIZE, 1) as memory:
        client.register_cuda_region("peer", memory.handle, SIZE, device_id=0)
        client.unregister_cuda_region("peer")
        device.emulated_refuse_peers(1)
        with pytest.raises(Exception, match=r"peer access is not supported between these two devices \(CUDA error 217\)"):
            client.register_cuda_region("peer", memory.handle, SIZE, device_id=0)
        assert client.infer("m", rows(2))["y"].size == 2 * COLUMNS
