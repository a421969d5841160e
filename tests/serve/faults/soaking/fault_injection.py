"""Faults that a server meets over months, injected within minutes: reloads, bad input, vanishing clients, hanging models."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from benchmarks.harness.http2_frames import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, call_block, connected, frame
from benchmarks.harness.models import LARGE_ROWS, PICKY, STEPS
from halfserve import Client, ClientError, InvalidRequest, ModelNotFound, ServerUnavailable
from halfserve.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.serve.faults.soaking.tally import Tally

INFER = "/inference.GRPCInferenceService/ModelInfer"
WAIT_S = 60.0
FAR = 100_000_000  # steps that take many times the model's time limit
STOPPED_S = 0.1
ANNOUNCED_BYTES = 1_000_000  # announced size of a message that is sent only in part
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Scene:
    address: str
    pid: int
    client: Client  # client for regular requests
    channel: grpc.Channel  # channel for messages that no client would send
    random: np.random.Generator  # source of the random choices
    tally: Tally  # receives the results
    number: int = 0  # number of the current fault, from 0
    recoveries_s: list[float] = field(default_factory=list)  # seconds from giving up a model until it answered again


Act = Callable[[Scene], None]


def reload(scene: Scene) -> None:
    """Reload a model that is in use, in a different way each time."""
    name, most = (("affine", 32), ("flip", 32), ("large", LARGE_ROWS))[scene.number % 3]
    rows = int(scene.random.integers(most // 2, most + 1))
    scene.client.load_model(name, config={"max_batch_size": rows}, timeout_s=WAIT_S)
    scene.tally.survived("reloads")


def refuse_to_load(scene: Scene) -> None:
    """Load an invalid model; the served one must continue."""
    _due(scene, "broken loads", InvalidRequest, lambda: scene.client.load_model("affine", config='{"input": [{"name": "z"}]}'))
    _due(scene, "unknown loads", (InvalidRequest, ModelNotFound), lambda: scene.client.load_model("../affine"))


def send_bad_input(scene: Scene) -> None:
    ask = scene.client.infer_message
    for change, due in (
        ({"model_name": "nobody"}, ModelNotFound),
        ({"model_version": "9"}, ModelNotFound),
        ({"model_version": "latest"}, (InvalidRequest, ModelNotFound)),
    ):
        request = _request("affine", np.ones((1, 64), np.float16))
        for key, value in change.items():
            setattr(request, key, value)
        _due(scene, "bad input", due, lambda request=request: ask(request))  # type: ignore[misc]  # (bound now, not later)
    for x in (
        np.ones((1, 63), np.float16),
        np.ones((1, 64), np.float32),
        np.ones((0, 64), np.float16),
        np.ones(64, np.float16),
    ):
        _due(scene, "bad input", InvalidRequest, lambda x=x: ask(_request("affine", x)))  # type: ignore[misc]  # (see above)


def send_mangled(scene: Scene) -> None:
    """Send a valid message with bytes changed, cut or added: only clear statuses are right."""
    data = bytearray(_request("flip", np.ones((2, 5), np.float16)).SerializeToString())
    clear = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED}
    call = scene.channel.unary_unary(INFER)
    for _ in range(50):
        mangled = bytearray(data)
        for _ in range(int(scene.random.integers(1, 5))):
            mangled[int(scene.random.integers(len(mangled)))] = int(scene.random.integers(256))
        cut = bytes(mangled[: int(scene.random.integers(1, len(mangled) + 1))])
        try:
            call(cut, timeout=WAIT_S)
        except grpc.RpcError as error:
            if error.code() not in clear:
                scene.tally.fault(f"mangled message {cut.hex()}: {error.code().name}: {error.details()}")
        scene.tally.survived("mangled messages")


def poison(scene: Scene) -> None:
    """Send requests of which one fails in the runtime; the others in its batch must be answered."""
    call = scene.channel.unary_unary(INFER, response_deserializer=ModelInferResponse.FromString)
    indices = [int(index) for index in scene.random.integers(0, 2, 8)]
    indices[int(scene.random.integers(8))] = 7
    futures = [call.future(_request(PICKY, np.array([[i]], np.int64)).SerializeToString(), timeout=WAIT_S) for i in indices]
    started = time.monotonic()
    for index, future in zip(indices, futures, strict=True):
        try:
            value = float(np.frombuffer(future.result().raw_output_contents[0], np.float32)[0])
        except grpc.RpcError as error:
            if index == 7 and error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL}:
                scene.tally.survived("poisoned requests")
            else:
                scene.tally.fault(f"beside a poisoned request: {error.code().name}: {error.details()}")
        else:
            if value == (10, 20, *[None] * 6)[index]:
                scene.tally.right("beside poison", started)
            else:
                scene.tally.fault(f"picky: {value} for {index}")


def hang(scene: Scene) -> None:
    """Make a model hang; it must be given up and restored."""
    _due(scene, "hangs", ServerUnavailable, lambda: scene.client.infer(STEPS, {"n": np.array([FAR])}, timeout_s=WAIT_S))
    given_up = time.monotonic()
    while time.monotonic() < given_up + WAIT_S:
        try:
            answer = scene.client.infer(STEPS, {"n": np.array([5])}, timeout_s=WAIT_S)["y"]
        except ServerUnavailable:
            continue
        scene.recoveries_s.append(time.monotonic() - given_up)
        if answer.tolist() != [5]:
            scene.tally.fault(f"steps: {answer.tolist()} for 5")
        return
    scene.tally.fault(f"the model that hung was not back within {WAIT_S:g} s")


def vanish(scene: Scene) -> None:
    """Disconnect in the middle of a message, send other bytes than HTTP/2, and cancel calls."""
    for _ in range(5):
        hang_up_in_a_message(scene.address)
        talk_nonsense(scene.address, scene.random.bytes(200))
    call = scene.channel.unary_unary(INFER)
    data = _request("large", np.ones((1, 65_536), np.float32)).SerializeToString()
    for future in [call.future(data, timeout=WAIT_S) for _ in range(8)]:
        future.cancel()
    scene.tally.survived("vanished clients")


def hang_up_in_a_message(address: str) -> None:
    """Begin a call, send a part of its message, and reset the connection."""
    with contextlib.suppress(ConnectionError), connected(address) as connection:
        message = b"\0" + struct.pack(">I", ANNOUNCED_BYTES) + bytes(1000)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, call_block()))
        connection.sendall(frame(DATA, 0, 1, message))
        connection.recv(1)  # the server has taken the connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)


def talk_nonsense(address: str, nonsense: bytes) -> None:
    """Send bytes that are not HTTP/2, and wait for the server to disconnect."""
    with contextlib.suppress(ConnectionError), connected(address) as connection:
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def hurry(scene: Scene) -> None:
    x = np.ones((1, 64), np.float16)
    for _ in range(20):
        try:
            scene.client.infer("affine", {"x": x}, timeout_s=float(scene.random.uniform(0.0005, 0.003)))
        except ClientError as error:
            if error.code not in {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}:
                scene.tally.fault(f"a short deadline: {error.code}: {error}")
        scene.tally.survived("short deadlines")


def stop_and_go(scene: Scene) -> None:
    """Stop the whole process for a moment."""
    os.kill(scene.pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(scene.pid, signal.SIGCONT)
    scene.tally.survived("stops")


def unload_and_load(scene: Scene) -> None:
    scene.client.unload_model(PICKY, timeout_s=WAIT_S)
    _due(scene, "unloaded", (ModelNotFound, ServerUnavailable), lambda: scene.client.infer(PICKY, {"i": np.array([[0]])}))
    scene.client.load_model(PICKY, timeout_s=WAIT_S)
    if scene.client.infer(PICKY, {"i": np.array([[1]])})["y"].tolist() != [[20]]:
        scene.tally.fault("picky: a wrong answer after it was loaded again")


def look_around(scene: Scene) -> None:
    """Send the queries of a dashboard."""
    scene.client.models()
    scene.client.statistics()
    scene.client.model_config("affine")
    scene.client.model_metadata("large")


ACTS: tuple[Act, ...] = (
    reload,
    send_bad_input,
    poison,
    vanish,
    reload,
    send_mangled,
    hurry,
    unload_and_load,
    reload,
    refuse_to_load,
    look_around,
    stop_and_go,
    reload,
    hang,
)


def keep_at_it(scene: Scene, pause_s: float, stop: threading.Event) -> None:
    while not stop.wait(pause_s):
        act = ACTS[scene.number % len(ACTS)]
        try:
            act(scene)
        except (ClientError, grpc.RpcError) as error:
            scene.tally.fault(f"{act.__name__}: {type(error).__name__}: {error}")
        scene.number += 1


def _due(scene: Scene, kind: str, due: Any, ask: Callable[[], object]) -> None:
    """Make a call that must end in this kind of error."""
    try:
        ask()
    except due:
        scene.tally.survived(kind)
    except ClientError as error:
        scene.tally.fault(f"{kind}: {error.code}: {error}")
    else:
        scene.tally.fault(f"{kind}: was taken")


def _request(model: str, array: np.ndarray[Any, Any]) -> ModelInferRequest:
    name, datatype = {"f": ("x", f"FP{8 * array.itemsize}"), "i": ("i", "INT64")}[array.dtype.kind]
    request = ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    return request
