"""TraceSetting and LogSettings as Triton's own client calls them."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from halfserve.serve.engine.errors import FailedPreconditionError, InvalidArgumentError
from halfserve.serve.observability.log_settings import LogFilter, LogFormat, LogSettings
from halfserve.serve.observability.observe_options import AccessLog, ObserveOptions, TraceLevel, check_can_trace, destination
from halfserve.serve.observability.trace_settings import (
    TraceControl,
    TraceSampler,
    TraceSettings,
    sampler_rate,
    settings_at_start,
)
from tests.serve.observability.conftest import CLIENT_TIMEOUT_S, Serving, row

ON = TraceSettings(levels=("TIMESTAMPS",), rate=2, count=3)
Change = Callable[[Any], Any]


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger with a handler, as the root logger of a server has one."""
    out = io.StringIO()
    logger = logging.getLogger("halfserve-test-of-log-settings")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.handlers = [handler]
    yield logger, out
    logger.propagate = True  # pytest puts its own handler onto loggers that keep their messages to themselves


def say_all(logger: logging.Logger, out: io.StringIO) -> list[str]:
    out.seek(0)
    out.truncate()
    logger.debug("d")
    logger.info("i")
    logger.warning("w")
    logger.error("e")
    return out.getvalue().splitlines()


def test_levels_are_turned_on_and_off_one_by_one(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log_filter = LogFilter(LogSettings())
    log_filter.apply(LogSettings(log_info=False, log_error=False), logger[0])
    assert say_all(*logger) == ["WARNING w"]
    log_filter.apply(LogSettings(log_warning=False, log_verbose_level=1), logger[0])
    assert say_all(*logger) == ["DEBUG d", "INFO i", "ERROR e"]
    log_filter.undo(logger[0])
    assert say_all(*logger) == ["INFO i", "WARNING w", "ERROR e"]


def test_settings_go_over_the_wire_by_name() -> None:
    assert LogSettings(access_log=AccessLog.ERRORS).as_values() == {
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
        "access_log": "errors",
        "access_log_every": 100,
    }


def test_reported_settings_can_be_set_again() -> None:
    settings = LogSettings(log_info=False, log_verbose_level=2, log_format=LogFormat.ISO8601, access_log=AccessLog.SAMPLED)
    assert LogSettings().changed(settings.as_values()) == settings


def test_tritons_client_can_turn_the_access_log_on() -> None:
    assert LogSettings().changed({"access_log": True}).access_log is AccessLog.ALL
    assert LogSettings(access_log=AccessLog.ALL).changed({"access_log": False}).access_log is AccessLog.OFF


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_colour", True, "no log setting 'log_colour'; those that can be changed: log_info, log_warning, log_error"),
        ("log_file", "/etc/passwd", "log_file cannot be changed over the network; messages go to standard error"),
        (
            "access_log_file",
            "/etc/passwd",
            "access_log_file cannot be changed over the network; it is set when the server starts",
        ),
        ("log_info", 1, "log_info is 1, expected true or false"),
        ("log_verbose_level", True, "log_verbose_level is True, expected a whole number of 0 or more"),
        ("access_log_every", 0, "access_log_every is 0, expected a whole number of 1 or more"),
        ("log_format", "xml", "log_format is 'xml', expected one of: default, ISO8601"),
        ("access_log", "some", "access_log is 'some', expected one of: off, errors, sampled, all"),
    ],
)
def test_an_invalid_log_setting_names_what_was_expected(name: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        LogSettings().changed({name: value})


def taken(sampler: TraceSampler, decisions: list[bool | None]) -> list[bool]:
    return [sampler.take(decided=decision) for decision in decisions]


def test_one_request_in_rate_is_traced_up_to_the_count() -> None:
    assert taken(TraceSampler(ON), [None] * 8) == [False, True, False, True, False, True, False, False]


def test_the_callers_decision_goes_first_but_not_over_the_bound() -> None:
    assert taken(TraceSampler(ON), [True, False, True, True, True]) == [True, False, True, True, False]


def test_off_is_off_for_every_caller() -> None:
    assert taken(TraceSampler(TraceSettings()), [True, None, False]) == [False] * 3


def test_a_model_follows_the_global_settings_but_for_its_own() -> None:
    control = TraceControl(TraceSettings())
    control.update("mlp", {"trace_level": ["TIMESTAMPS"], "trace_rate": ["7"]})
    control.update("", {"trace_count": ["9"]})
    assert control.is_on
    assert control.of("mlp") == TraceSettings(levels=("TIMESTAMPS",), rate=7, count=9)
    assert control.of("other") == control.of("") == TraceSettings(levels=("OFF",), count=9)
    control.update("mlp", {"trace_level": [], "trace_rate": []})
    assert control.of("mlp") == control.of("")
    assert not control.is_on


def test_a_cleared_global_setting_is_that_of_the_start() -> None:
    control = TraceControl(ON)
    control.update("", {"trace_rate": ["50"], "trace_level": ["OFF"]})
    assert control.of("") == TraceSettings(levels=("OFF",), rate=50, count=3)
    control.update("", {"trace_rate": [], "trace_level": []})
    assert control.of("") == ON


def test_what_is_left_of_a_count_stays_when_other_settings_change() -> None:
    control = TraceControl(ON)
    assert taken(control.everywhere, [True, True]) == [True, True]
    control.update("", {"trace_rate": ["1"]})
    assert control.of("").count == 1
    control.update("", {"trace_count": ["5"]})
    assert control.of("").count == 5
    control.update("mlp", {"trace_rate": ["1"]})
    control.update("own", {"trace_count": ["2"]})
    for model in ("mlp", "own"):
        assert taken(control.by_model[model], [True, True]) == [True, True]
    control.update("mlp", {"trace_rate": ["2"]})
    control.update("", {"trace_rate": ["3"]})
    assert [control.of(model).count for model in ("mlp", "own")] == [3, 0]


def test_a_count_that_is_set_again_is_counted_down_again() -> None:
    control = TraceControl(ON)
    control.update("mlp", {"trace_rate": ["1"]})
    control.update("own", {"trace_count": ["2"]})
    for sampler in (control.everywhere, control.by_model["mlp"], control.by_model["own"]):
        assert taken(sampler, [True, True]) == [True, True]
    control.update("own", {"trace_count": ["2"]})
    assert [control.of(model).count for model in ("", "mlp", "own")] == [1, 1, 2]
    assert taken(control.by_model["own"], [True]) == [True]
    control.update("", {"trace_count": ["3"]})
    assert [control.of(model).count for model in ("", "mlp", "own")] == [3, 3, 1]


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("trace_colour", ["red"], "no trace setting 'trace_colour'; those that can be changed: trace_level, trace_rate"),
        ("trace_file", ["/etc/passwd"], "trace_file is set when the server starts (--trace-to), not over the network"),
        ("trace_rate", ["0"], "trace_rate is '0', expected one whole number of 1 or more"),
        ("trace_rate", ["1", "2"], "trace_rate is '1, 2', expected one whole number"),
        ("trace_rate", ["\u0661"], "expected one whole number"),
        ("trace_count", ["-2"], "trace_count is '-2', expected one whole number of -1 or more"),
        ("trace_count", ["9" * 30], "expected one whole number"),
        ("log_frequency", ["often"], "log_frequency is 'often', expected one whole number of 0 or more"),
        ("trace_level", ["MOST"], "trace_level is 'MOST', expected OFF, or of TIMESTAMPS and TENSORS one or both"),
        ("trace_level", ["OFF", "TIMESTAMPS"], "trace_level has OFF beside TIMESTAMPS, expected OFF alone"),
    ],
)
def test_a_wrong_setting_changes_nothing(name: str, values: list[str], text: str) -> None:
    control = TraceControl(ON)
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        control.update("", {"log_frequency": ["5"], name: values})
    assert control.of("") == ON


