from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.own_parameters import (
    OWN_PARAMETERS,
    PREFIX,
    Parse,
    check_own_parameters,
    number,
    one_of,
    own_parameter,
    switch,
)
from serve.engine.errors import ModelLoadError

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
    documented = (Path(__file__).parents[4] / "docs" / "serving.md").read_text(encoding="utf-8")
    for key in OWN_PARAMETERS:
        assert f"| `{key.removeprefix(PREFIX)}` |" in documented, key


def test_other_peoples_parameters_are_theirs() -> None:
    message = config()
    message.parameters["intra_op_thread_count"].string_value = "2"
    check_own_parameters(message, SOURCE)


def test_what_the_server_reports_may_be_sent_back_to_it() -> None:
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
def test_what_is_misspelt_is_refused(values: dict[str, str], text: str) -> None:
    with pytest.raises(ModelLoadError, match=text):
        check_own_parameters(config(**values), SOURCE)


@pytest.mark.parametrize(
    ("parse", "good", "bad", "expected"),
    [
        (switch, {"on": True, "TRUE": True, "1": True, "off": False, "false": False, "0": False}, ["", "2"], "'on' or 'off'"),
        (one_of("a", "b"), {"a": "a"}, ["c", "A", ""], "one of 'a', 'b'"),
        (number(0), {"0": 0.0, "1e3": 1000.0}, ["-1", "nan", "inf", "x", ""], "a number of 0 or more"),
        (number(0, 1, above=True), {"1": 1.0, ".5": 0.5}, ["0", "1.1"], "a number above 0 and at most 1"),
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
