from __future__ import annotations

import pytest
from google.protobuf import text_format

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.queue_policy import QueuePolicy, Turn, queue_policy
from serve.engine.errors import ModelLoadError


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
    assert policy(THREE).max_waiting_by_level == {2: 7}
    assert policy("priority_levels: 2 default_queue_policy { max_queue_size: 9 }").max_waiting_by_level == {0: 9, 1: 9}


def test_a_request_may_shorten_its_timeout_where_that_is_allowed() -> None:
    allowing = policy("default_queue_policy { default_timeout_microseconds: 1000000 allow_timeout_override: true }")
    assert allowing.turn(0, 0.25).drop_after_s == 0.25
    assert allowing.turn(0, 4.0).drop_after_s == 1.0
    assert policy("default_queue_policy { allow_timeout_override: true }").turn(0, 4.0).drop_after_s == 4.0


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
        (f"priority_levels: {2**64 - 1}", f"priority_levels is {2**64 - 1}, expected at most 1000"),
        ("priority_levels: 1001", "priority_levels is 1001, expected at most 1000"),
    ],
)
def test_priorities_that_contradict_each_other_or_are_too_many_are_refused(batching: str, text: str) -> None:
    with pytest.raises(ModelLoadError, match=f"model 'm': {text}"):
        policy(batching)
