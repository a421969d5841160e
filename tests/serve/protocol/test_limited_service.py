"""A service as one sees it who may use some models only."""

from __future__ import annotations

import numpy as np
import pytest

from protos import inference_pb2 as pb
from serve.engine.errors import InferenceError, NotFoundError, PermissionDeniedError
from serve.engine.inference_core import InferenceCore
from serve.protocol.limited_service import LimitedService
from serve.protocol.service import SERVICE, Service
from tests.serve.engine.fakes import HeldBackend, held_model
from tests.serve.engine.test_inference_core import on_loop


def services(*names: str) -> tuple[Service, LimitedService]:
    whole = Service(
        InferenceCore([held_model(HeldBackend(), name) for name in names]), server_version="1.2", shared_memory=True
    )
    return whole, LimitedService(whole, lambda name: name == "ours")


def infer_request(model: str, value: float = 1.0) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.float32(value).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request.SerializeToString()


def test_it_is_the_same_server() -> None:
    whole, limited = services("ours", "theirs")
    assert limited.unary.keys() == whole.unary.keys()
    assert limited.streams.keys() == whole.streams.keys()
    assert (limited.memory, limited.observability) == (whole.memory, whole.observability)
    assert limited.server_metadata(pb.ServerMetadataRequest()) == whole.server_metadata(pb.ServerMetadataRequest())
    assert limited.core.figures is whole.core.figures


def test_settings_of_a_visible_model_alone_are_changed() -> None:
    whole, limited = services("ours", "theirs")
    trace, log = (limited.unary[f"/{SERVICE}/{name}"].answer for name in ("TraceSetting", "LogSettings"))
    change = pb.TraceSettingRequest(model_name="ours")
    change.settings["trace_rate"].value.append("7")
    assert list(trace(change).settings["trace_rate"].value) == ["7"]  # type: ignore[attr-defined]  # (a TraceSettingResponse)
    change.model_name = "theirs"
    with pytest.raises(NotFoundError, match="model 'theirs' is not served here"):
        trace(change)
    change.model_name = ""
    with pytest.raises(PermissionDeniedError, match="this setting holds for all of them; ask who runs the server"):
        trace(change)
    verbose = pb.LogSettingsRequest()
    verbose.settings["log_info"].bool_param = False
    with pytest.raises(PermissionDeniedError, match="the token is for some models only"):
        log(verbose)
    assert log(pb.LogSettingsRequest()) == whole.unary[f"/{SERVICE}/LogSettings"].answer(pb.LogSettingsRequest())
    assert trace(pb.TraceSettingRequest()) == whole.unary[f"/{SERVICE}/TraceSetting"].answer(pb.TraceSettingRequest())


@on_loop
async def test_a_form_that_is_known_asks_for_a_visible_model() -> None:
    whole, limited = services("ours", "theirs")
    answers: list[bytes | InferenceError] = []
    for value in range(4):  # the whole server learns both forms, the view that of its own model
        whole.inference.infer(infer_request("theirs", value), None, answers.append)
        with pytest.raises(NotFoundError, match="model 'theirs' is not served here"):
            limited.inference.infer(infer_request("theirs", value), None, answers.append)
        limited.inference.infer(infer_request("ours", value), None, answers.append)
    limited.close()
    with pytest.raises(NotFoundError, match="model 'ours' is not served here"):
        limited.inference.infer(infer_request("ours"), None, answers.append)
    await whole.core.drain()
    assert [type(answer) for answer in answers] == [bytes] * 8, "what was taken is answered"
