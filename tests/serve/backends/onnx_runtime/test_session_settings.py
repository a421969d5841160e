from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.onnx_runtime.session_settings import (
    CUDA_DEFAULTS,
    CUDA_PARAMETERS,
    SESSION_KEYS,
    OptimizationLevel,
    SessionSettings,
    read_settings,
)
from halfserve.serve.engine import resource_limits
from halfserve.serve.engine.backend import ONNX, DevicePlacement
from halfserve.serve.engine.config.parameters import ONNX_ONLY_PARAMETERS, ONNX_ONLY_PREFIXES, ignored_settings
from halfserve.serve.engine.errors import ModelLoadError
from halfserve.serve.engine.resource_limits import fewer_cores
from tests.models import save_mlp
from tests.serve.backends.support import load_backend

MODEL = Path("m.onnx")


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def accelerator(text: str) -> str:
    return f"optimization {{ execution_accelerators {{ {text} }} }}"


def settings(text: str) -> SessionSettings:
    config = text_format.Parse(text, ModelConfig())
    assert ignored_settings(config, ONNX, on_device=True) == [], "what is read is not called ignored"
    return read_settings(config, MODEL)


def test_what_a_session_takes_is_known_to_be_onnx_runtimes_own() -> None:
    assert ONNX_ONLY_PREFIXES == SESSION_KEYS
    assert CUDA_PARAMETERS.keys() <= ONNX_ONLY_PARAMETERS


def test_an_empty_configuration_leaves_everything_to_the_server() -> None:
    assert settings("") == SessionSettings()


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("optimization { graph { level: 0 } }", None),
        ("optimization { graph { level: 1 } }", OptimizationLevel.EXTENDED),
        ("optimization { graph { level: -1 } }", OptimizationLevel.BASIC),
        ("optimization { graph { level: 2 } }", OptimizationLevel.DISABLED),
        (parameter("halfserve.optimization_level", "all"), OptimizationLevel.ALL),
        (
            f"optimization {{ graph {{ level: 1 }} }} {parameter('halfserve.optimization_level', 'basic')}",
            OptimizationLevel.BASIC,
        ),
    ],
)
def test_the_optimization_level(text: str, level: OptimizationLevel | None) -> None:
    assert settings(text).level is level


def test_threads_memory_and_the_runtimes_own_keys() -> None:
    read = settings(
        "\n".join(
            parameter(key, value)
            for key, value in {
                "intra_op_thread_count": "2",
                "inter_op_thread_count": "3",
                "execution_mode": "1",
                "enable_mem_arena": "0",
                "enable_mem_pattern": "false",
                "memory.enable_memory_arena_shrinkage": "cpu:0",
                "session.set_denormal_as_zero": "1",
                "somebody.elses": "x",
            }.items()
        )
    )
    assert read == SessionSettings(
        intra_op_threads=2,
        inter_op_threads=3,
        parallel=True,
        memory_arena=False,
        memory_pattern=False,
        arena_shrinkage="cpu:0",
        session_entries={"session.set_denormal_as_zero": "1"},
    )


def test_a_session_opens_with_all_of_them(tmp_path: Path) -> None:
    config = ModelConfig()
    for key in ("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "session.set_denormal_as_zero"):
        config.parameters[key].string_value = "1"
    config.parameters["enable_mem_arena"].string_value = "1"
    config.parameters["memory.enable_memory_arena_shrinkage"].string_value = "cpu:0"
    config.optimization.graph.level = -1
    backend = load_backend(save_mlp(tmp_path / "m.onnx"), DevicePlacement(use_gpu=False), config)
    assert backend.provider == "CPUExecutionProvider"
    assert config.parameters["halfserve.optimization_level"].string_value == "basic"


def graphs_by_option(value: str) -> str:
    return accelerator(
        f'gpu_execution_accelerator {{ name: "cuda" parameters {{ key: "enable_cuda_graph" value: "{value}" }} }}'
    )


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("", None),
        ("optimization { cuda { graphs: true } }", True),
        ("optimization { cuda { graphs: false } }", False),
        (graphs_by_option("1"), True),
        (graphs_by_option("True"), True),
        (graphs_by_option("0"), False),
        (parameter("halfserve.cuda_graphs", "off") + graphs_by_option("1"), False),
        (parameter("halfserve.cuda_graphs", "on") + graphs_by_option("0"), True),
        (parameter("halfserve.cuda_graphs", "on"), True),
        ("optimization { cuda { graphs: true } }" + parameter("halfserve.cuda_graphs", "off"), False),
    ],
)
def test_cuda_graphs_are_ours_to_switch_on(text: str, *, on: bool | None) -> None:
    read = settings(text)
    assert read.cuda_graphs is on
    assert "enable_cuda_graph" not in read.accelerators.cuda