@pytest.mark.parametrize(
    ("sampler", "argument", "rate"),
    [
        ("always_on", "", 1),
        ("parentbased_always_on", "", 1),
        ("always_off", "", 0),
        ("traceidratio", "0.01", 100),
        ("parentbased_traceidratio", "0", 0),
        ("traceidratio", "many", 1),
        ("jaeger_remote", "", None),
        ("", "", None),
    ],
)
def test_the_standard_sampler_variables_are_followed(sampler: str, argument: str, rate: int | None) -> None:
    assert sampler_rate({"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": argument}) == rate


def test_traces_are_off_unless_asked_for() -> None:
    options, to_file = ObserveOptions(), ObserveOptions(trace_to="t.json", trace_rate=5)
    collector = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
    assert settings_at_start(options, collector).levels == ("OFF",)
    assert (destination(options, {}), destination(options, collector)) == ("", "otlp")
    assert settings_at_start(to_file, {}) == TraceSettings(levels=("TIMESTAMPS",), rate=5)
    assert destination(to_file, collector) == "t.json"
    asked = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER": "always_on"}
    assert settings_at_start(options, asked) == TraceSettings(levels=("TIMESTAMPS",), rate=1)
    assert settings_at_start(options, asked | {"OTEL_SDK_DISABLED": "true"}).levels == ("OFF",)
    assert settings_at_start(to_file, {"OTEL_TRACES_SAMPLER": "always_off"}).levels == ("OFF",)
    as_triton = ObserveOptions(trace_to="triton:t.json", trace_rate=5)
    assert settings_at_start(as_triton, {"OTEL_TRACES_SAMPLER": "always_on"}) == settings_at_start(as_triton, {})


