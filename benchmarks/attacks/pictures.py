"""Pictures that cost a server much: thousands of passes, texts that inflate, and millions of pixels, over gRPC and REST."""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from benchmarks.attacks.bystander import TIMEOUT_S, Account, at_a_pace
from halfserve.protos.inference_pb2 import ModelInferRequest
from halfserve.protos.pictures import PREPROCESSING, PicturePreparation, prepared_pixels
from halfserve.serve.client.channel_settings import Tls
from halfserve.serve.protocol.service import INFER_PATH

MODEL = "colours"
PREPARATION = PicturePreparation(height=224, width=224, resize=256, resample="bilinear")
SENDERS = 8  # connections of each attack
PASSES, PASSES_EDGE = 8000, 2000
TEXTS = 200
LARGE_EDGE = 4472  # 20 million pixels
PHOTO_EDGE, PHOTO_EVERY_S = 640, 0.05
CLIENT = (
    "127.0.0.3",
    0,
)  # an address of its own: the attacker stands for other machines, 127.0.0.1 over gRPC and one over REST
ATTACKER = ("127.0.0.2", 0)


def save_picture_model(repository: Path) -> None:
    """Write the model "colours": the mean colours of a picture, FP32 [batch, 3]."""
    nodes = [
        helper.make_node("Cast", ["image"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["wide", "places"], ["logits"], keepdims=0),
    ]
    shape: list[str | int | None] = ["batch", PREPARATION.height, PREPARATION.width, 3]
    pixels = helper.make_tensor_value_info("image", TensorProto.UINT8, shape)
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, MODEL, [pixels], [logits], [numpy_helper.from_array(np.array([1, 2]), "places")])
    folder = repository / MODEL / "1"
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "model.onnx")
    (folder / PREPROCESSING).write_bytes(PREPARATION.to_bytes())
    task = 'parameters { key: "halfserve.task" value { string_value: "image-classification" } }'
    (repository / MODEL / "config.pbtxt").write_text(f"max_batch_size: 8 {task}")


def many_passes(grpc_address: str, http_address: str, seconds: float) -> str:
    """Send progressive JPEGs of some hundred KB whose last scan is repeated thousands of times."""
    plain = _encoded(Image.new("RGB", (PASSES_EDGE, PASSES_EDGE)), "JPEG", progressive=True)
    scan = plain[plain.rindex(b"\xff\xc4") : -2]
    return _send(plain[:-2] + PASSES * scan + plain[-2:], grpc_address, http_address, seconds)


def inflating_texts(grpc_address: str, http_address: str, seconds: float) -> str:
    """Send PNGs of some hundred KB whose texts inflate to a thousand times as much."""
    plain, text = _encoded(Image.new("RGB", (64, 64)), "PNG"), zlib.compress(bytes(2**20 - 1))
    chunks = b""
    for number in range(TEXTS):
        content = b"zTXtkey %d\0\0" % number + text
        chunks += (len(content) - 4).to_bytes(4, "big") + content + zlib.crc32(content).to_bytes(4, "big")
    return _send(plain[:33] + chunks + plain[33:], grpc_address, http_address, seconds)


def large_pictures(grpc_address: str, http_address: str, seconds: float) -> str:
    """Send JPEGs of 20 million pixels of noise."""
    noise = np.random.default_rng(0).integers(0, 256, (LARGE_EDGE // 8, LARGE_EDGE // 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((LARGE_EDGE, LARGE_EDGE))
    return _send(_encoded(image, "JPEG", quality=90), grpc_address, http_address, seconds)


def ask_pictures(
    grpc_address: str, http_address: str, token: str | None, tls: Tls | None, every_s: float, stop: Event
) -> Account:
    """Classify a photo each `every_s` seconds, or PHOTO_EVERY_S if that is longer; see `bystander.ask`."""
    del grpc_address, tls
    host, _, port = http_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT_S, source_address=CLIENT)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    photo, right = _photo(), _right()

    def once() -> str | None:
        try:
            connection.request("POST", f"/v2/models/{MODEL}/infer", _tensor(photo), headers | _binary(photo))
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()  # the next request opens it again
            return str(error) or type(error).__name__
        if answer.status != 200:
            return f"{answer.status}: {content[:200]!r}"
        return None if np.allclose(np.frombuffer(content[-12:], np.float32), right, atol=1e-2) else "a wrong answer"

    account = at_a_pace(once, max(every_s, PHOTO_EVERY_S), stop)
    connection.close()
    return account


def _send(data: bytes, grpc_address: str, http_address: str, seconds: float) -> str:
    """Send a picture over both transports again and again, half of the connections each; how they were answered."""
    end, statuses = time.monotonic() + seconds, Counter[str]()

    def again(once: Callable[[], str]) -> None:
        while time.monotonic() < end:
            statuses[once()] += 1

    message = ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="image", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    request = message.SerializeToString()

    def over_grpc() -> str:
        with grpc.insecure_channel(grpc_address) as channel:
            try:
                channel.unary_unary(INFER_PATH)(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def over_rest() -> str:
        with contextlib.suppress(OSError), _connected(http_address) as connection:
            connection.settimeout(TIMEOUT_S)
            head = f"POST /v2/models/{MODEL}/classify HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            return connection.recv(2**16)[9:12].decode() or "no answer"
        return "no answer"

    ways = [over_grpc, over_rest] * (SENDERS // 2)
    threads = [threading.Thread(target=again, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answered = ", ".join(f"{count} with {status}" for status, count in sorted(statuses.items()))
    return f"pictures of {len(data) / 1e3:.0f} KB over {SENDERS} connections at a time: {answered}"


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5, source_address=ATTACKER)


@cache
def _photo() -> bytes:
    """Return a JPEG of even colours beside each other."""
    colours = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return _encoded(Image.fromarray(colours).resize((PHOTO_EDGE, PHOTO_EDGE)), "JPEG")


def _right() -> NDArray[np.float64]:
    right: NDArray[np.float64] = prepared_pixels(_photo(), PREPARATION).mean(axis=(0, 1))
    return right


def _binary(data: bytes) -> dict[str, str]:
    return {"inference-header-content-length": str(len(_head(data)))}


def _head(data: bytes) -> bytes:
    size = f'"parameters": {{"binary_data_size": {len(data) + 4}}}'
    return (
        f'{{"inputs": [{{"name": "image", "datatype": "BYTES", "shape": [1], {size}}}], '
        '"parameters": {"binary_data_output": true}}'
    ).encode()


def _tensor(data: bytes) -> bytes:
    return _head(data) + len(data).to_bytes(4, "little") + data


def _encoded(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
