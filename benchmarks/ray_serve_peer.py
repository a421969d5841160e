"""The same model in Ray Serve: a replica that computes it, called by gRPC, over HTTP, and by a handle of another process.

    RAY_ADDRESS=HOST:PORT python -m benchmarks.ray_serve_peer model.onnx

Prints `Ways` as a line of JSON when it is ready. For each number of seconds read from its input, it calls by the handle for
that time, with CONCURRENCY requests in flight, and prints the duration of each call in seconds. Ray must run with
THROUGHPUT_OPTIMIZED in its environment, so that the replica itself listens for gRPC and HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
import ray
from google.protobuf.wrappers_pb2 import BytesValue
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.context import _get_global_client

CONCURRENCY = 32
CONNECTIONS = 4
WIDTH = 64  # values in a row of the model "affine", in fp16
ROW = np.ones((1, WIDTH), np.float16)
ANSWER = np.full((1, WIDTH), 3, np.float16).tobytes()  # 2 x + 1
METHOD = "/peer.Model/Grpc"
# Ray Serve's fastest settings: replicas answer clients themselves, on the thread that listens; handles by gRPC; buffered logs.
THROUGHPUT_OPTIMIZED = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}


@dataclass(frozen=True)
class Ways:
    """Ways to reach the replica.

    Attributes:
        pid: id of its process.
        grpc: port for gRPC; METHOD takes and returns a BytesValue with the bytes of rows.
        http: port for HTTP; a POST to /peer takes the bytes of rows.
    """

    pid: int
    grpc: int
    http: int


class Model:
    """One replica, on one thread like a member."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    async def __call__(self, request: Any) -> bytes:
        return self._infer_bytes(await request.body())

    async def Grpc(self, request: BytesValue) -> BytesValue:  # noqa: N802  (Ray Serve calls the method of the RPC's name)
        return BytesValue(value=self._infer_bytes(request.value))

    async def infer(self, x: Any) -> Any:
        return self._session.run(None, {"x": x})[0]

    def _infer_bytes(self, data: bytes) -> bytes:
        rows = np.frombuffer(data, np.float16).reshape(-1, WIDTH)
        answer: bytes = self._session.run(None, {"x": rows})[0].tobytes()
        return answer


def add_to_server(servicer: Any, server: Any) -> None:
    """Ray Serve's `grpc_servicer_functions`: what protoc's plugin would generate for METHOD."""
    service, _, method = METHOD[1:].partition("/")
    handler = grpc.unary_unary_rpc_method_handler(servicer.Grpc, BytesValue.FromString, BytesValue.SerializeToString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))


async def keep_asking(asks: Callable[[int], Awaitable[None]], seconds: float) -> list[float]:
    """Keep CONCURRENCY requests in flight; `asks` gets the number of the slot. Returns the duration of each in seconds."""
    ends_s, spent_s = time.perf_counter() + seconds, list[float]()

    async def keep_asking(number: int) -> None:
        while (began_s := time.perf_counter()) < ends_s:
            await asks(number)
            spent_s.append(time.perf_counter() - began_s)

    await asyncio.gather(*(keep_asking(number) for number in range(CONCURRENCY)))
    return spent_s


async def ask_handle(handle: Any, seconds: float) -> list[float]:
    """Call by a handle, as a deployment that calls another one does."""

    async def ask(_: int) -> None:
        await handle.infer.remote(ROW)

    return await keep_asking(ask, seconds)


async def ask_grpc(port: int, seconds: float) -> list[float]:
    """Call the replica itself.

    Raises:
        SystemExit: an answer is wrong.
    """
    request = BytesValue(value=ROW.tobytes()).SerializeToString()
    expected = BytesValue(value=ANSWER).SerializeToString()
    alone = [("grpc.use_local_subchannel_pool", 1)]  # a separate connection
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", alone) for _ in range(CONNECTIONS)]
    methods = [channel.unary_unary(METHOD) for channel in channels]

    async def ask(number: int) -> None:
        if await methods[number % CONNECTIONS](request, timeout=60) != expected:
            raise SystemExit("Ray Serve answers wrongly")

    try:
        return await keep_asking(ask, seconds)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def main(model: Path) -> None:
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servicers = ["benchmarks.ray_serve_peer:add_to_server"]
    # Ports of the proxies, which are not used; replicas have their own.
    grpc_options = gRPCOptions(port=port, grpc_servicer_functions=servicers)
    serve.start(http_options={"host": "127.0.0.1", "port": 0}, grpc_options=grpc_options)
    deployment = serve.deployment(max_ongoing_requests=10 * CONCURRENCY, ray_actor_options={"num_cpus": 1})(Model)
    handle = serve.run(deployment.bind(str(model)), name="peer", route_prefix="/peer")
    client: Any = _get_global_client()
    details = client.get_serve_details()
    (replica,) = details["applications"]["peer"]["deployments"]["Model"]["replicas"]
    ports = {group["protocol"].value: group["targets"][0]["port"] for group in details["target_groups"]}
    print(json.dumps(asdict(Ways(pid=replica["pid"], grpc=ports["gRPC"], http=ports["HTTP"]))), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await ask_handle(handle, float(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve()))
