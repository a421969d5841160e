"""What changes a server: the messages that both clients send, and a server that is controlled."""

from __future__ import annotations

from typing import Any

import pytest

from protos import inference_pb2 as pb
from serve.client import InvalidRequest, Unsupported
from serve.client.exchanges import control
from serve.client.exchanges.calls import Call
from tests.serve.client.conftest import Connect
from tests.serve.client.driving import drive
from tests.serve.client.scripted_server import ScriptedServer
from tests.serve.running_server import RunningServer


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
        (("\udcff", None, None), r"a model's name must be text that UTF-8 can say, not '\\udcff'"),
        (("m", "{}", {"\udcff": b""}), r"the path of a model's file must be text that UTF-8 can say, not '\\udcff'"),
        (("m", "{}", {"1/model.onnx": "onnx"}), "file '1/model.onnx' of a model to load must be bytes, not str"),
    ],
)
def test_what_cannot_be_loaded(arguments: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        next(control.load_model(*arguments))


def test_settings_keep_their_types() -> None:
    step = next(control.log_settings({"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}))
    assert isinstance(step, Call)
    assert isinstance(step.request, pb.LogSettingsRequest)
    settings = step.request.settings
    assert settings["log_info"].WhichOneof("parameter_choice") == "bool_param"
    assert settings["log_verbose_level"].uint32_param == 2
    assert settings["log_format"].string_param == "ISO8601"
    answer = pb.LogSettingsResponse()
    answer.settings["b"].bool_param, answer.settings["a"].uint32_param = True, 3
    assert drive(control.log_settings({}), [answer])[1] == {"a": 3, "b": True}


def test_trace_settings_are_lists_of_texts() -> None:
    step = next(control.trace_settings("mlp", {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": 9, "trace_count": None}))
    assert isinstance(step, Call)
    assert isinstance(step.request, pb.TraceSettingRequest)
    assert step.request.model_name == "mlp"
    values = {name: list(setting.value) for name, setting in step.request.settings.items()}
    assert values == {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["9"], "trace_count": []}
    answer = pb.TraceSettingResponse()
    answer.settings["trace_rate"].value.append("9")
    assert drive(control.trace_settings("", {}), [answer])[1] == {"trace_rate": ["9"]}


@pytest.mark.parametrize("value", [-1, 2**32, 0.5, None])
def test_log_settings_that_there_are_not(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="log setting 'a' must be a bool, a whole number of 0 or more, or text, not"):
        next(control.log_settings({"a": value}))


def test_settings_that_utf_8_cannot_say() -> None:
    for changed in (control.log_settings({"a": "\udcff"}), control.trace_settings("m", {"a": ["b", "\udcff"]})):
        with pytest.raises(InvalidRequest, match="setting 'a' must be text that UTF-8 can say, not"):
            next(changed)


def test_a_server_that_cannot_be_controlled_says_so(scripted: ScriptedServer, connect: Connect) -> None:
    client = connect(scripted.address)
    for ask in (lambda: client.load_model("m"), client.log_settings, client.trace_settings):
        with pytest.raises(Unsupported, match="does not offer"):
            ask()


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


def test_a_setting_without_a_value_is_left_out() -> None:
    answer = pb.LogSettingsResponse()
    answer.settings["log_info"].bool_param = True
    answer.settings["log_file"].SetInParent()
    assert drive(control.log_settings({}), [answer])[1] == {"log_info": True}
