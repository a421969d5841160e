"""Cost of a step in Python: a request to a model.py that returns its input, compared with a backend that does nothing.

python -m benchmarks.python_step

No sockets are used: each request enters the engine in process, one at a time, on an otherwise idle event loop. The backend that
does nothing runs on a thread like the model.py, with the same batcher: the difference is the transfer to the process and back.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from halfserve.compiled_build import build_in_use
from halfserve.serve.backends.runtimes import Runtimes
from halfserve.serve.engine.backend import DevicePlacement, Outcome, RequestBackend, Trust
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import InferenceError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.model import Model
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.engine.repository.model_loading import load_version, started
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.engine.requests import InferRequest
from halfserve.serve.engine.tensors import Tensors

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())]) for request in requests
        ]
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
WARM = 200


class Nothing(RequestBackend):
    """Answers a request with its input."""

    provider = "nothing"
    precision = "fp32"

    def compute(self, requests: Sequence[InferRequest]) -> list[Outcome]:
        return [{"y": request.inputs["x"]} for request in requests]


async def _seconds(core: InferenceCore, model: Model, elements: int, count: int) -> list[float]:
    """Seconds of each of `count` requests."""
    loop = asyncio.get_running_loop()
    x = np.zeros(elements, np.float32)
    taken = []
    for _ in range(WARM + count):
        done: asyncio.Future[Tensors | InferenceError] = loop.create_future()
        started = time.perf_counter()
        core.submit(model, InferRequest({"x": x}, ("y",), 1, (elements,), None, done.set_result))
        result = await done
        taken.append(time.perf_counter() - started)
        if isinstance(result, InferenceError):
            raise result
    return taken[WARM:]


async def _measure(folder: Path, sizes: list[int], count: int, rounds: int) -> None:
    runtimes = Runtimes(trust=Trust(python_models=True))
    (files,) = find_models(folder)
    version = load_version(files, runtimes, DevicePlacement(use_gpu=False), Defaults())
    nothing = Model(
        name="nothing",
        version=1,
        interface=version.interface,
        config=version.config,
        backends=[Nothing()],
        limits=version.limits,
    ).start()
    models = {"nothing": nothing, "process": started(version)}
    core = InferenceCore(models.values())
    runtimes.connect(ModelCalls(core))
    for elements in sizes:
        taken: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds):  # in turn, as the machine's speed drifts
            for name, model in models.items():
                taken[name] += await _seconds(core, model, elements, count)
        for what, share in (("median", 0.5), ("fastest tenth", 0.1)):  # the latter is hardly affected by other load
            us = {name: sorted(seconds)[int(share * len(seconds))] * 1e6 for name, seconds in taken.items()}
            told = ", ".join(f"{name} {value:.0f} us" for name, value in us.items())
            print(f"{elements * 4:>9} bytes, {what}: {told}; a step costs {us['process'] - us['nothing']:.0f} us more")
    await core.drain()


def main(
    sizes: Annotated[list[int] | None, typer.Option("--elements", help="FP32 elements of a request.")] = None,
    count: Annotated[int, typer.Option(help="Requests in a row.")] = 500,
    rounds: Annotated[int, typer.Option(help="Times that both models take turns.")] = 5,
) -> None:
    """Measure and print both."""
    print(f"hot path {build_in_use()}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step" / "1" / "model.py"
        path.parent.mkdir(parents=True)
        path.write_text(MODEL)
        (Path(folder) / "step" / "config.pbtxt").write_text(CONFIG)
        asyncio.run(_measure(Path(folder), sizes or [4, 4096, 262_144], count, rounds))


if __name__ == "__main__":
    typer.run(main)