def test_traces_that_have_nowhere_to_go_cannot_be_turned_on() -> None:
    check_can_trace("traces.json")
    check_can_trace("otlp")
    with pytest.raises(FailedPreconditionError, match=re.escape("start the server with --trace-to FILE or --trace-to otlp")):
        check_can_trace("")


def values(settings: Any) -> dict[str, list[str]]:
    return {name: list(setting.value) for name, setting in settings.settings.items()}


def test_trace_settings_are_read_and_changed_per_model(serving: Serving, tmp_path: Path) -> None:
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


def test_traces_in_tritons_format_begin_when_a_client_says_so(serving: Serving, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    options = ObserveOptions(trace_to=f"triton:{file}", trace_level=TraceLevel.OFF, trace_rate=1)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        expected = {
            "trace_level": ["OFF"],
            "trace_rate": ["1"],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
            "trace_mode": ["triton"],
            "trace_file": [str(file)],
        }
        assert values(client.get_trace_settings()) == expected
        client.infer("mlp", row(), request_id="before", client_timeout=CLIENT_TIMEOUT_S)
        client.update_trace_settings(settings={"trace_level": "TIMESTAMPS"})
        client.infer("mlp", row(), request_id="traced", client_timeout=CLIENT_TIMEOUT_S)
    assert [entry["request_id"] for entry in json.loads(file.read_text()) if "model_name" in entry] == ["traced"]


def test_log_settings_are_read_and_changed(serving: Serving, tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    options = ObserveOptions(access_log_file=log)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        told = client.get_log_settings(as_json=True)["settings"]
        assert told == {  # as scripts compare them with Triton's
            "log_file": {"string_param": ""},
            "log_info": {"bool_param": True},
            "log_warning": {"bool_param": True},
            "log_error": {"bool_param": True},
            "log_verbose_level": {"uint32_param": 0},
            "log_format": {"string_param": "default"},
        }
        client.infer("mlp", row(), request_id="before", client_timeout=CLIENT_TIMEOUT_S)
        client.update_log_settings({"access_log": True, "log_info": False, "log_format": "ISO8601", "log_verbose_level": 1})
        client.infer("mlp", row(), request_id="logged", client_timeout=CLIENT_TIMEOUT_S)
        assert server.call(lambda: server.service.observability.logs.access_log) is AccessLog.ALL
        assert client.get_log_settings(as_json=True)["settings"]["access_log"] == {"string_param": "all"}
        off = client.update_log_settings({"access_log": False}, as_json=True)["settings"]
        assert off["access_log"] == {"string_param": "off"}
        client.infer("mlp", row(), request_id="after", client_timeout=CLIENT_TIMEOUT_S)
        assert client.get_log_settings(as_json=True)["settings"]["log_format"] == {"string_param": "ISO8601"}
    assert [json.loads(line)["id"] for line in log.read_text().splitlines()] == ["logged"]


def test_the_log_can_be_verbose_from_the_start(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with serving(ObserveOptions(log_verbose=2)) as server, triton.InferenceServerClient(server.address) as client:
        assert client.get_log_settings(as_json=True)["settings"]["log_verbose_level"] == {"uint32_param": 2}
        logging.getLogger("halfserve.a.model").debug("in detail")
    logging.getLogger("halfserve.a.model").debug("after the server")
    assert "in detail" in caplog.text
    assert "after the server" not in caplog.text


def test_the_level_of_tensors_is_kept_and_traces_nothing_more(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ObserveOptions(trace_to=str(tmp_path / "traces.json"), trace_rate=1)
    with serving(options) as server, triton.InferenceServerClient(server.address) as client:
        both = client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS", "TENSORS"]})
        assert (
            values(both)["trace_level"] == values(client.get_trace_settings("mlp"))["trace_level"] == ["TIMESTAMPS", "TENSORS"]
        )
        assert server.call(lambda: server.service.observability.traces.is_on)
        client.update_trace_settings(settings={"trace_level": ["TENSORS"]})
        assert not server.call(lambda: server.service.observability.traces.is_on)
        cleared = client.update_trace_settings(settings={"trace_level": None})
        assert values(cleared)["trace_level"] == ["TIMESTAMPS"]
    assert "TENSORS in trace_level has no effect" in caplog.text


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
        observer = server.service.observability.observer
        assert observer.log is None
        assert observer.tracer is None
    assert refused.value.status() == f"StatusCode.{status}"
    assert text in refused.value.message()


def test_more_settings_than_there_can_be_are_refused_unread(serving: Serving) -> None:
    text = "1000 settings are given, expected at most 64"
    with serving(ObserveOptions()) as server, triton.InferenceServerClient(server.address) as client:
        with pytest.raises(InferenceServerException, match=text):
            client.update_trace_settings(settings={f"none{number}": "1" for number in range(1000)})
        with pytest.raises(InferenceServerException, match=text):
            client.update_log_settings({f"none{number}": True for number in range(1000)})
