"""Tensors in system shared memory, as Triton's clients use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from halfserve.serve.protocol.shared_memory_regions import FOLDER, SharedMemoryMode
from tests.serve.conftest import load_repository
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.running_server import MakeTransport, running_server

NAME = "halfserve_test_region"


@pytest.fixture(scope="module", params=SharedMemoryMode)
def mode(request: pytest.FixtureRequest) -> SharedMemoryMode:
    return SharedMemoryMode(request.param)


@pytest.fixture(scope="module")
def client(repository: Path, transport: MakeTransport, mode: SharedMemoryMode) -> Iterator[triton.InferenceServerClient]:
    models = partial(load_repository, repository)
    with (
        running_server(models, transport, shared_memory=True, shared_memory_mode=mode) as server,
        triton.InferenceServerClient(server.address) as connected,
    ):
        yield connected


@pytest.fixture
def region(client: triton.InferenceServerClient) -> Iterator[Any]:
    """64 fp16 inputs, then room for ten fp16 outputs."""
    handle = shm.create_shared_memory_region(NAME, f"/{NAME}", 148)
    client.register_system_shared_memory(NAME, f"/{NAME}", 148)
    yield handle
    client.unregister_system_shared_memory()
    shm.destroy_shared_memory_region(handle)


def test_inputs_and_outputs_in_shared_memory(client: triton.InferenceServerClient, region: Any) -> None:
    x = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float16)
    sent = client.infer("mlp", [triton.InferInput("x", (1, 64), "FP16").set_data_from_numpy(x)]).as_numpy("y")
    shm.set_shared_memory_region(region, [x])
    x_shared, y_shared = triton.InferInput("x", (1, 64), "FP16"), triton.InferRequestedOutput("y")
    x_shared.set_shared_memory(NAME, 128)
    y_shared.set_shared_memory(NAME, 20, offset=128)
    result = client.infer("mlp", [x_shared], outputs=[y_shared])
    (output,) = result.get_response().outputs
    assert (output.parameters["shared_memory_byte_size"].int64_param, list(output.shape)) == (20, [1, 10])
    assert list(result.get_response().raw_output_contents) == [b""]
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float16, [1, 10], offset=128), sent)
    # And one of both kinds: the raw entries are those of the inputs that are sent.
    np.testing.assert_array_equal(client.infer("mlp", [x_shared]).as_numpy("y"), sent)


def test_every_request_reads_and_writes_what_lies_there_then(client: triton.InferenceServerClient, region: Any) -> None:
    x_shared, y_shared = triton.InferInput("x", (1, 64), "FP16"), triton.InferRequestedOutput("y")
    x_shared.set_shared_memory(NAME, 128)
    y_shared.set_shared_memory(NAME, 20, offset=128)
    for scale in (1, -2, 0, 3):  # from the second one on, the request is known by its bytes
        x = np.full((1, 64), scale, np.float16)
        sent = client.infer("mlp", [triton.InferInput("x", (1, 64), "FP16").set_data_from_numpy(x)]).as_numpy("y")
        shm.set_shared_memory_region(region, [x])
        client.infer("mlp", [x_shared], outputs=[y_shared])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float16, [1, 10], offset=128), sent)
    client.unregister_system_shared_memory(NAME)
    with pytest.raises(InferenceServerException, match="is not registered"):
        client.infer("mlp", [x_shared], outputs=[y_shared])
    client.register_system_shared_memory(NAME, f"/{NAME}", 100)
    with pytest.raises(InferenceServerException, match="are not inside of shared memory region"):
        client.infer("mlp", [x_shared], outputs=[y_shared])


@pytest.mark.parametrize("size", [2**30, 2**40])
def test_a_huge_region_costs_what_the_tensor_takes(client: triton.InferenceServerClient, region: Any, size: int) -> None:
    x = np.ones((1, 64), np.float16)
    shm.set_shared_memory_region(region, [x])
    os.truncate(Path(FOLDER) / NAME, size)
    client.register_system_shared_memory("huge", f"/{NAME}", size)
    x_shared, y_shared = triton.InferInput("x", (1, 64), "FP16"), triton.InferRequestedOutput("y")
    x_shared.set_shared_memory("huge", size)
    y_shared.set_shared_memory("huge", size - 128, offset=128)
    before = bytes_read()
    for _ in range(2):
        with pytest.raises(InferenceServerException, match=f"input 'x' has {size} bytes, expected 128"):
            client.infer("mlp", [x_shared], outputs=[y_shared])
    x_shared.set_shared_memory("huge", 128)
    sent = client.infer("mlp", [triton.InferInput("x", (1, 64), "FP16").set_data_from_numpy(x)]).as_numpy("y")
    for _ in range(2):
        client.infer("mlp", [x_shared], outputs=[y_shared])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float16, [1, 10], offset=128), sent)
    assert bytes_read() - before < 2**20


def bytes_read() -> int:
    """By the server, which is this process."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_large_output_is_left_in_its_place(transport: MakeTransport) -> None:
    size = 300_000  # numbers; more than the event loop writes
    x = np.arange(size, dtype=np.float32).reshape(1, size)
    handle = shm.create_shared_memory_region(NAME, f"/{NAME}", 2 * x.nbytes)
    shm.set_shared_memory_region(handle, [x])
    x_shared, y_shared = triton.InferInput("x", (1, size), "FP32"), triton.InferRequestedOutput("y")
    x_shared.set_shared_memory(NAME, x.nbytes)
    y_shared.set_shared_memory(NAME, x.nbytes, offset=x.nbytes)
    try:
        with (
            running_server(lambda: [held_model(HeldBackend(), size=size)], transport, shared_memory=True) as server,
            triton.InferenceServerClient(server.address) as client,
        ):
            client.register_system_shared_memory(NAME, f"/{NAME}", 2 * x.nbytes)
            for _ in range(2):  # the second one is known by its bytes
                client.infer("held", [x_shared], outputs=[y_shared])
                found = shm.get_contents_as_numpy(handle, np.float32, [1, size], offset=x.nbytes)
                np.testing.assert_array_equal(found, x + 1)
                found[:] = 0
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("mode", [SharedMemoryMode.SAFE], scope="module")  # it truncates the file
def test_a_name_that_reads_like_a_lost_device_costs_nobody_the_model(client: triton.InferenceServerClient, region: Any) -> None:
    name = "device-side assert"
    client.register_system_shared_memory(name, f"/{NAME}", 128)
    shm.set_shared_memory_region(region, [np.ones((1, 64), np.float16)])
    x_shared = triton.InferInput("x", (1, 64), "FP16")
    x_shared.set_shared_memory(name, 128)
    for _ in range(3):  # from then on its bytes are fetched where the batch is put together
        client.infer("mlp", [x_shared])
    os.truncate(Path(FOLDER) / NAME, 0)
    with pytest.raises(InferenceServerException, match=f"shared memory region '{name}' has become smaller"):
        client.infer("mlp", [x_shared])
    os.truncate(Path(FOLDER) / NAME, 148)
    assert client.is_model_ready("mlp")


