from __future__ import annotations

from google.protobuf import text_format

from protos import inference_pb2 as pb
from protos.model_config_pb2 import ModelConfig
from serve.http.message_json import to_json

CONFIG = """
name: "m" max_batch_size: 8
input { name: "x" data_type: TYPE_FP16 dims: [3, -1] reshape { shape: [3, -1] } }
version_policy { specific { versions: [1, 9007199254740993] } }
dynamic_batching {
  max_queue_delay_microseconds: 100
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 5 } }
}
parameters { key: "halfserve.x" value { string_value: "7" } }
"""


def test_64_bit_numbers_are_numbers_wherever_they_are() -> None:
    content = to_json(text_format.Parse(CONFIG, ModelConfig()))
    assert content["input"][0]["dims"] == [3, -1]
    assert content["input"][0]["data_type"] == "TYPE_FP16"
    assert content["input"][0]["reshape"] == {"shape": [3, -1]}
    assert content["version_policy"] == {"specific": {"versions": [1, 9007199254740993]}}
    assert content["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert content["dynamic_batching"]["priority_queue_policy"]["1"]["default_timeout_microseconds"] == 5
    assert content["parameters"] == {"halfserve.x": {"string_value": "7"}}  # text stays text


def test_defaults_are_written_out() -> None:
    content = to_json(pb.ModelStatistics(name="m"))
    assert content["inference_count"] == 0
    assert content["batch_stats"] == []
