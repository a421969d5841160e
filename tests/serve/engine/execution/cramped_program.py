"""A model in a process with little memory: python -m tests.serve.engine.execution.cramped_program RUNTIME FOLDER

A row takes 1 MB on its way through the model, and the process gets 300 MB. It prints the rows of each right answer.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from pathlib import Path

import numpy as np

from tests.models import save_text
from tests.serve.conftest import load_repository
from tests.serve.engine.precision_guard.guarded_models import ask_model
from tests.serve.runtimes import RUNTIMES

WIDE, ROOM_BYTES, ROWS, BATCHES = 1 << 18, 300 << 20, 512, 3


def save_wide(path: Path) -> None:
    """x FP32 [batch, 1] -> y FP32 [batch, 1]: the mean of WIDE copies of the cosine of x."""
    text = "(float[n, 1] x) => (float[n, 1] y) { wide = MatMul(x, ones)  cosines = Cos(wide)  y = MatMul(cosines, parts) }"
    save_text(path, text, ones=np.ones((1, WIDE), np.float32), parts=np.full((WIDE, 1), 1 / WIDE, np.float32))


def leave_room() -> None:
    """Let this process have so much more address space than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, resource.RLIM_INFINITY))


async def main(runtime: str, folder: Path) -> None:
    save_wide(folder / "m" / "1" / "model.onnx")
    (folder / "m" / "config.pbtxt").write_text(f"max_batch_size: {ROWS}")
    (model,) = load_repository(folder, RUNTIMES[runtime]())
    x = np.linspace(0, 1, ROWS, dtype=np.float32).reshape(-1, 1)
    await ask_model(model, x[:2])
    leave_room()
    for _ in range(BATCHES):
        answer = await ask_model(model, x)
        np.testing.assert_allclose(np.array(answer), np.cos(x).ravel(), atol=1e-4)
        sys.stdout.write(f"{len(answer)}\n")
    await model.batcher.drain()


if __name__ == "__main__":
    logging.basicConfig(stream=sys.stderr)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
