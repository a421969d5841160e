"""The clients of KServe's own SDK against our server. The package is in no extra: it wants an older psutil than ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import helper

from halfserve.protos.datatypes import BY_WIRE
from tests.models import save_model
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.running_server import running_server

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
VALUES: dict[str, np.ndarray[Any, Any]] = {
    "FP16": np.array([[0.5, -65504]], np.float16),
    "FP32": np.array([[1.5, -2.0]], np.float32),
    "FP64": np.array([[0.1, 1e300]]),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT64": np.array([[2**62, -1]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "BOOL": np.array([[True, False]]),
}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of gRPC and REST; the model "echo" returns its inputs."""
    root = tmp_path_factory.mktemp("repository")
    nodes = [helper.make_node("Identity", [f"in_{name}"], [f"out_{name}"]) for name in VALUES]
    inputs, outputs = ([(f"{kind}_{name}", BY_WIRE[name].onnx, ["batch", 2]) for name in VALUES] for kind in ("in", "out"))
    save_model(root / "echo" / "1" / "model.onnx", nodes, inputs, outputs)  # type: ignore[arg-type]  # a list of int | str
    with running_server(lambda: load_repository(root)) as server, running_http(server) as rest:
        yield server.address, f"http://127.0.0.1:{rest.port}"


def asked(address: str, *, is_rest: bool, is_binary: bool) -> tuple[list[bool], Any]:
    """Return what the client says of health, and its answer to a request of all data types."""
    kserve = pytest.importorskip("kserve", reason="needs the package kserve, in an environment of its own")
    inputs = []
    for name, values in VALUES.items():
        inputs.append(kserve.InferInput(f"in_{name}", [1, 2], name))
        inputs[-1].set_data_from_numpy(values, binary_data=is_binary or name == "FP16")  # it refuses FP16 in JSON
    request = kserve.InferRequest(
        "echo", inputs, request_id="7", parameters={"binary_data_output": True} if is_binary else None
    )

    async def over_rest() -> tuple[list[bool], Any]:
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        # Its checks of live and ready want a body of JSON, which Triton has not either: scripts compare what curl prints.
        health = [await client.is_model_ready(address, "echo")]
        answer = await client.infer(address, request, model_name="echo")
        await client.close()
        return health, answer

    async def over_grpc() -> tuple[list[bool], Any]:
        async with kserve.InferenceGRPCClient(address) as client:
            health = [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready("echo")]
            return health, await client.infer(request)

    return asyncio.run(over_rest() if is_rest else over_grpc())


@pytest.mark.parametrize(("is_rest", "is_binary"), [(False, True), (True, True), (True, False)])
def test_kserves_clients_infer_with_each_data_type(addresses: tuple[str, str], is_rest: bool, is_binary: bool) -> None:
    health, answer = asked(addresses[is_rest], is_rest=is_rest, is_binary=is_binary)
    assert all(health)
    assert (answer.model_name, answer.id) == ("echo", "7")
    for name, values in VALUES.items():
        assert np.array_equal(answer.get_output_by_name(f"out_{name}").as_numpy(), values), name
