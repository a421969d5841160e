"""Texts that cost a server much: to tokenise, to describe and to pad, from clients that wait for the answer and that do not."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path
from threading import Event

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.attacks.bystander import Account
from benchmarks.attacks.rest_client import ask_rest, connected, post, repeated
from halfserve.serve.client.channel_settings import Tls

FREE, FIXED = "free", "fixed"  # models of texts of any length, and of texts that are padded to one length
INPUTS = ("input_ids", "attention_mask")
FIXED_TOKENS, SIZE = 512, 4
WORDS = ["[UNK]", "!", "the"]
LARGE_BODY = json.dumps({"inputs": ["!" * 32_700] * 64}).encode()  # 2.09 MB, as many tokens
PADDED_BODY = json.dumps({"inputs": ["!"] * 2040}).encode()  # 10 KB, 17 MB of padded rows
TOKENIZERS, LEAVERS, PADDERS = 8, 20, 100  # connections of each attack
LEAVES_AFTER_S = 1.0
READ_BYTES = 2**18
ASKED = " ".join(["the"] * 750)  # 3,000 characters: too many to be tokenised on the event loop


def save_text_models(repository: Path) -> None:
    """Write the models "free" and "fixed": the sum of a text's rows of a table, FP32 [batch, SIZE]."""
    for name, length in ((FREE, "length"), (FIXED, FIXED_TOKENS)):
        nodes = [
            helper.make_node("Cast", ["attention_mask"], ["weights_f"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["weights_f", "last"], ["weights"]),
            helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
            helper.make_node("Mul", ["rows", "weights"], ["counted"]),
            helper.make_node("ReduceSum", ["counted", "middle"], ["answer"], keepdims=0),
        ]
        constants = {"table": _table(), "last": np.array([2]), "middle": np.array([1])}
        tokens = [helper.make_tensor_value_info(i, TensorProto.INT64, ["batch", length]) for i in INPUTS]
        answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["batch", SIZE])
        weights = [numpy_helper.from_array(array, key) for key, array in constants.items()]
        graph = helper.make_graph(nodes, name, tokens, [answer], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        onnx.save(model, folder / "model.onnx")
        own = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token=WORDS[0]))
        own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        own.save(str(folder / "tokenizer.json"))
        task = 'parameters { key: "halfserve.task" value { string_value: "embeddings" } }'
        (repository / name / "config.pbtxt").write_text(f"max_batch_size: 32 {task}")


def tokenize_floods(grpc_address: str, http_address: str, seconds: float) -> str:
    """Ask for the tokens of large bodies on some connections, again and again, and read the answers."""
    del grpc_address
    return _ask_again(TOKENIZERS, http_address, f"/tokenize?model={FREE}", LARGE_BODY, seconds)


def padded_rows(grpc_address: str, http_address: str, seconds: float) -> str:
    """Ask for many short texts at once, of a model that pads them, on many connections."""
    del grpc_address
    return _ask_again(PADDERS, http_address, f"/embed?model={FIXED}", PADDED_BODY, seconds)


def gone_texts(grpc_address: str, http_address: str, seconds: float) -> str:
    """Send large bodies on some connections, close them after a second, and begin again."""
    del grpc_address
    sent, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        connections: list[socket.socket] = []
        for _ in range(LEAVERS):
            with contextlib.suppress(OSError):
                connections.append(connected(http_address))
                connections[-1].sendall(post(f"/embed?model={FREE}", LARGE_BODY))
                sent += 1
        time.sleep(LEAVES_AFTER_S)
        for connection in connections:
            connection.close()
    return f"{sent} bodies of {len(LARGE_BODY) / 1e6:.2f} MB sent and left"


def ask_texts(grpc_address: str, http_address: str, token: str | None, tls: Tls | None, every_s: float, stop: Event) -> Account:
    """Embed a text of 3,000 characters again and again; see `ask_rest`."""
    del grpc_address, tls
    vector = _table()[WORDS.index("the")]
    right = vector / np.linalg.norm(vector)

    def is_right(content: bytes) -> bool:
        return np.allclose(json.loads(content)[0], right, atol=1e-5)

    body, path = json.dumps({"inputs": ASKED}).encode(), f"/embed?model={FREE}"
    return ask_rest(http_address, path, body, {}, token=token, is_right=is_right, every_s=every_s, stop=stop)


def _ask_again(connections: int, http_address: str, path: str, body: bytes, seconds: float) -> str:
    """Send a request on each of some connections, and the next when it is answered; how they were answered."""

    def once(end: float) -> str:
        head = b""
        with contextlib.suppress(OSError), connected(http_address) as connection:
            connection.settimeout(1.0)
            connection.sendall(post(path, body))
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    piece = connection.recv(READ_BYTES)
                    if not piece:
                        break
                    head = head or piece
        return head[9:12].decode() or "no answer"

    answered = repeated([once] * connections, seconds)
    return f"requests of {len(body) / 1e3:.0f} KB over {connections} connections at a time: {answered}"


def _table() -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Return a row for each word: (words, SIZE)."""
    return np.arange(1, len(WORDS) * SIZE + 1, dtype=np.float32).reshape(len(WORDS), SIZE)
