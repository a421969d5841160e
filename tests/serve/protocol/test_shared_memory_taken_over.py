"""A name of shared memory that another client takes over while requests wait that name it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests.serve.engine.fakes import HOLD_S, HeldBackend, held_model
from tests.serve.running_server import RunningServer, running_server

NAME, ONE, OTHER = "data", "halfserve_test_one", "halfserve_test_other"
BYTES = 4


@pytest.fixture
def blocks() -> Iterator[tuple[Any, Any]]:
    """Two clients' memory: one fp32 for the input, and room for one fp32 of the output."""
    made = [shm.create_shared_memory_region(key, f"/{key}", 2 * BYTES) for key in (ONE, OTHER)]
    for handle, value in zip(made, (1.0, 50.0), strict=True):
        shm.set_shared_memory_region(handle, [np.array([value, 0.0], np.float32)])
    yield made[0], made[1]
    for handle in made:
        shm.destroy_shared_memory_region(handle)


class Asking:
    """A request whose input or output lies in the region, and what becomes of it."""

    def __init__(self, client: triton.InferenceServerClient, shared: str) -> None:
        x, y = triton.InferInput("x", (1, 1), "FP32"), triton.InferRequestedOutput("y")
        if shared == "input":
            x.set_shared_memory(NAME, BYTES)
        else:
            x.set_data_from_numpy(np.ones((1, 1), np.float32))
            y.set_shared_memory(NAME, BYTES, offset=BYTES)
        self._ended = threading.Event()
        self._error: InferenceServerException | None = None
        client.async_infer("held", [x], self._end, outputs=[y])

    def _end(self, result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        self._error = error
        self._ended.set()

    def error(self) -> InferenceServerException | None:
        assert self._ended.wait(HOLD_S)
        return self._error


def wait_until_taken(server: RunningServer, count: int) -> None:
    batcher = server.core.model("held").batcher
    while server.call(lambda: batcher.waiting + batcher._running) < count:  # the second one may be handed to the thread already
        pass


@pytest.mark.parametrize("shared", ["input", "output"])
def test_a_request_that_waits_gets_and_gives_nothing_of_another_clients(shared: str, blocks: tuple[Any, Any]) -> None:
    backend = HeldBackend()
    with (
        running_server(lambda: [held_model(backend, max_rows=1)], shared_memory=True) as server,
        triton.InferenceServerClient(server.address) as client,
    ):
        client.register_system_shared_memory(NAME, f"/{ONE}", 2 * BYTES)
        for _ in range(2):  # from the second one on, the request is known by its bytes
            assert Asking(client, shared).error() is None
        backend.entered.clear()
        backend.release.clear()
        computes = Asking(client, shared)
        assert backend.entered.wait(HOLD_S)
        waits = Asking(client, shared)
        wait_until_taken(server, 2)
        client.unregister_system_shared_memory()
        client.register_system_shared_memory(NAME, f"/{OTHER}", 2 * BYTES)
        backend.release.set()
        assert (computes.error() is None) is (shared == "input"), "it was read before"
        assert "shared memory region 'data' was unregistered while the request waited" in str(waits.error())
    assert shm.get_contents_as_numpy(blocks[1], np.float32, [2]).tolist() == [50.0, 0.0]
    assert [50.0] not in backend.batches
