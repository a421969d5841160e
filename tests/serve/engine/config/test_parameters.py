"""Our own parameters of a config.pbtxt, and settings without effect."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import ENSEMBLE, ONNX, TORCH_EXPORT
from halfserve.serve.engine.config.parameters import (
    OWN_PARAMETERS,
    PREFIX,
    Parse,
    check_own_parameters,
    ignored_settings,
    number,
    one_of,
    own_parameter,
    switch,
)
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.padding.padding_rule import parse_padding_rule, rising_lengths, whole

SOURCE = Path("m/config.pbtxt")


def config(**values: str) -> ModelConfig:
    message = ModelConfig()
    for key, value in values.items():
        message.parameters[PREFIX + key].string_value = value
    return message


def test_a_known_key_is_read_and_an_absent_one_is_none() -> None:
    assert own_parameter(config(warm_up="off"), "halfserve.warm_up") is False
    assert own_parameter(config(), "halfserve.warm_up") is None


def test_every_key_is_ours_and_in_order() -> None:
    assert all(key.startswith(PREFIX) for key in OWN_PARAMETERS)
    assert list(OWN_PARAMETERS) == sorted(OWN_PARAMETERS)


def test_every_key_that_can_be_set_is_documented() -> None:
    for key, parameter in OWN_PARAMETERS.items():
        assert parameter.default, key
        assert parameter.values, key
        assert parameter.meaning.endswith((".", ").")), key


def test_other_peoples_parameters_are_theirs() -> None:
    message = config()
    message.parameters["intra_op_thread_count"].string_value = "2"
    check_own_parameters(message, SOURCE)


def test_reported_parameters_may_be_sent_back() -> None:
    check_own_parameters(config(provider="anything", precision="at all"), SOURCE)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"warmup": "off"}, r"m/config.pbtxt: parameter 'halfserve.warmup' is not known; did you mean 'halfserve.warm_up'\?"),
        ({"": "1"}, "parameter 'halfserve.' is not known; "),
        ({"qqqqqqqq": "1"}, "parameter 'halfserve.qqqqqqqq' is not known; known are halfserve."),
        ({"fp32_twin": "a\0b"}, r"parameter 'halfserve.fp32_twin' is 'a\\x00b', expected a path without NUL characters"),
        ({"warm_up": "maybe"}, "m/config.pbtxt: parameter 'halfserve.warm_up' is 'maybe', expected 'on' or 'off'"),
    ],
)
def test_a_misspelt_parameter_is_refused(values: dict[str, str], text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        check_own_parameters(config(**values), SOURCE)


@pytest.mark.parametrize(
    ("parse", "good", "bad", "expected"),
    [
        (switch, {"on": True, "TRUE": True, "1": True, "off": False, "false": False, "0": False}, ["", "2"], "'on' or 'off'"),
        (one_of("a", "b"), {"a": "a"}, ["c", "A", ""], "one of 'a', 'b'"),
        (number(0), {"0": 0.0, "1e3": 1000.0}, ["-1", "nan", "inf", "x", ""], "a number of 0 or more"),
        (number(0, 1, above=True), {"1": 1.0, ".5": 0.5}, ["0", "1.1"], "a number above 0 and at most 1"),
        (whole, {"1": 1, "4096": 4096}, ["0", "-1", "1.5", "x", "", "²"], "a whole number of 1 or more"),
        (
            rising_lengths,
            {"16": (16,), "16, 32,64": (16, 32, 64)},
            ["", "0,1", "2,1", "1,1", "1;2", "-1,2"],
            "lengths in rising order, such as '16,32,64,128'",
        ),
    ],
)
def test_values_are_parsed_strictly(parse: Parse, good: dict[str, object], bad: list[str], expected: str) -> None:
    assert {value: parse(value) for value in good} == good
    for value in bad:
        with pytest.raises(ValueError, match=f"^expected {expected}$"):
            parse(value)


@given(st.sampled_from(sorted(OWN_PARAMETERS)), st.text(max_size=20))
def test_any_text_is_taken_or_refused_and_never_breaks(key: str, value: str) -> None:
    message = ModelConfig()
    message.parameters[key].string_value = value
    with contextlib.suppress(ModelLoadError):
        check_own_parameters(message, SOURCE)


def test_a_padding_rule_names_inputs_with_values_and_outputs() -> None:
    rule = parse_padding_rule("ids[1]=7 pairs[1]=-1.5 pairs[2]=-1.5 -> hidden[1] odd[x][2]")
    assert [(one.name, one.axes, one.value) for one in rule.inputs] == [("ids", (1,), 7.0), ("pairs", (1, 2), -1.5)]
    assert rule.cut == (("hidden", 1), ("odd[x]", 2))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected inputs with axis and value"),
        ("-> hidden[1]", "expected inputs with axis and value"),
        ("ids[1]", r"'ids\[1\]' is no input with axis and value"),
        ("ids=0", "'ids=0' is no input with axis and value"),
        ("ids[0]=0", r"'ids\[0\]=0' names axis 0, which is the batch dimension"),
        ("ids[1]=none", r"'ids\[1\]=none' has no number as its value"),
        ("ids[1]=0 ids[1]=0", "'ids' is given twice"),
        ("ids[1]=0 ids[2]=1", "'ids' is given twice"),
        ("ids[1]=0 -> hidden", "'hidden' is no output with axis"),
        ("ids[1]=0 -> hidden[1] hidden[1]", r"'hidden\[1\]' is given twice"),
    ],
)
def test_a_padding_rule_says_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_padding_rule(text)


def test_settings_without_effect_are_named() -> None:
    config = text_format.Parse(
        "optimization { eager_batching: true } metric_tags { key: 'a' value: 'b' } max_batch_size: 2", ModelConfig()
    )
    assert ignored_settings(config, ONNX, on_device=True) == ["metric_tags", "optimization.eager_batching"]


def test_settings_without_effect_inside_others_are_named_too() -> None:
    text = """max_batch_size: 8 input [{name: "x" data_type: TYPE_FP16 dims: [3, 5] optional: true}]
      dynamic_batching { preserve_ordering: true preferred_batch_size: [4]
        default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 5 } }
      instance_group [{ count: 1 kind: KIND_CPU }, { count: 1 kind: KIND_CPU host_policy: "numa" }]
      parameters { key: "team" value { string_value: "vision" } } version_policy { all {} }"""
    assert ignored_settings(text_format.Parse(text, ModelConfig()), ONNX, on_device=True) == [
        "dynamic_batching.preserve_ordering",
        "input.optional",
        "instance_group.host_policy",
    ]


def test_onnx_runtime_settings_have_no_effect_on_torch_programs() -> None:
    text = """max_batch_size: 8
      optimization { graph { level: 1 } cuda { graphs: true }
        execution_accelerators { gpu_execution_accelerator { name: "cuda" } } }
      parameters { key: "execution_mode" value { string_value: "1" } }
      parameters { key: "halfserve.optimization_level" value { string_value: "basic" } }
      parameters { key: "halfserve.cuda_graphs" value { string_value: "on" } }
      parameters { key: "halfserve.warm_up" value { string_value: "off" } }
      parameters { key: "intra_op_thread_count" value { string_value: "2" } }
      parameters { key: "session.set_denormal_as_zero" value { string_value: "1" } }
      parameters { key: "team" value { string_value: "vision" } }"""
    config = text_format.Parse(text, ModelConfig())
    assert ignored_settings(config, ONNX, on_device=True) == []
    assert ignored_settings(config, TORCH_EXPORT, on_device=True) == [
        "optimization.execution_accelerators",
        "optimization.graph.level",
        "parameters.execution_mode",
        "parameters.halfserve.optimization_level",
        "parameters.session.set_denormal_as_zero",
    ]


def test_device_settings_have_no_effect_on_the_cpu() -> None:
    text = """optimization { graph { level: 1 } cuda { graphs: true }
        execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }
      parameters { key: "gpu_mem_limit" value { string_value: "1000000000" } }
      parameters { key: "execution_mode" value { string_value: "1" } }"""
    config = text_format.Parse(text, ModelConfig())
    assert ignored_settings(config, ONNX, on_device=True) == []
    assert ignored_settings(config, ONNX, on_device=False) == [
        "optimization.cuda.graphs",
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "parameters.gpu_mem_limit",
    ]


def test_a_parameter_that_means_something_to_triton_alone_is_named() -> None:
    text = 'parameters { key: "share_session_between_instances" value { string_value: "true" } }'
    config = text_format.Parse(text, ModelConfig())
    assert ignored_settings(config, ONNX, on_device=True) == ["parameters.share_session_between_instances"]


def test_of_an_ensembles_parameters_only_its_task_is_read() -> None:
    keys = ("halfserve.task", "halfserve.max_compute_s", "halfserve.steps", "x")
    text = " ".join(f'parameters {{ key: "{key}" value {{ string_value: "1" }} }}' for key in keys)
    config = text_format.Parse(f'{text} ensemble_scheduling {{ step {{ model_name: "a" }} }}', ModelConfig())
    assert ignored_settings(config, ENSEMBLE, on_device=False) == ["parameters.halfserve.max_compute_s"]
