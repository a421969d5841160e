"""Limits, priorities and timeouts of a configuration."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.config.batching import QueuePolicy, Turn, batch_limits, few_sizes, queue_policy
from halfserve.serve.engine.config.model_config import Defaults
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.queueing.pace import BatchLimits, padded_rows


def limits(text: str, max_batch_size: int = 16) -> BatchLimits:
    config = text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())
    return batch_limits(config, Defaults(max_queue_size=100))


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "halfserve.{key}" value {{ string_value: "{value}" }} }}'


PREFERRED = "dynamic_batching { preferred_batch_size: [8, 4] max_queue_delay_microseconds: 500 }"


def test_an_empty_config_batches_without_delay() -> None:
    assert limits("") == BatchLimits(max_rows=16, max_waiting=100)
    assert limits("", max_batch_size=0).max_rows == 1


def test_the_memory_of_waiting_requests_is_bounded() -> None:
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


@pytest.mark.parametrize(
    ("text", "most", "sizes"),
    [
        ("", 1, ()),
        ("", 5, (1, 2, 4, 5)),
        ("", 16, (1, 2, 4, 8, 12, 16)),
        ("", 128, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)),
        (PREFERRED, 16, (1, 2, 4, 8, 12, 16)),
        (f"{PREFERRED} {parameter('pad_to_preferred', 'on')}", 16, (4, 8)),
        (parameter("pad_to_preferred", "off"), 16, ()),
        ("sequence_batching { }", 16, ()),
    ],
)
def test_few_sizes_waste_little_and_follow_the_configuration(text: str, most: int, sizes: tuple[int, ...]) -> None:
    found = few_sizes(text_format.Parse(f'name: "m" max_batch_size: {most} {text}', ModelConfig()))
    assert found == sizes
    if not text and found:
        assert all(padded_rows(rows, found) <= 1.5 * rows + 2 for rows in range(1, most + 1))


def test_the_default_policy_bounds_levels_without_their_own() -> None:
    one = limits("dynamic_batching { default_queue_policy { max_queue_size: 7 } }")
    assert (one.max_waiting, one.max_waiting_by_level) == (7, {})
    levels = "priority_levels: 3 default_queue_policy { max_queue_size: 90 }"
    three = limits(f"dynamic_batching {{ {levels} priority_queue_policy {{ key: 2 value {{ max_queue_size: 5 }} }} }}")
    assert (three.max_waiting, three.max_waiting_by_level, three.max_waiting_of_others) == (185, {1: 5}, 90)


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


def policy(batching: str) -> QueuePolicy:
    return queue_policy(text_format.Parse(f'name: "m" dynamic_batching {{ {batching} }}', ModelConfig()))


THREE = """priority_levels: 3 default_priority_level: 2
  default_queue_policy { default_timeout_microseconds: 1000000 }
  priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 500000 max_queue_size: 7 } }"""


def test_a_model_that_says_nothing_lets_requests_choose_their_timeout() -> None:
    assert policy("").turn(0, 0.25) == Turn(level=0, drop_after_s=0.25, delay_after_s=None)
    assert policy("").turn(1, None) == Turn(level=0, drop_after_s=None, delay_after_s=None)


@pytest.mark.parametrize(
    ("priority", "turn"),
    [
        (0, Turn(level=1, drop_after_s=1.0, delay_after_s=None)),
        (1, Turn(level=0, drop_after_s=1.0, delay_after_s=None)),
        (3, Turn(level=2, drop_after_s=None, delay_after_s=0.5)),
    ],
)
def test_priorities_have_policies_of_their_own(priority: int, turn: Turn) -> None:
    assert policy(THREE).turn(priority, 0.1) == turn  # a timeout of its own is not allowed by this configuration
    assert policy(THREE).max_waiting_by_level[2] == 7
    assert policy("priority_levels: 2 default_queue_policy { max_queue_size: 9 }").most_waiting == 18


def test_a_request_may_shorten_its_timeout_where_that_is_allowed() -> None:
    allowing = policy("default_queue_policy { default_timeout_microseconds: 1000000 allow_timeout_override: true }")
    assert allowing.turn(0, 0.25).drop_after_s == 0.25
    assert allowing.turn(0, 4.0).drop_after_s == 1.0
    assert policy("default_queue_policy { allow_timeout_override: true }").turn(0, 4.0).drop_after_s == 4.0


def test_levels_may_be_as_many_as_tritons() -> None:
    many = policy(
        f"priority_levels: {2**64 - 1} default_priority_level: {2**32 + 1} default_queue_policy {{ max_queue_size: 9 }}"
    )
    assert [many.turn(priority, None).level for priority in (0, 1, 2**32, 2**64 - 1)] == [2**32, 0, 2**32 - 1, 2**64 - 2]
    assert limits(f"dynamic_batching {{ priority_levels: {2**64 - 1} }}").levels == 2**64 - 1


def test_without_a_default_the_least_urgent_level_is_it() -> None:
    assert policy("priority_levels: 3").turn(0, None).level == 2


@pytest.mark.parametrize("priority", [4, 2**40])
def test_a_priority_that_the_model_lacks_is_its_default(priority: int) -> None:
    assert policy(THREE).turn(priority, None) == policy(THREE).turn(0, None)
    assert policy("").turn(priority, None).level == 0


@pytest.mark.parametrize(
    ("batching", "text"),
    [
        (
            "priority_levels: 2 default_priority_level: 3",
            "default_priority_level is 3, expected 1 to priority_levels",
        ),
        ("priority_queue_policy { key: 2 value {} }", "priority_queue_policy has a level 2, expected 1 to priority_levels"),
        ("priority_levels: 2 priority_queue_policy { key: 0 value {} }", "priority_queue_policy has a level 0"),
    ],
)
def test_priorities_that_contradict_each_other_are_refused(batching: str, text: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model 'm': {text}"):
        policy(batching)