def test_status_tells_what_is_registered(client: triton.InferenceServerClient, region: Any) -> None:
    del region
    status = client.get_system_shared_memory_status(NAME).regions[NAME]
    assert (status.name, status.key, status.offset, status.byte_size) == (NAME, f"/{NAME}", 0, 148)
    client.unregister_system_shared_memory(NAME)
    assert not client.get_system_shared_memory_status().regions
    with pytest.raises(InferenceServerException, match="is not registered"):
        client.get_system_shared_memory_status(NAME)


def test_what_is_wrong_with_a_place_is_said(client: triton.InferenceServerClient, region: Any) -> None:
    del region
    x, outside = (triton.InferInput("x", (1, 64), "FP16") for _ in range(2))
    x.set_shared_memory(NAME, 126)
    with pytest.raises(InferenceServerException, match=r"input 'x' has 126 bytes, expected 128 for FP16 of shape \[1, 64\]"):
        client.infer("mlp", [x])
    outside.set_shared_memory(NAME, 128, offset=128)
    with pytest.raises(InferenceServerException, match="are not inside of shared memory region"):
        client.infer("mlp", [outside])
    x.set_shared_memory(NAME, 128)
    y = triton.InferRequestedOutput("y")
    y.set_shared_memory(NAME, 19, offset=128)
    with pytest.raises(InferenceServerException, match="an output of 20 bytes does not fit its 19 bytes"):
        client.infer("mlp", [x], outputs=[y])
    with pytest.raises(InferenceServerException, match="is registered already"):
        client.register_system_shared_memory(NAME, f"/{NAME}", 148)
