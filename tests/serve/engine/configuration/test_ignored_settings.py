from __future__ import annotations

from google.protobuf import text_format

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.ignored_settings import ignored_settings
from serve.engine.model_kinds import ONNX, TORCH_EXPORT


def test_settings_without_effect_are_named() -> None:
    config = text_format.Parse(
        "optimization { eager_batching: true } response_cache { enable: true } max_batch_size: 2", ModelConfig()
    )
    assert ignored_settings(config, ONNX, on_device=True) == ["optimization.eager_batching", "response_cache"]


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


def test_what_onnx_runtime_alone_acts_on_has_no_effect_on_torch_programs() -> None:
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
        "optimization.cuda.graphs",
        "optimization.execution_accelerators",
        "optimization.graph.level",
        "parameters.execution_mode",
        "parameters.halfserve.cuda_graphs",
        "parameters.halfserve.optimization_level",
        "parameters.session.set_denormal_as_zero",
    ]


def test_what_a_device_is_told_has_no_effect_on_the_cpu() -> None:
    text = """optimization { graph { level: 1 } cuda { graphs: true }
        execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }
      parameters { key: "gpu_mem_limit" value { string_value: "1000000000" } }
      parameters { key: "execution_mode" value { string_value: "1" } }"""
    config = text_format.Parse(text, ModelConfig())
    assert ignored_settings(config, ONNX, on_device=True) == []
    assert ignored_settings(config, ONNX, on_device=False) == [
        "optimization.cuda.graphs",
        "optimization.execution_accelerators",
        "parameters.gpu_mem_limit",
    ]


def test_a_parameter_that_means_something_to_triton_alone_is_named() -> None:
    text = 'parameters { key: "share_session_between_instances" value { string_value: "true" } }'
    config = text_format.Parse(text, ModelConfig())
    assert ignored_settings(config, ONNX, on_device=True) == ["parameters.share_session_between_instances"]
