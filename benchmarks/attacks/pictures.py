"""Pictures that cost a server much: thousands of passes, texts that inflate, and millions of pixels, over gRPC and REST."""

from __future__ import annotations

import contextlib
import io
import zlib
from functools import cache
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from benchmarks.attacks.bystander import TIMEOUT_S, Account
from benchmarks.attacks.rest_client import ask_rest, connected, post, repeated
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
PHOTO_EDGE = 640


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
    """Classify a photo again and again; see `ask_rest`."""
    del grpc_address, tls
    photo, right = _photo(), _right()

    def is_right(content: bytes) -> bool:
        return np.allclose(np.frombuffer(content[-12:], np.float32), right, atol=1e-2)

    head, path = _head(photo), f"/v2/models/{MODEL}/infer"
    headers = {"inference-header-content-length": str(len(head))}
    body = head + len(photo).to_bytes(4, "little") + photo
    return ask_rest(http_address, path, body, headers, token=token, is_right=is_right, every_s=every_s, stop=stop)


def _send(data: bytes, grpc_address: str, http_address: str, seconds: float) -> str:
    """Send a picture over both transports again and again, half of the connections each; how they were answered."""
    message = ModelInferRequest(model_name=MODEL)
    message.inputs.add(name="image", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    request = message.SerializeToString()

    def over_grpc(_end: float) -> str:
        with grpc.insecure_channel(grpc_address) as channel:
            try:
                channel.unary_unary(INFER_PATH)(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def over_rest(_end: float) -> str:
        with contextlib.suppress(OSError), connected(http_address) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.sendall(post(f"/v2/models/{MODEL}/classify", data))
            return connection.recv(2**16)[9:12].decode() or "no answer"
        return "no answer"

    answered = repeated([over_grpc, over_rest] * (SENDERS // 2), seconds)
    return f"pictures of {len(data) / 1e3:.0f} KB over {SENDERS} connections at a time: {answered}"


@cache
def _photo() -> bytes:
    """Return a JPEG of even colours beside each other."""
    colours = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return _encoded(Image.fromarray(colours).resize((PHOTO_EDGE, PHOTO_EDGE)), "JPEG")


def _right() -> NDArray[np.float64]:
    right: NDArray[np.float64] = prepared_pixels(_photo(), PREPARATION).mean(axis=(0, 1))
    return right


def _head(data: bytes) -> bytes:
    size = f'"parameters": {{"binary_data_size": {len(data) + 4}}}'
    return (
        f'{{"inputs": [{{"name": "image", "datatype": "BYTES", "shape": [1], {size}}}], '
        '"parameters": {"binary_data_output": true}}'
    ).encode()


def _encoded(image: Image.Image, form: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
