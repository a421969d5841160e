"""Suites of what surrounds inference: generate, headers, shared memory, state, logging, traces, metrics, the response cache."""

from __future__ import annotations

from tests.triton_qa.onnx_models import add_sub, add_sub_ensembles, identity
from tests.triton_qa.repository import REPEAT, copied, folder, repeat
from tests.triton_qa.suite import Suite

SIMPLE = add_sub("int32", "int32", "int32", name="simple")
OTHERS = tuple(
    identity(1, "int32", name=f"other_{number}") for number in range(7)
)  # the index is expected to list 7 or 8 models
SHARED_MEMORY = (
    "test_invalid_create_shm",
    "test_valid_create_set_register",
    "test_unregister_before_register",
    "test_unregister_after_register",
    "test_reregister_after_register",
    "test_unregister_after_inference",
    "test_register_after_inference",
    "test_too_big_shm",
    "test_mixed_raw_shm",
    "test_unregisterall",
    "test_infer_offset_out_of_bound",
    "test_infer_byte_size_out_of_bound",
    "test_register_out_of_bound",
    "test_python_client_leak",
)
CLEANUP = "L0_grpc_state_cleanup/cleanup_test.py"
CLEANUP_MODELS = (
    copied(
        "custom_models/custom_zero_1_float32",
        adding='parameters [ { key: "execute_delay_ms" value: { string_value: "1000" } } ]',
    ),
    REPEAT,
    repeat("repeat_int32_non_decoupled"),
)
ONE_AND_THREE = "specific { versions: [1, 3] }"
HEADERS = "my_header.*"
METRICS = "L0_metrics/metrics_config_test.py"
EXPLICIT = "--model-control-mode=explicit"
SUMMARIES = ("--metrics-config", "summary_latencies=true")
CACHE_OFF = "--load-model=identity_cache_off"
DELAY = "L0_metrics/identity_delay"
FOUR = (("^max_batch_size.*", "max_batch_size: 4"),)
QUEUES = {
    "default": "",
    "default_composing": "",
    "dynamic": "dynamic_batching { max_queue_delay_microseconds: 100000 }",
    "dynamic_composing": "dynamic_batching { max_queue_delay_microseconds: 100000 }",
    "max_queue_size": "dynamic_batching { max_queue_delay_microseconds: 100000 default_queue_policy { max_queue_size: 4 } }",
    "sequence_direct": "sequence_batching { direct { max_queue_delay_microseconds: 100000, minimum_slot_utilization: 1.0 } }",
    "sequence_oldest": "sequence_batching { oldest { max_queue_delay_microseconds: 100000, max_candidate_sequences: 4 } }",
}


def _metrics(name: str, flags: tuple[str, ...], *methods: str, **environment: str) -> Suite:
    return Suite(
        name=f"metrics_{name}",
        tests=METRICS,
        methods=tuple(f"MetricsConfigTest.test_{method}" for method in methods),
        models=(folder("L0_metrics/unit_test_models"),),
        flags=(EXPLICIT, *flags),
        environment=environment,
    )


