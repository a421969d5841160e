"""Exchanges for health, metadata, the model repository and settings, driven by hand."""

from __future__ import annotations

from typing import Any

import pytest

from halfserve import InvalidRequest, Unsupported
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client import management
from halfserve.serve.client.errors import ClientError, DeadlineExceeded, ModelNotFound, ServerUnavailable
from halfserve.serve.client.exchange import Deadline, Exchange, Pause, UnaryRpc
from tests.serve.client.conftest import Connect
from tests.serve.client.driving import drive
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.running_server import RunningServer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(pb.ModelReadyResponse(ready=True), True), (pb.ModelReadyResponse(), False), (ModelNotFound("no"), False)],
)
def test_readiness_is_an_answer_not_an_error(answer: Any, expected: bool) -> None:
    assert drive(management.ready("m", ""), [answer]) == (["ModelReady"], expected)


def test_other_errors_are_not_taken_for_unreadiness() -> None:
    with pytest.raises(ClientError, match="broken"):
        drive(management.ready(None, ""), [ClientError("broken", code="INTERNAL")])


def test_readiness_is_polled_with_growing_pauses() -> None:
    exchange = management.wait_until_ready("m", "", Deadline.after(None))
    pauses = []
    assert isinstance(next(exchange), UnaryRpc)
    for answer in (ServerUnavailable("gone"), ModelNotFound("not yet"), *[pb.ModelReadyResponse()] * 6):
        step = exchange.throw(answer) if isinstance(answer, Exception) else exchange.send(answer)
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        assert isinstance(exchange.send(None), UnaryRpc)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5]
    with pytest.raises(StopIteration):
        exchange.send(pb.ModelReadyResponse(ready=True))


@pytest.mark.parametrize(
    ("model", "answer", "text"),
    [
        ("m", ModelNotFound("no 'm' here"), "^model 'm' was not ready within 0.001 s: no 'm' here$"),
        ("m", pb.ModelReadyResponse(), "^model 'm' was not ready within 0.001 s: it is not there, or not ready yet$"),
        (None, pb.ServerReadyResponse(), "^the server was not ready within 0.001 s: it is there, but not ready$"),
    ],
)
def test_a_timeout_reports_the_last_reason(model: str | None, answer: Any, text: str) -> None:
    with pytest.raises(DeadlineExceeded, match=text):
        drive(management.wait_until_ready(model, "", Deadline.after(0.001)), [answer])


def test_an_error_that_waiting_cannot_fix_ends_the_wait() -> None:
    with pytest.raises(ClientError, match="no entry"):
        drive(management.wait_until_ready(None, "", Deadline.after(9)), [ClientError("no entry", code="UNAUTHENTICATED")])


def test_load_and_unload(scripted: ScriptedServer, connect: Connect) -> None:
    scripted.answers |= {
        "RepositoryModelLoad": [pb.RepositoryModelLoadResponse()],
        "RepositoryModelUnload": [pb.RepositoryModelUnloadResponse()],
    }
    client = connect(scripted.address)
    client.load_model("mlp")
    client.load_model("mlp", config={"maxBatchSize": 4}, files={"1/model.onnx": b"onnx"}, timeout_s=5)
    client.unload_model("mlp", dependents=True)
    plain, full, unload = (request for _, request, _ in scripted.calls)
    assert pb.RepositoryModelLoadRequest.FromString(plain) == pb.RepositoryModelLoadRequest(model_name="mlp")
    loaded = pb.RepositoryModelLoadRequest.FromString(full).parameters
    assert loaded["config"].string_param == '{"maxBatchSize": 4}'
    assert loaded["file:1/model.onnx"].bytes_param == b"onnx"
    assert pb.RepositoryModelUnloadRequest.FromString(unload).parameters["unload_dependents"].bool_param
    assert scripted.calls[1][2] == pytest.approx(5, abs=2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("", None, None), "the model has no name"),
        (("m", "{", None), "the model's config is no JSON: .* at 1; expected a ModelConfig object"),
        (("m", "[1]", None), r"must be a JSON object with a ModelConfig's fields, not \[1\]"),
        (("m", None, {"1/model.onnx": b""}), "files of a model to load need a config beside them"),
        ((5, None, None), "a model's name must be text, not 5"),
        (("\udcff", None, None), r"a model's name must be text that UTF-8 can encode, not '\\udcff'"),
        (("m", "{}", {"\udcff": b""}), r"the path of a model's file must be text that UTF-8 can encode, not '\\udcff'"),
        (("m", "{}", {"1/model.onnx": "onnx"}), "file '1/model.onnx' of a model to load must be bytes, not str"),
    ],
)
def test_malformed_load_requests_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        next(management.load_model(*arguments))


