"""A model in Ray Serve's own way: a replica that computes it, asked over HTTP and by a handle of another process.

    RAY_ADDRESS=HOST:PORT python -m benchmarks.clustering.ray_serve_peer model.onnx

Prints the HTTP port when it is ready. For each number of seconds that it reads from its input, it asks by the handle for so
long, with CONCURRENCY requests in flight, and prints their number and the 99th percentile of their times in milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import ray
from ray import serve

CONCURRENCY = 32
WIDTH = 64  # of a row of the model "affine", in fp16


class Model:
    """One replica, on one thread as a member is."""

    def __init__(self, path: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    async def __call__(self, request: Any) -> bytes:
        rows = np.frombuffer(await request.body(), np.float16).reshape(-1, WIDTH)
        answer: bytes = self.infer(rows).tobytes()
        return answer

    def infer(self, x: Any) -> Any:
        return self._session.run(None, {"x": x})[0]


async def _ask(handle: Any, seconds: float) -> tuple[int, float]:
    x = np.ones((1, WIDTH), np.float16)
    ends_s, spent_s = time.perf_counter() + seconds, []

    async def keep_asking() -> None:
        while (began_s := time.perf_counter()) < ends_s:
            await handle.infer.remote(x)
            spent_s.append(time.perf_counter() - began_s)

    await asyncio.gather(*(keep_asking() for _ in range(CONCURRENCY)))
    return len(spent_s), float(np.percentile(spent_s, 99)) * 1e3


def main() -> None:
    ray.init(logging_level=logging.ERROR, log_to_driver=False)
    port = int(sys.argv[2])
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployment = serve.deployment(max_ongoing_requests=10 * CONCURRENCY, ray_actor_options={"num_cpus": 1})(Model)
    handle = serve.run(deployment.bind(str(Path(sys.argv[1]).resolve())), name="peer", route_prefix="/peer")
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_ask(handle, float(line)))), flush=True)


if __name__ == "__main__":
    main()