OPERATIONS = (
    Suite(name="generate", tests="L0_http/generate_endpoint_test.py", models=(folder("L0_http/generate_models"),)),
    *(
        Suite(
            name=f"parameters_{number}",
            tests="L0_parameters/parameters_test.py",
            models=(folder("L0_parameters/model_repository"),),
            flags=("--exit-timeout-secs=120", *flags),
            environment={"TEST_HEADER": header},
        )
        for number, (header, flags) in enumerate(
            {
                "test_params": (),
                "test_headers": ("--grpc-header-forward-pattern", HEADERS, "--http-header-forward-pattern", HEADERS),
                "test_header_forward_pattern_case_insensitive": (
                    "--grpc-header-forward-pattern",
                    HEADERS.upper(),
                    "--http-header-forward-pattern",
                    HEADERS.upper(),
                ),
                "test_grpc_header_forward_pattern_case_sensitive": ("--grpc-header-forward-pattern", "(?-i)MY_HEADER.*"),
            }.items()
        )
    ),
    Suite(
        name="optional_input",
        tests="L0_optional_input/optional_input_test.py",
        models=(folder("L0_optional_input/models"),),
        has_fresh_servers=True,
    ),
    Suite(
        name="http_restricted",
        tests="L0_http/http_restricted_api_test.py",
        models=(SIMPLE,),
        flags=(
            "--http-restricted-api=model-repository:admin-key=admin-value",
            "--http-restricted-api=inference,metadata:infer-key=infer-value",
        ),
    ),
    Suite(
        name="grpc_restricted",
        tests="L0_grpc/python_unit_test.py",
        models=(SIMPLE,),
        flags=(
            "--grpc-restricted-protocol=model-repository:admin-key=admin-value",
            "--grpc-restricted-protocol=inference,health:infer-key=infer-value",
        ),
    ),
    Suite(name="http_aio", tests="L0_http/python_http_aio_test.py", models=(SIMPLE, *OTHERS[:6])),
    Suite(name="grpc_aio", tests="L0_grpc/python_grpc_aio_test.py", models=(SIMPLE, *OTHERS)),
    Suite(
        name="http",
        tests="L0_http/http_test.py",
        models=(
            identity(1, "float32"),
            identity(1, "object"),
            identity(1, "float16", dims=(-1, -1)),
            identity(3, "float32"),
            identity(1, "object", name="onnx_zero_1_object_1_element", dims=(1,)),
            identity(
                1,
                "float32",
                name="onnx_zero_1_float32_queue",
                extra="dynamic_batching { max_queue_delay_microseconds: 1000000 preferred_batch_size: [ 8 ] "
                "default_queue_policy { max_queue_size: 1 } }",
            ),
        ),
    ),
    Suite(
        name="grpc_client_plugin",
        tests="L0_grpc/grpc_client_plugin_test.py",
        models=(folder("L0_grpc/client_plugin_models"),),
        flags=("--http-header-forward-pattern=.*", "--grpc-header-forward-pattern=.*"),
    ),
    Suite(name="http_client_plugin", tests="L0_http/http_client_plugin_test.py", models=(SIMPLE,)),
    *(
        Suite(
            name=f"shared_memory_{client}",
            tests="L0_shared_memory/shared_memory_test.py",
            methods=tuple(f"SharedMemoryTest.{method}" for method in SHARED_MEMORY),
            models=(SIMPLE,),
            environment={"CLIENT_TYPE": client},
            has_fresh_servers=True,
        )
        for client in ("http", "grpc")
    ),
    *(
        Suite(
            name=f"shared_memory_in_use_{client}",
            tests="L0_shared_memory/shared_memory_test.py",
            methods=(f"TestSharedMemoryUnregister.test_unregister_shm_during_inference_{client}",),
            models=(copied("python_models/execute_delayed_model", "simple"),),
            environment={"CLIENT_TYPE": client},
        )
        for client in ("http", "grpc")
    ),
    Suite(
        name="grpc_state_cleanup",
        tests=CLEANUP,
        methods=(
            "test_simple_infer",
            "test_simple_infer_cancellation",
            "test_simple_infer_timeout",
            "test_streaming_infer",
            "test_streaming_timeout",
            "test_streaming_cancellation",
            "test_decoupled_infer",
            "test_decoupled_cancellation",
            "test_decoupled_timeout",
            "test_non_decoupled_streaming_multi_response",
        ),
        models=CLEANUP_MODELS,
    ),
    Suite(
        name="grpc_state_cleanup_errors",
        tests=CLEANUP,
        methods=("test_simple_infer_error_status", "test_streaming_error_status", "test_decoupled_error_status"),
        models=CLEANUP_MODELS,
        flags=("--grpc-restricted-protocol=inference:infer-key=infer-value",),
    ),
    Suite(
        name="grpc_state_cleanup_shutdown",
        tests=CLEANUP,
        methods=(
            "test_simple_infer_shutdownserver",
            "test_streaming_infer_shutdownserver",
            "test_decoupled_infer_shutdownserver",
            "test_decoupled_infer_with_params_shutdownserver",
            "test_decoupled_infer_complete",
        ),
        models=CLEANUP_MODELS,
        environment={"TRITONSERVER_DELAY_GRPC_COMPLETE": "2000"},
        has_fresh_servers=True,
    ),
    Suite(
        name="logging",
        tests="L0_logging/logging_endpoint_test.py",
        models=(SIMPLE,),
    ),
    Suite(
        name="trace_settings",
        tests="L0_trace/trace_endpoint_test.py",
        models=(SIMPLE, add_sub("int32", "int32", "int32", name="global_simple")),
        flags=(
            "--trace-config",
            "triton,file=global_unittest.log",
            "--trace-config",
            "level=TIMESTAMPS",
            "--trace-config",
            "rate=1",
        ),
    ),
    _metrics(
        "plain",
        (CACHE_OFF,),
        "inf_counters_exist",
        "inf_summaries_missing",
        "cache_counters_missing",
        "cache_summaries_missing",
    ),
    _metrics(
        "summaries",
        (CACHE_OFF, *SUMMARIES),
        "inf_counters_exist",
        "inf_summaries_exist",
        "cache_counters_missing",
        "cache_summaries_missing",
    ),
    _metrics(
        "no_counters",
        (CACHE_OFF, *SUMMARIES, "--metrics-config", "counter_latencies=false"),
        "inf_counters_missing",
        "inf_summaries_exist",
        "cache_counters_missing",
        "cache_summaries_missing",
    ),
    _metrics(
        "cache",
        ("--cache-config", "local,size=1048576", "--load-model=identity_cache_on", *SUMMARIES),
        "inf_counters_exist",
        "inf_summaries_exist_with_cache",
        "cache_counters_exist",
        "cache_summaries_exist",
    ),
    _metrics(
        "quantiles",
        (CACHE_OFF, *SUMMARIES, "--metrics-config", "summary_quantiles=0.1:0.0.1,0.7:0.01,0.75:0.01"),
        "summaries_custom_quantiles",
        SUMMARY_QUANTILES="0.1:0.0.1,0.7:0.01,0.75:0.01",
    ),
    Suite(
        name="metrics_queue_size",
        tests="L0_metrics/metrics_queue_size_test.py",
        models=(
            *(copied(DELAY, name, replacing=FOUR, adding=text) for name, text in QUEUES.items()),
            copied("L0_metrics/ensemble_delay", "ensemble"),
        ),
        environment={"MAX_BATCH_SIZE": "4", "MAX_QUEUE_DELAY_US": "100000"},
    ),
    Suite(
        name="metrics_cpu",
        tests="L0_metrics/cpu_metrics_test.py",
        models=(add_sub("float32", "float32", "float32", name="libtorch_float32_float32_float32"),),
        flags=("--metrics-interval-ms=1000",),
    ),
    *(
        Suite(
            name=f"response_cache_{size}",
            tests="L0_response_cache/ensemble_cache_test.py",
            methods=methods,
            models=(
                add_sub("float32", "float32", "float32", prefix="graphdef", versions=(1, 3), policy=ONE_AND_THREE),
                add_sub_ensembles(
                    "float32", "float32", "float32", prefix="graphdef", versions=(1, 3), policy=ONE_AND_THREE, kinds=("simple",)
                ),
            ),
            repository="models/ensemble_models",
            flags=("--cache-config", f"local,size={size}", EXPLICIT),
            has_fresh_servers=True,
        )
        for size, methods in (
            (
                10840,
                (
                    "test_ensemble_top_level_response_cache",
                    "test_ensemble_all_models_cache_enabled",
                    "test_ensemble_composing_model_cache_enabled",
                ),
            ),
            (200, ("test_ensemble_cache_insertion_failure",)),
        )
    ),
)
