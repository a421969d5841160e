"""Clients of a decoupled model that answers faster than they read: they read slowly, not at all, or cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from halfserve.protos import inference_pb2 as pb

CLIENTS = 30  # number of clients of each kind
RESPONSES, RESPONSE_BYTES = 300, 2**20  # to each request
PAUSE_S = 0.02  # pause of a slow client between two responses
READ_BEFORE_CANCEL = 3
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
# Does not ask whether its client has gone.
FLOODS = f"""
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()

    def answer(self, sender):
        for number in range({RESPONSES}):
            y = pb_utils.Tensor("y", np.full({RESPONSE_BYTES // 4}, number, np.float32))
            sender.send(pb_utils.InferenceResponse([y]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
model_transaction_policy { decoupled: true }
"""


def save_model(repository: Path) -> None:
    """Write the model "floods", which answers each request with `RESPONSES` responses, in the order of their numbers."""
    path = repository / "floods" / "1" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(FLOODS)
    (repository / "floods" / "config.pbtxt").write_text(CONFIG)


def run(grpc_address: str, http_address: str, seconds: float) -> str:
    """Have clients of each kind ask, each over a connection of its own, again and again; tell how much they got."""
    del http_address
    end = time.monotonic() + seconds
    kinds: dict[str, Callable[[Any, float], int]] = {"slow": _read_slowly, "deaf": _read_nothing, "fickle": _cancel}
    with ThreadPoolExecutor(len(kinds) * CLIENTS) as pool:
        began = {
            name: [pool.submit(_ask_until, grpc_address, end, kind) for _ in range(CLIENTS)] for name, kind in kinds.items()
        }
        told = {name: [one.result() for one in clients] for name, clients in began.items()}
    return "; ".join(_sum(name, counts) for name, counts in told.items())


def _ask_until(address: str, end: float, read: Callable[[Any, float], int]) -> tuple[int, str]:
    """Send requests one after the other; return the number of responses, and the first error."""
    request = pb.ModelInferRequest(model_name="floods")
    request.inputs.add(name="x", datatype="FP32", shape=[1])
    request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    count, error = 0, ""
    with grpc.insecure_channel(address, OWN_CONNECTION) as channel:
        ask = channel.stream_stream(STREAM, None, pb.ModelStreamInferResponse.FromString)
        while time.monotonic() < end and not error:
            responses = ask(iter([request.SerializeToString()]))
            try:
                count += read(responses, end)
            except grpc.RpcError as failure:
                error = str(failure.code().name)
            except ValueError as wrong:
                error = str(wrong)
            responses.cancel()
    return count, error


def _read_slowly(responses: Any, end: float) -> int:
    count = 0
    for count, response in enumerate(responses, 1):
        _check(response, count - 1)
        if time.monotonic() > end:
            break
        time.sleep(PAUSE_S)
    return count


def _read_nothing(responses: Any, end: float) -> int:
    _check(next(responses), 0)
    time.sleep(max(0.0, end - time.monotonic()))
    return 1


def _cancel(responses: Any, end: float) -> int:
    del end
    for number in range(READ_BEFORE_CANCEL):
        _check(next(responses), number)
    return READ_BEFORE_CANCEL


def _check(response: pb.ModelStreamInferResponse, number: int) -> None:
    """Check one response. Raises ValueError: it is an error, or not the one with this number."""
    if response.error_message:
        raise ValueError(response.error_message)
    values = np.frombuffer(response.infer_response.raw_output_contents[0], np.float32) if number < RESPONSES else np.ones(0)
    if number < RESPONSES and not (values.nbytes == RESPONSE_BYTES and (values == number).all()):
        raise ValueError(f"a wrong response in place of number {number}")


def _sum(name: str, counts: Iterable[tuple[int, str]]) -> str:
    counts = list(counts)
    errors = [error for _, error in counts if error]
    failed = f", {len(errors)} ended with an error, first: {errors[0]}" if errors else ""
    return f"{len(counts)} {name} clients got {sum(count for count, _ in counts)} responses{failed}"
