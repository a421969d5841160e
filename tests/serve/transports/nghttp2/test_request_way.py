"""The way of a request through the files of the server, as the design's page shows it."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from ngh2 import Connection, Role, StreamClosed
from onnx import TensorProto, helper, save

import halfserve
from halfserve.compiled_build import build_in_use
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.backends.onnx_runtime.onnx_backend import OnnxRuntime
from halfserve.serve.engine.backend import DevicePlacement
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.dispatch.short_batches import ShortBatches
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.engine.repository.model_loading import load_model
from halfserve.serve.engine.repository.model_repository import find_models
from halfserve.serve.protocol.service import Service
from halfserve.serve.transports.grpc_framing import frame
from halfserve.serve.transports.nghttp2.server import Nghttp2Server
from tests.serve.transports.nghttp2.connection_scene import Wire
from tests.serve.transports.nghttp2.http2_peer import INFER, WINDOW_BYTES, call_headers

ROOT = Path(halfserve.__file__).resolve().parent.parent
DESIGN = ROOT / "docs" / "explanation" / "design.md"
STEP = re.compile(r"^\| \w* ?\| `(serve/[\w/]+\.py)`: `([\w.]+)` \|$", re.MULTILINE)
MOST_FILES = 22  # of the project that a repeated request enters
MOST_FILES_AT_FIRST = 36
BEFORE = 3  # further requests that teach the server their bytes


class Way:
    """Functions of the project in the order in which they are first entered."""

    def __init__(self) -> None:
        self.entered: dict[tuple[str, str], None] = {}

    def note(self, entered: FrameType, event: str, _: object) -> None:
        path = Path(entered.f_code.co_filename)
        if event == "call" and path.suffix == ".py" and path.resolve().is_relative_to(ROOT / "serve"):
            self.entered[str(path.resolve().relative_to(ROOT)), entered.f_code.co_qualname] = None


class Asking:
    """A client of one connection, without a socket."""

    def __init__(self, path: Path) -> None:
        (files,) = find_models(path)
        model = load_model(files, OnnxRuntime(), DevicePlacement(use_gpu=False, threads=1), Defaults())
        self._connection = Nghttp2Server(Service(InferenceCore([model]), server_version="0"), "127.0.0.1", 0).connection()
        self._wire = Wire()
        self._http2 = Connection(Role.CLIENT)
        self._http2.initiate_connection()
        self._http2.set_local_window_size(WINDOW_BYTES)  # as gRPC's clients do: answers have room
        self._connection.connection_made(self._wire)
        request = pb.ModelInferRequest(model_name=model.name)
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(np.ones((1, 4), np.float32).tobytes())
        self._request = frame(request.SerializeToString())

    async def ask(self, way: Way | None = None) -> None:
        self._http2.send_data(self._http2.send_request(call_headers(INFER)), self._request, end_stream=True)
        answered = False
        while not answered:
            arrived = self._http2.data_to_send()
            before = sys.getprofile()
            sys.setprofile(None if way is None else way.note)
            if arrived:
                self._connection.data_received(arrived)
            await asyncio.sleep(0)
            sys.setprofile(before)
            while self._wire.written:
                self._http2.receive_data(self._wire.written.popleft())
            answered = any(isinstance(event, StreamClosed) for event in self._http2.events())


@pytest.mark.skipif(build_in_use().name == "compiled", reason="compiled functions are not seen by a profiler")
def test_a_repeated_request_goes_the_way_that_the_design_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "net", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), tmp_path / "net.onnx")
    # However slow the machine is: a batch that takes long is computed on a thread, which the profiler does not see.
    monkeypatch.setattr(ShortBatches, "suits", lambda *_: True)

    async def followed() -> tuple[Way, Way]:
        client, first, repeated = Asking(tmp_path / "net.onnx"), Way(), Way()
        await client.ask(first)
        for _ in range(BEFORE):
            await client.ask()
        await client.ask(repeated)
        return first, repeated

    first, repeated = asyncio.run(followed())
    way = list(repeated.entered)
    shown = STEP.findall(DESIGN.read_text(encoding="utf-8"))
    assert len(shown) > 10
    assert [step for step in shown if step not in way] == []
    assert sorted(shown, key=way.index) == shown
    assert len({path for path, _ in way}) <= MOST_FILES
    assert len({path for path, _ in first.entered}) <= MOST_FILES_AT_FIRST