def test_accelerators_by_tritons_names() -> None:
    text = """
      gpu_execution_accelerator {
        name: "tensorrt"
        parameters { key: "precision_mode" value: "FP16" }
        parameters { key: "max_workspace_size_bytes" value: "1073741824" }
        parameters { key: "trt_engine_cache_enable" value: "true" }
      }
      gpu_execution_accelerator { name: "cuda" parameters { key: "prefer_nhwc" value: "1" } }
    """
    read = settings(accelerator(text)).accelerators
    assert read.tensorrt == {"trt_fp16_enable": "1", "trt_max_workspace_size": "1073741824", "trt_engine_cache_enable": "1"}
    assert read.cuda == {**CUDA_DEFAULTS, "prefer_nhwc": "1"}


def test_cuda_options_among_the_parameters_as_in_older_configurations() -> None:
    text = (
        parameter("cudnn_conv_algo_search", "0") + parameter("gpu_mem_limit", "1000") + parameter("arena_extend_strategy", "1")
    )
    assert settings(text).accelerators.cuda == {
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "gpu_mem_limit": "1000",
        "arena_extend_strategy": "kSameAsRequested",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (parameter("intra_op_thread_count", "-1"), "'intra_op_thread_count' is '-1', expected a whole number of 0"),
        (
            parameter("intra_op_thread_count", "1025"),
            "'intra_op_thread_count' is '1025', expected a whole number of 0 .* to 1024",
        ),
        (parameter("inter_op_thread_count", "9" * 5000), "expected a whole number of 0 .* to 1024"),
        (parameter("inter_op_thread_count", "two"), "'inter_op_thread_count' is 'two', expected a whole number of 0"),
        (parameter("execution_mode", "parallel"), "'execution_mode' is 'parallel', expected '0' or '1'"),
        (parameter("halfserve.optimization_level", "most"), "'most', expected one of 'all', 'extended', 'basic', 'disabled'"),
        ("optimization { graph { level: 7 } }", r"level is 7, expected 0 \(all\), 1 \(extended\), -1 \(basic\) or 2"),
        (
            accelerator(
                'gpu_execution_accelerator { name: "tensorrt" parameters { key: "trt_cuda_graph_enable" value: "1" } }'
            ),
            "tensorrt's trt_cuda_graph_enable is on, which would answer from an earlier batch; remove it",
        ),
        (accelerator('gpu_execution_accelerator { name: "tpu" }'), "'tpu' is not known, expected 'tensorrt' or 'cuda'"),
        (
            accelerator('gpu_execution_accelerator { name: "tensorrt" parameters { key: "precision_mode" value: "FP8" } }'),
            "precision_mode is 'FP8', expected one of FP32, FP16, INT8",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_file(text: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^m.onnx: .*{message}"):
        settings(text)


@pytest.mark.parametrize(
    "key",
    [
        "session.model_external_initializers_file_folder_path",
        "session.collect_node_memory_stats_to_file",
        "session.resource_cuda_partitioning_settings",
        "session.load_model_format",
        "ep.context_file_path",
    ],
)
def test_settings_that_have_the_runtime_use_files_are_refused(key: str) -> None:
    with pytest.raises(ModelLoadError, match=f"parameter {key!r} has the runtime use files, which no model decides; remove it"):
        settings(parameter(key, "x"))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /sys/fs/cgroup, on a machine of eight cores."""
    (tmp_path / "membership").write_text("5:cpu,cpuacct:/pod/main\n0::/pod/main\n")
    monkeypatch.setattr(resource_limits, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(resource_limits, "CGROUP", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("cpu_", "cpu.", 1)).write_text(text)


def test_a_process_without_limits_may_use_all(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fewer_cores() == 0
    write(groups / "pod", cpu_max="max 100000\n")
    write(groups / "cpu", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert fewer_cores() == 0
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 5}, raising=False)
    assert fewer_cores() == 2


@pytest.mark.parametrize(
    ("limit", "expected"), [("150000 100000\n", 2), ("20000 100000\n", 1), ("800000 100000\n", 0), ("1000000 100000\n", 0)]
)
def test_a_limit_of_a_group_counts_in_whole_cores(groups: Path, limit: str, expected: int) -> None:
    write(groups / "pod" / "main", cpu_max=limit)
    assert fewer_cores() == expected


def test_the_lowest_limit_of_the_groups_around_counts(groups: Path) -> None:
    write(groups / "pod" / "main", cpu_max="600000 100000\n")
    write(groups / "pod", cpu_max="300000 100000\n")
    assert fewer_cores() == 3


def test_groups_of_version_1_have_limits_too(groups: Path) -> None:
    write(groups / "cpu" / "pod" / "main", cpu_cfs_quota_us="250000\n", cpu_cfs_period_us="100000\n")
    assert fewer_cores() == 3
