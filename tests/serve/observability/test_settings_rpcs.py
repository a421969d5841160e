"""TraceSetting and LogSettings as Triton's own client calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from serve.observability.options import AccessLog, ObserveOptions
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, Serving, row

Change = Callable[[Any], Any]


def values(settings: Any) -> dict[str, list[str]]:
    return {name: list(setting.value) for name, setting in settings.settings.items()}


def test_trace_settings_are_told_and_changed_per_model(serving: Serving, tmp_path: Path) -> None:
    options = ObserveOptions(trace_to=str(tmp_path / "traces.json"), trace_rate=100)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        expected = {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": ["100"],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
            "trace_mode": ["opentelemetry"],
            "trace_file": ["file"],
        }
        assert values(client.get_trace_settings()) == expected
        changed = client.update_trace_settings(model_name="mlp", settings={"trace_rate": "3", "trace_count": "12"})
        assert values(changed) == expected | {"trace_rate": ["3"], "trace_count": ["12"]}
        assert values(client.get_trace_settings("mlp")) == values(changed)
        assert values(client.get_trace_settings("picky")) == expected
        cleared = client.update_trace_settings(model_name="mlp", settings={"trace_rate": None, "trace_count": []})
        assert values(cleared) == expected


def test_log_settings_are_told_and_changed(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    options = ObserveOptions(access_log_file=log)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        told = client.get_log_settings(as_json=True)["settings"]
        assert told["log_info"] == {"bool_param": True}
        assert told["log_verbose_level"] == {"uint32_param": 0}
        assert told["access_log"] == {"string_param": "off"}
        client.infer("mlp", row(), request_id="before", client_timeout=CLIENT_TIMEOUT_S)
        client.update_log_settings({"access_log": True, "log_info": False, "log_format": "ISO8601", "log_verbose_level": 1})
        client.infer("mlp", row(), request_id="logged", client_timeout=CLIENT_TIMEOUT_S)
        assert server.call(lambda: server.service.observability.logs.access_log) is AccessLog.ALL
        client.update_log_settings({"access_log": False})
        client.infer("mlp", row(), request_id="after", client_timeout=CLIENT_TIMEOUT_S)
        assert client.get_log_settings(as_json=True)["settings"]["log_format"] == {"string_param": "ISO8601"}
    assert [json.loads(line)["id"] for line in log.read_text().splitlines()] == ["logged"]


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (lambda c: c.update_trace_settings(settings={"x": "1"}), "INVALID_ARGUMENT", "there is no trace setting 'x'"),
        (lambda c: c.update_log_settings({"x": True}), "INVALID_ARGUMENT", "there is no log setting 'x'"),
        (lambda c: c.update_log_settings({"log_info": None}), "INVALID_ARGUMENT", "log_info has no value"),
        (
            lambda c: c.update_log_settings({"log_file": "/x"}),
            "INVALID_ARGUMENT",
            "log_file cannot be changed over the network",
        ),
        (lambda c: c.get_trace_settings("nobody"), "NOT_FOUND", "model 'nobody' is not served here"),
        (
            lambda c: c.update_trace_settings(settings={"trace_level": "TIMESTAMPS"}),
            "FAILED_PRECONDITION",
            "traces have nowhere to go; start the server with --trace-to FILE",
        ),
    ],
    ids=["trace-name", "log-name", "no-value", "log-file", "model", "nowhere"],
)
def test_wrong_changes_are_refused_with_what_was_expected(serving: Serving, change: Change, status: str, text: str) -> None:
    with serving(ObserveOptions()) as server, triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException) as refused:
            change(client)
        assert server.service.observability.observer is None
    assert refused.value.status() == f"StatusCode.{status}"
    assert text in refused.value.message()


def test_more_settings_than_there_can_be_are_refused_unread(serving: Serving) -> None:
    text = "1000 settings are given, expected at most 64"
    with serving(ObserveOptions()) as server, triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException, match=text):
            client.update_trace_settings(settings={f"none{number}": "1" for number in range(1000)})
        with pytest.raises(InferenceServerException, match=text):
            client.update_log_settings({f"none{number}": True for number in range(1000)})
