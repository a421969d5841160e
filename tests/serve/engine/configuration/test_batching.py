from __future__ import annotations

import pytest
from google.protobuf import text_format

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.batching import batch_limits
from serve.engine.configuration.config import Defaults
from serve.engine.errors import ModelLoadError
from serve.engine.queueing.batch_limits import BatchLimits


def limits(text: str, max_batch_size: int = 16) -> BatchLimits:
    config = text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())
    return batch_limits(config, Defaults(max_queue_size=100))


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "halfserve.{key}" value {{ string_value: "{value}" }} }}'


PREFERRED = "dynamic_batching { preferred_batch_size: [8, 4] max_queue_delay_microseconds: 500 }"


def test_a_config_that_says_nothing_batches_what_is_there() -> None:
    assert limits("") == BatchLimits(max_rows=16, max_waiting=100)
    assert limits("", max_batch_size=0).max_rows == 1


def test_the_memory_of_what_waits_is_bounded_as_asked() -> None:
    config = ModelConfig(name="m", max_batch_size=4)
    assert batch_limits(config, Defaults(max_queue_mib=3)).max_waiting_bytes == 3 * 2**20


def test_sizes_and_delay_are_taken_over() -> None:
    expected = BatchLimits(max_rows=16, max_waiting=100, max_delay_s=0.0005, preferred_rows=(8, 4))
    assert limits(PREFERRED) == expected
    assert expected.targets == (16, 8, 4)


def test_our_own_settings_are_taken_over() -> None:
    text = f"{PREFERRED} {parameter('pad_to_preferred', 'on')} {parameter('latency_target_ms', '12.5')}"
    asked = limits(f"{text} {parameter('compute_weight', '2')}")
    assert (asked.padded_rows, asked.latency_target_s, asked.compute_weight) == ((4, 8), 0.0125, 2.0)
    assert limits(f"{PREFERRED} {parameter('pad_to_preferred', 'off')}").padded_rows == ()


def test_the_default_policy_bounds_each_level_that_has_none_of_its_own() -> None:
    one = limits("dynamic_batching { default_queue_policy { max_queue_size: 7 } }")
    assert (one.max_waiting, one.max_waiting_by_level) == (7, {})
    levels = "priority_levels: 3 default_queue_policy { max_queue_size: 90 }"
    three = limits(f"dynamic_batching {{ {levels} priority_queue_policy {{ key: 2 value {{ max_queue_size: 5 }} }} }}")
    assert (three.max_waiting, three.max_waiting_by_level) == (185, {0: 90, 1: 5, 2: 90})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("dynamic_batching { preferred_batch_size: [4, 32] }", "preferred_batch_size has 32, expected 1 to max_batch_size, 16"),
        ("dynamic_batching { preferred_batch_size: [0] }", "preferred_batch_size has 0, expected 1 to max_batch_size"),
        (parameter("pad_to_preferred", "on"), "pad_to_preferred is on, but there are no sizes to pad to; list them"),
        (parameter("pad_to_preferred", "8"), "'halfserve.pad_to_preferred' is '8', expected 'on' or 'off'"),
        (parameter("latency_target_ms", "0"), "'halfserve.latency_target_ms' is '0', expected a number above 0"),
        (parameter("compute_weight", "nan"), "'halfserve.compute_weight' is 'nan', expected a number above 0"),
    ],
)
def test_contradictions_are_refused(text: str, error: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model 'm': .*{error}"):
        limits(text)


def test_padding_without_a_batch_dimension_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="the model has no batch dimension to pad"):
        limits(parameter("pad_to_preferred", "on"), max_batch_size=0)
