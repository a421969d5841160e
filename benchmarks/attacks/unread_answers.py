"""Clients that ask for much and read nothing of the answers, over gRPC and over REST."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time

import numpy as np

from benchmarks.attacks.http2_client import Http2Client, told
from benchmarks.harness.http2_frames import INFER, connected
from halfserve.protos import inference_pb2 as pb

CONNECTIONS, REST_CONNECTIONS = 60, 900
STREAMS = 200  # streams per connection
GREETING_S = 0.5
PIPELINED = 3  # requests of each REST connection
ROWS, COLUMNS = 2, 65_536  # of the model "large", whose answers are as large as its requests: half a megabyte
INITIAL_WINDOW_SIZE, WINDOW_BYTES = 4, 2**31 - 1
PAUSE_S = 0.01


def over_grpc(grpc_address: str, http_address: str, seconds: float) -> str:
    """Ask over gRPC: half of the clients do not read, the others read all but the answers, whose windows they keep shut."""
    del http_address
    message = _request()
    body = memoryview(struct.pack(">BI", 0, len(message)) + message)
    wide = [Http2Client(grpc_address, {INITIAL_WINDOW_SIZE: WINDOW_BYTES}, WINDOW_BYTES) for _ in range(CONNECTIONS // 2)]
    shut = [Http2Client(grpc_address, {INITIAL_WINDOW_SIZE: 0}) for _ in range(CONNECTIONS // 2)]
    for client in wide + shut:
        for _ in range(STREAMS):
            client.call(INFER, body, end=True)
    begun_s = time.monotonic()
    while (now_s := time.monotonic()) < begun_s + seconds:
        reads = now_s < begun_s + GREETING_S  # so that they learn how much they may send
        some = sum([client.go_on(reads=reads) for client in wide if client.is_open])
        if not some + sum([client.go_on() for client in shut if client.is_open]):
            time.sleep(PAUSE_S)
    for client in wide + shut:
        client.close()
    return told(wide + shut)


def over_rest(grpc_address: str, http_address: str, seconds: float) -> str:
    """Ask over REST, for several answers on each connection."""
    del grpc_address
    body = np.ones((ROWS, COLUMNS), np.float32).tobytes()
    x = {"name": "x", "datatype": "FP32", "shape": [ROWS, COLUMNS], "parameters": {"binary_data_size": len(body)}}
    head = json.dumps({"inputs": [x], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        "POST /v2/models/large/infer HTTP/1.1\r\nhost: localhost\r\n"
        f"inference-header-content-length: {len(head)}\r\ncontent-length: {len(head) + len(body)}\r\n\r\n"
    )
    return _send(
        [connected(http_address) for _ in range(REST_CONNECTIONS)], (lines.encode() + head + body) * PIPELINED, seconds
    )


def large_over_rest(grpc_address: str, http_address: str, seconds: float) -> str:
    """Ask over REST by a few bytes each, for answers of megabytes: the model is the first step of `pipelines.save_ensemble`."""
    del grpc_address
    x = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}
    body = json.dumps({"inputs": [x], "parameters": {"binary_data_output": True}}).encode()
    line = f"POST /v2/models/grow/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return _send([connected(http_address) for _ in range(REST_CONNECTIONS)], line.encode() + body, seconds)


def _request() -> bytes:
    request = pb.ModelInferRequest(model_name="large")
    request.inputs.add(name="x", datatype="FP32", shape=[ROWS, COLUMNS])
    request.raw_input_contents.append(np.ones((ROWS, COLUMNS), np.float32).tobytes())
    return bytes(request.SerializeToString())


def _send(sockets: list[socket.socket], everything: bytes, seconds: float) -> str:
    """Send the same on all of them, as far as the server takes it, and read nothing."""
    for connection in sockets:
        connection.setblocking(False)
    waiting = dict.fromkeys(sockets, memoryview(everything))
    sent, closed, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        before = sent
        for connection, rest in list(waiting.items()):
            try:
                count = connection.send(rest)
            except BlockingIOError:
                continue
            except OSError:
                del waiting[connection]
                closed += 1
                continue
            sent += count
            waiting[connection] = rest[count:]
            if not waiting[connection]:
                del waiting[connection]
        if sent == before:
            time.sleep(PAUSE_S)
    for connection in sockets:
        with contextlib.suppress(OSError):
            connection.close()
    return f"{sent / 2**20:.0f} MiB sent over {len(sockets)} connections, {closed} of them closed by the server"
