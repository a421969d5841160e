"""Tensors on a CUDA device, as Triton's clients share them: their memory belongs to another process, as a client's does."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve import Client
from halfserve.serve.client.errors import InvalidRequest
from halfserve.serve.engine.cuda_driver import DRIVER_NAMES, HANDLE_BYTES
from halfserve.serve.protocol import shared_memory_regions
from tests.serve.conftest import load_repository
from tests.serve.cuda_emulator.library import LIBRARIES, driver_of, library_path
from tests.serve.cuda_emulator.owner import Owner, owner
from tests.serve.running_server import MakeTransport, running_server

NAME, SIZE = "on the device", 148  # 64 fp16 inputs, then room for ten fp16 outputs


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = library_path(request.param, tmp_path_factory.mktemp("driver"))
    driver = driver_of(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory_regions, "cuda_driver", lambda: driver)
        yield path


@pytest.fixture(scope="module")
def client(library: str, repository: Path, transport: MakeTransport) -> Iterator[triton.InferenceServerClient]:
    del library
    with connected(repository, transport) as client:
        yield client


@pytest.fixture
def region(library: str, client: triton.InferenceServerClient) -> Iterator[Owner]:
    with owner(library, SIZE) as memory:
        client.register_cuda_shared_memory(NAME, base64.b64encode(memory.handle), 0, SIZE)
        yield memory
        client.unregister_cuda_shared_memory()


@contextmanager
def connected(repository: Path, transport: MakeTransport) -> Iterator[triton.InferenceServerClient]:
    """A server that takes shared memory, and a client of it."""
    with (
        running_server(partial(load_repository, repository), transport, shared_memory=True) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        yield client


def placed(offset: int = 0) -> tuple[list[triton.InferInput], list[triton.InferRequestedOutput]]:
    x, y = triton.InferInput("x", (1, 64), "FP16"), triton.InferRequestedOutput("y")
    x.set_shared_memory(NAME, 128, offset=offset)
    y.set_shared_memory(NAME, 20, offset=128)
    return [x], [y]


def test_inputs_and_outputs_on_the_device(client: triton.InferenceServerClient, region: Owner) -> None:
    inputs, outputs = placed()
    for scale in (1, -2, 0, 3):  # from the second one on, the request is known by its bytes
        x = np.linspace(-scale, scale, 64, dtype=np.float16).reshape(1, 64)
        sent = client.infer("mlp", [triton.InferInput("x", (1, 64), "FP16").set_data_from_numpy(x)]).as_numpy("y")
        region.write(0, x.tobytes())
        result = client.infer("mlp", inputs, outputs=outputs)
        assert result.get_output("y").parameters["shared_memory_byte_size"].int64_param == 20
        assert list(result.get_response().raw_output_contents) == [b""]
        assert region.read(128, 20) == sent.tobytes()


def test_a_benchmark_leaves_its_tensors_on_the_device(
    library: str, repository: Path, transport: MakeTransport, tmp_path: Path
) -> None:
    if library != DRIVER_NAMES[0]:
        (tmp_path / DRIVER_NAMES[0]).symlink_to(library)
    load = ("--requests", "20", "--concurrency", "4", "--warmup", "0", "--shared-memory", "cuda", "--json")
    with running_server(partial(load_repository, repository), transport, shared_memory=True) as server:
        command = [sys.executable, "-m", "halfserve", "bench", "mlp", "--address", server.address, *load]
        path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
        ran = subprocess.run(
            command, env={**os.environ, "LD_LIBRARY_PATH": path}, capture_output=True, text=True, timeout=500, check=False
        )
        assert ran.returncode == 0, ran.stderr
        (level,) = json.loads(ran.stdout)["levels"]
        assert (level["requests"], level["errors"]) == (20, 0)
        with triton.InferenceServerClient(server.address) as client:
            assert not client.get_cuda_shared_memory_status().regions
            counted = sum(one.inference_count for one in client.get_inference_statistics("mlp").model_stats)
        assert counted == 22, "two more before the load: one sent, one in shared memory"


def test_our_client_registers_memory_and_says_what_is_wrong_with_it(
    library: str, repository: Path, transport: MakeTransport
) -> None:
    with (
        owner(library, SIZE) as memory,
        running_server(partial(load_repository, repository), transport, shared_memory=True) as server,
        Client(server.address) as client,
        triton.InferenceServerClient(server.address) as other,
    ):
        client.register_cuda_region(NAME, memory.handle, SIZE)
        assert list(other.get_cuda_shared_memory_status().regions) == [NAME]
        client.unregister_cuda_region(NAME)
        client.unregister_cuda_region(NAME)
        assert not other.get_cuda_shared_memory_status().regions
        for name, handle, size in ((NAME, "text", SIZE), (NAME, memory.handle, -1), (7, memory.handle, SIZE)):
            with pytest.raises(InvalidRequest, match="expected a name, the 64 bytes of a cudaIpcMemHandle_t"):
                client.register_cuda_region(name, handle, size)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="raw_handle of 3 bytes"):
            client.register_cuda_region(NAME, b"abc", SIZE)


def test_status_tells_what_is_registered(client: triton.InferenceServerClient, region: Owner) -> None:
    del region
    assert "cuda_shared_memory" in client.get_server_metadata().extensions
    status = client.get_cuda_shared_memory_status(NAME).regions[NAME]
    assert (status.name, status.device_id, status.byte_size) == (NAME, 0, SIZE)
    client.unregister_system_shared_memory()  # which this is not
    assert list(client.get_cuda_shared_memory_status().regions) == [NAME]
    assert not client.get_system_shared_memory_status().regions
    client.unregister_cuda_shared_memory(NAME)
    assert not client.get_cuda_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*is not registered"):
        client.get_cuda_shared_memory_status(NAME)
    with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*is not registered"):
        client.infer("mlp", placed()[0])


def test_what_cannot_be_registered_says_why(client: triton.InferenceServerClient, region: Owner) -> None:
    handle = region.handle
    for given, device, size, text in (
        (handle[:63], 0, SIZE, "raw_handle of 63 bytes, device_id 0 and byte_size 148; expected the 64 bytes"),
        (handle, -1, SIZE, "device_id -1"),
        (handle, 99, SIZE, r"device_id 99 .* expected .* one of \d+ devices"),
        (handle, 0, 0, "at least one byte"),
        (handle, 0, 1 << 40, r"region 'c' has \d+ bytes, its CUDA memory \d+; register less"),
        (b"\xff" * HANDLE_BYTES, 0, SIZE, r"cannot be opened on device 0: .*\(CUDA error \d+\); expected the handle of memory"),
    ):
        with pytest.raises(InferenceServerException, match=f"INVALID_ARGUMENT.*{text}"):
            client.register_cuda_shared_memory("c", base64.b64encode(given), device, size)
    with pytest.raises(InferenceServerException, match="is registered already"):
        client.register_cuda_shared_memory(NAME, base64.b64encode(handle), 0, SIZE)
    assert list(client.get_cuda_shared_memory_status().regions) == [NAME]


def test_what_is_wrong_with_a_place_is_said(client: triton.InferenceServerClient, region: Owner) -> None:
    del region
    with pytest.raises(InferenceServerException, match=r"bytes 128 to 256 are not inside of shared memory region"):
        client.infer("mlp", placed(offset=128)[0])


def test_without_a_device_it_says_what_else_there_is(
    repository: Path, transport: MakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory_regions, "cuda_driver", lambda: None)
    with connected(repository, transport) as client:
        assert "cuda_shared_memory" not in client.get_server_metadata().extensions
        client.unregister_cuda_shared_memory()
        assert not client.get_cuda_shared_memory_status().regions
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED.*no CUDA device; use system shared memory, or send"):
            client.register_cuda_shared_memory("c", base64.b64encode(bytes(HANDLE_BYTES)), 0, 100)
