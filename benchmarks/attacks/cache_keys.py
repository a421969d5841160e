"""A client whose requests differ in a long parameter only: the response cache must count it, or keep a digest of it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.harness.models import save_shift
from halfserve import Client

MODEL = "cached"
CACHE_MIB = 8
PARAMETER_BYTES = 2**20
FEWEST = 400  # requests, however long they take
TIMEOUT_S = 60.0


def save_models(repository: Path) -> None:
    """Write a model whose answers the server keeps: x FP16 [batch, 64] -> y = 2 x + 1."""
    save_shift(repository, MODEL, shift=1, hidden=64)
    (repository / MODEL / "config.pbtxt").write_text("max_batch_size: 8\nresponse_cache { enable: true }\n")


def run(grpc_address: str, http_address: str, seconds: float) -> str:
    """Ask for answers that the cache may keep, each with a parameter of its own."""
    del http_address
    x = np.ones((1, 64), np.float16)
    asked, begun_s = 0, time.monotonic()
    with Client(grpc_address, timeout_s=TIMEOUT_S) as client:
        while asked < FEWEST or time.monotonic() < begun_s + seconds:
            client.infer(MODEL, {"x": x}, parameters={"text": f"{asked:08}" + "x" * PARAMETER_BYTES})
            asked += 1
    return f"{asked} requests with a parameter of {PARAMETER_BYTES / 2**20:.0f} MiB, a cache of {CACHE_MIB} MiB"
