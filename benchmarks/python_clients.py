"""One Python client with some requests in flight for some seconds; prints requests a second and p99 in microseconds.

    python -m benchmarks.python_clients tritonclient.aio 127.0.0.1:8001 request.bin 16 2

`request.bin` holds one ModelInferRequest with the five bytes of gRPC in front. Started by benchmarks.beside_triton.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from halfserve import AsyncClient, Client
from halfserve.protos.datatypes import BY_WIRE
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.serve.protocol.raw_tensors import from_raw

WARM_UP_S = 0.3

Arrays = dict[str, "np.ndarray[Any, Any]"]


def main(
    library: Annotated[str, typer.Argument(help="tritonclient, tritonclient.aio, halfserve or halfserve.aio.")],
    address: Annotated[str, typer.Argument(help="HOST:PORT of the server's gRPC port.")],
    request: Annotated[Path, typer.Argument(exists=True, help="File with one framed request.")],
    in_flight: Annotated[int, typer.Argument(min=1, help="Requests in flight: threads, or tasks of a loop.")],
    seconds: Annotated[float, typer.Argument(min=0.1, help="Length of the measurement in seconds.")],
) -> None:
    """Load the server and print requests a second and p99."""
    message = ModelInferRequest.FromString(request.read_bytes()[5:])
    arrays = {
        tensor.name: from_raw(raw, BY_WIRE[tensor.datatype], list(tensor.shape))
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    if library.endswith(".aio"):
        latencies_s = asyncio.run(_on_loop(library, address, message.model_name, arrays, in_flight, seconds))
    else:
        latencies_s = _in_threads(_blocking_call(library, address, message.model_name, arrays), in_flight, seconds)
    print(len(latencies_s) / seconds, statistics.quantiles(latencies_s, n=100)[98] * 1e6)


def _blocking_call(library: str, address: str, model: str, arrays: Arrays) -> Callable[[], object]:
    if library == "halfserve":
        client = Client(address)
        return lambda: client.infer(model, arrays)
    import tritonclient.grpc as triton  # noqa: PLC0415  (takes a second, and only one of the libraries is measured)

    triton_client = triton.InferenceServerClient(address)
    return lambda: triton_client.infer(model, _triton_inputs(triton, arrays))


def _triton_inputs(triton: Any, arrays: Arrays) -> list[Any]:
    from tritonclient.utils import np_to_triton_dtype  # noqa: PLC0415  (see above)

    inputs = []
    for name, array in arrays.items():
        one = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        one.set_data_from_numpy(array)
        inputs.append(one)
    return inputs


def _in_threads(call: Callable[[], object], in_flight: int, seconds: float) -> list[float]:
    latencies_s: list[float] = []
    begin = time.perf_counter() + WARM_UP_S

    def work() -> None:
        while (sent := time.perf_counter()) < begin + seconds:
            call()
            if sent >= begin:
                latencies_s.append(time.perf_counter() - sent)

    threads = [threading.Thread(target=work) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies_s


async def _on_loop(library: str, address: str, model: str, arrays: Arrays, in_flight: int, seconds: float) -> list[float]:
    latencies_s: list[float] = []
    begin = time.perf_counter() + WARM_UP_S

    async def work(call: Callable[[], Awaitable[object]]) -> None:
        while (sent := time.perf_counter()) < begin + seconds:
            await call()
            if sent >= begin:
                latencies_s.append(time.perf_counter() - sent)

    if library == "halfserve.aio":
        async with AsyncClient(address) as client:
            await asyncio.gather(*(work(lambda: client.infer(model, arrays)) for _ in range(in_flight)))
    else:
        import tritonclient.grpc.aio as triton  # noqa: PLC0415  (see above)

        async with triton.InferenceServerClient(address) as triton_client:
            await asyncio.gather(
                *(work(lambda: triton_client.infer(model, _triton_inputs(triton, arrays))) for _ in range(in_flight))
            )
    return latencies_s


if __name__ == "__main__":
    typer.run(main)
