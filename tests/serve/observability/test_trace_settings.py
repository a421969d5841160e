from __future__ import annotations

import re

import pytest

from serve.engine.errors import FailedPreconditionError, InvalidArgumentError
from serve.observability.options import ObserveOptions
from serve.observability.trace_environment import check_can_trace, destination, sampler_rate, settings_at_start
from serve.observability.trace_settings import Sampler, TraceControl, TraceSettings

ON = TraceSettings(level="TIMESTAMPS", rate=2, count=3)


def taken(sampler: Sampler, decisions: list[bool | None]) -> list[bool]:
    return [sampler.take(decided=decision) for decision in decisions]


def test_one_request_in_so_many_is_traced_up_to_a_count() -> None:
    assert taken(Sampler(ON), [None] * 8) == [False, True, False, True, False, True, False, False]


def test_the_callers_decision_goes_first_but_not_over_the_bound() -> None:
    assert taken(Sampler(ON), [True, False, True, True, True]) == [True, False, True, True, False]


def test_off_is_off_for_every_caller() -> None:
    assert taken(Sampler(TraceSettings()), [True, None, False]) == [False] * 3


def test_a_model_follows_the_global_settings_but_for_its_own() -> None:
    control = TraceControl(TraceSettings())
    control.update("mlp", {"trace_level": ["TIMESTAMPS"], "trace_rate": ["7"]})
    control.update("", {"trace_count": ["9"]})
    assert control.is_on
    assert control.of("mlp") == TraceSettings(level="TIMESTAMPS", rate=7, count=9)
    assert control.of("other") == control.of("") == TraceSettings(level="OFF", count=9)
    control.update("mlp", {"trace_level": [], "trace_rate": []})
    assert control.of("mlp") == control.of("")
    assert not control.is_on


def test_a_cleared_global_setting_is_that_of_the_start() -> None:
    control = TraceControl(ON)
    control.update("", {"trace_rate": ["50"], "trace_level": ["OFF"]})
    assert control.of("") == TraceSettings(level="OFF", rate=50, count=3)
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
        ("trace_level", ["TENSORS"], "trace_level is 'TENSORS', expected OFF or TIMESTAMPS; tensors are never written"),
        ("trace_level", ["OFF", "TIMESTAMPS"], "trace_level is both OFF and TIMESTAMPS"),
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
    assert settings_at_start(options, collector).level == "OFF"
    assert (destination(options, {}), destination(options, collector)) == ("", "otlp")
    assert settings_at_start(to_file, {}) == TraceSettings(level="TIMESTAMPS", rate=5)
    assert destination(to_file, collector) == "t.json"
    asked = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_TRACES_SAMPLER": "always_on"}
    assert settings_at_start(options, asked) == TraceSettings(level="TIMESTAMPS", rate=1)
    assert settings_at_start(options, asked | {"OTEL_SDK_DISABLED": "true"}).level == "OFF"
    assert settings_at_start(to_file, {"OTEL_TRACES_SAMPLER": "always_off"}).level == "OFF"


def test_traces_that_have_nowhere_to_go_cannot_be_turned_on() -> None:
    check_can_trace("traces.json")
    check_can_trace("otlp")
    with pytest.raises(FailedPreconditionError, match=re.escape("start the server with --trace-to FILE or --trace-to otlp")):
        check_can_trace("")
