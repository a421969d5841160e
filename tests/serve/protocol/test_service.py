from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.engine.errors import (
    MAX_TEXT,
    DeadlineExceededError,
    InferenceError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    QueueFullError,
    UnavailableError,
)
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.observability.observe_options import ObserveOptions, TraceLevel
from halfserve.serve.protocol import rpcs as module
from halfserve.serve.protocol.rpc import RpcCall
from halfserve.serve.protocol.service import SERVICE, LimitedService, Service
from halfserve.serve.protocol.status import RETRY_HINT, Status, status_of
from tests.serve.engine.fakes import MEASURED, HeldBackend, held_model, measured_model

SHARED_MEMORY = {"system_shared_memory", "cuda_shared_memory"}


async def answer(service: Service, rpc: str, request: Message | None = None) -> Any:
    """The response to a request, by default an empty one."""
    called = service.rpcs[f"/{SERVICE}/{rpc}"]
    return await called.method(called.request() if request is None else request, RpcCall(server=service))


def extensions(*, shared_memory: bool) -> set[str]:
    service = Service(InferenceCore([]), server_version="1.2", shared_memory=shared_memory)
    return set(asyncio.run(answer(service, "ServerMetadata")).extensions)


def test_the_metadata_lists_what_is_served() -> None:
    assert extensions(shared_memory=False) >= {
        *("binary_tensor_data", "classification", "logging", "model_configuration", "model_repository"),
        *("model_repository(unload_dependents)", "parameters", "schedule_policy", "sequence", "statistics", "trace"),
    }


@pytest.mark.parametrize(
    ("enabled", "device", "listed"),
    [(False, True, set()), (True, False, {"system_shared_memory"}), (True, True, SHARED_MEMORY)],
)
def test_the_metadata_lists_shared_memory_only_where_there_is_some(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, device: bool, listed: set[str]
) -> None:
    monkeypatch.setattr(module, "has_cuda", lambda: device)
    assert extensions(shared_memory=enabled) & SHARED_MEMORY == listed


def services(*names: str) -> tuple[Service, LimitedService]:
    whole = Service(
        InferenceCore([held_model(HeldBackend(), name) for name in names]), server_version="1.2", shared_memory=True
    )
    return whole, LimitedService(whole, lambda name: name == "ours")


def infer_request(model: str, value: float = 1.0) -> bytes:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[np.float32(value).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    return request.SerializeToString()


async def test_it_is_the_same_server() -> None:
    whole, limited = services("ours", "theirs")
    assert limited.rpcs is whole.rpcs
    assert (limited.memory, limited.observability) == (whole.memory, whole.observability)
    assert await answer(limited, "ServerMetadata") == await answer(whole, "ServerMetadata")
    assert limited.core.figures is whole.core.figures


async def test_settings_of_a_visible_model_alone_are_changed() -> None:
    whole, limited = services("ours", "theirs")
    change = pb.TraceSettingRequest(model_name="ours")
    change.settings["trace_rate"].value.append("7")
    assert list((await answer(limited, "TraceSetting", change)).settings["trace_rate"].value) == ["7"]
    change.model_name = "theirs"
    with pytest.raises(NotFoundError, match="model 'theirs' is not served here"):
        await answer(limited, "TraceSetting", change)
    change.model_name = ""
    with pytest.raises(PermissionDeniedError, match="this setting holds for all of them; ask who runs the server"):
        await answer(limited, "TraceSetting", change)
    verbose = pb.LogSettingsRequest()
    verbose.settings["log_info"].bool_param = False
    with pytest.raises(PermissionDeniedError, match="the token is for some models only"):
        await answer(limited, "LogSettings", verbose)
    for settings in ("LogSettings", "TraceSetting"):
        assert await answer(limited, settings) == await answer(whole, settings)


async def test_a_view_of_some_models_does_not_name_the_trace_file() -> None:
    options = ObserveOptions(trace_to="triton:traces.json", trace_level=TraceLevel.OFF)
    whole = Service(InferenceCore([held_model(HeldBackend(), "ours")]), server_version="1.2", observe=options)
    limited = LimitedService(whole, lambda name: name == "ours")
    told = [await answer(one, "TraceSetting") for one in (whole, limited)]
    assert [dict(one.settings)["trace_file"].value[0] for one in told] == ["traces.json", "file"]


async def test_metadata_and_index_say_what_computes_a_model_and_what_was_measured() -> None:
    core = InferenceCore([held_model(HeldBackend(), "plain"), measured_model("tried")])
    service, expected = Service(core, server_version="1.2"), {"halfserve.provider": "test", "halfserve.precision": "fp32"}
    index = await answer(service, "RepositoryIndex")
    assert [dict(one.properties) for one in index.models] == [expected, expected | {"halfserve.measured": MEASURED}]
    for one in index.models:
        described = await answer(service, "ModelMetadata", pb.ModelMetadataRequest(name=one.name))
        assert described.properties == one.properties


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


@pytest.mark.parametrize("kind", [QueueFullError, OverloadedError], ids=lambda kind: str(kind.__name__))
def test_what_is_refused_for_want_of_time_or_room_says_when_to_come_back(kind: type[QueueFullError]) -> None:
    assert status_of(kind("busy", retry_after_s=0.25)) == Status(8, "busy", ((RETRY_HINT, "250"),))
    assert status_of(kind("busy", retry_after_s=0.00001)).trailers == ((RETRY_HINT, "1"),)


def test_what_is_away_says_when_to_come_back_if_that_is_known() -> None:
    assert status_of(UnavailableError("away", retry_after_s=2.0)) == Status(14, "away", ((RETRY_HINT, "2000"),))
    assert status_of(UnavailableError("away")) == Status(14, "away")


def test_a_deadline_that_passed_is_not_to_be_retried() -> None:
    assert status_of(DeadlineExceededError("late")) == Status(4, "late")


def test_what_nobody_raised_on_purpose_stays_here() -> None:
    assert status_of(KeyError("/secret/path")) == Status(13, "the server failed on this request; its log says why")
    assert status_of(InferenceError("known")) == Status(13, "known")


def test_a_text_that_quotes_a_long_name_is_cut() -> None:
    whole, quoted = "x" * MAX_TEXT, "é" * 10 * MAX_TEXT
    assert status_of(InferenceError(whole)).details == whole
    details = status_of(InferenceError(f"model '{quoted}' is not served here")).details
    assert MAX_TEXT - 16 < len(details) <= MAX_TEXT
    assert re.fullmatch(r"model 'é+ \.\.\. \(\d+ characters left out\) \.\.\. é+' is not served here", details)