def test_settings_keep_their_types() -> None:
    step = next(management.log_settings({"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}))
    assert isinstance(step, UnaryRpc)
    assert isinstance(step.request, pb.LogSettingsRequest)
    settings = step.request.settings
    assert settings["log_info"].WhichOneof("parameter_choice") == "bool_param"
    assert settings["log_verbose_level"].uint32_param == 2
    assert settings["log_format"].string_param == "ISO8601"
    answer = pb.LogSettingsResponse()
    answer.settings["b"].bool_param, answer.settings["a"].uint32_param = True, 3
    answer.settings["without_a_value"].SetInParent()
    assert drive(management.log_settings({}), [answer])[1] == {"a": 3, "b": True}


def test_trace_settings_are_lists_of_texts() -> None:
    step = next(
        management.trace_settings("mlp", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": 9, "trace_count": None})
    )
    assert isinstance(step, UnaryRpc)
    assert isinstance(step.request, pb.TraceSettingRequest)
    assert step.request.model_name == "mlp"
    values = {name: list(setting.value) for name, setting in step.request.settings.items()}
    assert values == {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["9"], "trace_count": []}
    answer = pb.TraceSettingResponse()
    answer.settings["trace_rate"].value.append("9")
    assert drive(management.trace_settings("", {}), [answer])[1] == {"trace_rate": ["9"]}


NO_SETTINGS: list[Any] = [-1, 2**32, 0.5, None]


@pytest.mark.parametrize(
    ("exchange", "text"),
    [
        *(
            (management.log_settings({"a": value}), "log setting 'a' must be a bool, a whole number of 0 or more, or text, not")
            for value in NO_SETTINGS
        ),
        (management.log_settings({"a": "\udcff"}), "setting 'a' must be text that UTF-8 can encode, not"),
        (management.trace_settings("m", {"a": ["b", "\udcff"]}), "setting 'a' must be text that UTF-8 can encode, not"),
    ],
)
def test_invalid_settings_are_refused(exchange: Exchange[Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        next(exchange)


def test_a_server_without_model_control_is_unsupported(scripted: ScriptedServer, connect: Connect) -> None:
    client = connect(scripted.address)
    for ask in (lambda: client.load_model("m"), client.log_settings, client.trace_settings):
        with pytest.raises(Unsupported, match="does not offer"):
            ask()


@pytest.mark.usefixtures("log_settings_of_one_test")
def test_settings_of_the_real_server(server: RunningServer, connect: Connect) -> None:
    client = connect(server.address)
    before = client.log_settings()
    assert client.log_settings(log_verbose_level=1)["log_verbose_level"] == 1
    assert client.log_settings(log_verbose_level=before["log_verbose_level"]) == before
    assert "trace_level" in client.trace_settings()
    with pytest.raises(InvalidRequest, match="nonsense"):
        client.log_settings(nonsense=True)


def test_waits_for_a_model_and_lists_what_is_ready(server: RunningServer, connect: Connect) -> None:
    client = connect(server.address)
    client.wait_until_ready(timeout_s=10)
    client.wait_until_ready("mlp", "3", timeout_s=10)
    assert {entry.state for entry in client.models(only_ready=True)} == {"READY"}
