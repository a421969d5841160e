from __future__ import annotations

from google.protobuf import text_format

from protos.model_config_pb2 import ModelConfig
from serve.engine.ignored_settings import ignored_settings


def test_settings_without_effect_are_named() -> None:
    config = text_format.Parse(
        "optimization { eager_batching: true } response_cache { enable: true } max_batch_size: 2", ModelConfig()
    )
    assert ignored_settings(config) == ["optimization.eager_batching", "response_cache"]


def test_settings_without_effect_inside_others_are_named_too() -> None:
    text = """max_batch_size: 8 input [{name: "x" data_type: TYPE_FP16 dims: [3, 5] optional: true}]
      dynamic_batching { preserve_ordering: true preferred_batch_size: [4]
        default_queue_policy { max_queue_size: 9 default_timeout_microseconds: 5 } }
      instance_group [{ count: 1 kind: KIND_CPU }, { count: 1 kind: KIND_CPU host_policy: "numa" }]
      parameters { key: "team" value { string_value: "vision" } } version_policy { all {} }"""
    assert ignored_settings(text_format.Parse(text, ModelConfig())) == [
        "dynamic_batching.preserve_ordering",
        "input.optional",
        "instance_group.host_policy",
    ]
