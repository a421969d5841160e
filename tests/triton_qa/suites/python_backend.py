"""Suites of the Python backend."""

from __future__ import annotations

from tests.triton_qa.onnx_models import add_sub
from tests.triton_qa.repository import DECOUPLED, SQUARE, copied, folder
from tests.triton_qa.sequence_models import summing_sequence
from tests.triton_qa.suite import Builder, Suite

ROOM = "L0_backend_python"
MODELS = "python_models"
EXPLICIT = "--model-control-mode=explicit"


def _model(name: str, made: str = "", **options: object) -> Builder:
    return copied(f"{MODELS}/{name}", made, **options)  # type: ignore[arg-type]


def _typed(made: str, data_type: str, *more: tuple[str, str], adding: str = "") -> Builder:
    return _model("identity_fp32", made, replacing=(("TYPE_FP32", data_type), *more), adding=adding)


def _unbatched_calls(name: str, models: tuple[Builder, ...], *, flags: tuple[str, ...] = (), **environment: str) -> Suite:
    """Return a suite whose test is one request to a model that tests itself."""
    variables = {"MODEL_NAME": name, **environment}
    suite = "_".join(["python", name, *environment.values()])
    return Suite(
        name=suite,
        tests=f"{ROOM}/test_infer_shm_leak.py",
        models=models,
        flags=flags,
        environment=variables,
        method_seconds=240,
    )


BATCHED = "dynamic_batching {{ preferred_batch_size: [8], max_queue_delay_microseconds: {} }}"
EIGHT = ("^max_batch_size:.*", "max_batch_size: 8")
BLS = (
    *(
        _model(name)
        for name in (
            "bls",
            "dlpack_add_sub",
            "bls_async",
            "bls_memory",
            "bls_memory_async",
            "add_sub",
            "execute_error",
            "identity_fp32",
            "dlpack_identity",
            "dlpack_square",
            "identity_fp32_timeout",
        )
    ),
    SQUARE,
    summing_sequence("int32", batch=0),
)
SENDERS = tuple(
    _model(
        "response_sender",
        f"response_sender{decoupled}{code}{batching}",
        file=f"model{code}.py",
        saved_as="model.py",
        with_files=("model_common.py",),
        adding=(DECOUPLED if decoupled else "")
        + ("\ndynamic_batching { max_queue_delay_microseconds: 500000 }" if batching else ""),
    )
    for decoupled in ("", "_decoupled")
    for code in ("", "_async")
    for batching in ("", "_batching")
)
PYTHON_BACKEND = (
    Suite(
        name="python_main",
        tests=f"{ROOM}/python_test.py",
        models=(
            *(
                _model(name)
                for name in (
                    "identity_fp32",
                    "identity_bf16",
                    "pytorch_fp32_fp32",
                    "delayed_model",
                    "init_args",
                    "optional",
                    "non_contiguous",
                    "string",
                    "string_fixed",
                    "dlpack_identity",
                )
            ),
            _typed("identity_uint8", "TYPE_UINT8", EIGHT, adding=BATCHED.format(12000000)),
            _typed("identity_uint8_nobatch", "TYPE_UINT8", ("^max_batch_size:.*", "")),
            _typed("identity_uint32", "TYPE_UINT32"),
            _typed("identity_bool", "TYPE_BOOL"),
            _model(
                "identity_fp32",
                "default_model_name",
                file="model.py",
                saved_as="mymodel.py",
                adding='default_model_filename: "mymodel.py"',
            ),
        ),
        left_out={
            "test_growth_error": "it needs a container whose shared memory is 1 GiB",
            "test_gpu_tensor_error": "it needs CUDA",
            "test_dlpack_tensor_error": "it needs CUDA",
            "test_bf16": "tritonclient takes BF16 in another form since it was written",
        },
        environment={"TRITON_DIR": "{root}"},
    ),
    Suite(
        name="python_lifecycle",
        tests=f"{ROOM}/lifecycle/lifecycle_test.py",
        log="lifecycle_server.log",
        models=(
            _model("error_code"),
            _model("execute_cancel"),
            _model("execute_return_error"),
            _model("execute_error", replacing=(EIGHT,), adding=BATCHED.format(12000000)),
            _model("execute_grpc_error", replacing=(EIGHT,), adding=BATCHED.format(1200000)),
            _model("wrong_model", replacing=(("TYPE_FP32", "TYPE_UINT32"),)),
        ),
    ),
    Suite(
        name="python_decoupled",
        tests=f"{ROOM}/decoupled/decoupled_test.py",
        log="decoupled_server.log",
        models=(
            folder(f"{ROOM}/decoupled/models"),
            _model("identity_fp32"),
            _model("execute_cancel", adding=DECOUPLED),
            SQUARE,
            _model("dlpack_add_sub"),
        ),
    ),
    Suite(name="python_response_sender", tests=f"{ROOM}/response_sender/response_sender_test.py", models=SENDERS),
    Suite(
        name="python_complete_final",
        tests=f"{ROOM}/response_sender/response_sender_complete_final_test.py",
        models=(_model("response_sender_complete_final"),),
    ),
    _unbatched_calls(
        "bls_request_rescheduling",
        tuple(
            map(_model, ("bls_request_rescheduling", "request_rescheduling_addsub", "iterative_sequence", "wrong_return_type"))
        ),
        flags=(EXPLICIT, "--load-model=*"),
    ),
    Suite(
        name="python_rescheduling",
        tests=f"{ROOM}/request_rescheduling/grpc_endpoint_test.py",
        models=tuple(
            map(_model, ("bls_request_rescheduling", "request_rescheduling_addsub", "iterative_sequence", "wrong_return_type"))
        ),
        flags=(EXPLICIT, "--load-model=*"),
    ),
    Suite(
        name="python_async_execute",
        tests=f"{ROOM}/async_execute/concurrency_test.py",
        models=(_model("async_execute_decouple"), _model("async_execute_decouple_bls")),
    ),
    *(
        _unbatched_calls(name, BLS, BLS_KIND=kind)
        for kind in ("non_decoupled", "decoupled")
        for name in ("bls", "bls_memory", "bls_memory_async", "bls_async")
    ),
    _unbatched_calls(
        "bls_model_loading",
        (_model("bls_model_loading"), add_sub("int32", "int32", "int32", versions=(2, 3), policy="all { }")),
        flags=(EXPLICIT, "--load-model=bls_model_loading"),
    ),
    Suite(
        name="python_bls_parameters",
        tests=f"{ROOM}/bls/bls_parameters_test.py",
        models=(_model("bls_parameters"),),
    ),
    Suite(
        name="python_io_default",
        tests=f"{ROOM}/io/io_test.py",
        methods=("test_ensemble_io",),
        models=(*(_model("dlpack_io_identity", f"dlpack_io_identity_{number}") for number in (1, 2, 3)), _model("ensemble_io")),
        environment={"TRIAL": "default"},
    ),
    Suite(
        name="python_io_decoupled",
        tests=f"{ROOM}/io/io_test.py",
        methods=("test_ensemble_io",),
        models=(
            *(_model("dlpack_io_identity_decoupled", f"dlpack_io_identity_{number}") for number in (1, 2, 3)),
            _model("ensemble_io"),
        ),
        environment={"TRIAL": "decoupled"},
    ),
    Suite(
        name="python_io_outputs",
        tests=f"{ROOM}/io/io_test.py",
        methods=("test_requested_output_default", "test_requested_output_decoupled"),
        models=(_model("add_sub"), _model("dlpack_io_identity_decoupled")),
        environment={"TRIAL": "default"},
    ),
    Suite(
        name="python_io_empty",
        tests=f"{ROOM}/io/io_test.py",
        methods=("test_empty_gpu_output",),
        models=(_model("dlpack_empty_output"),),
        environment={"TRIAL": "default"},
    ),
    Suite(
        name="python_model_control",
        tests=f"{ROOM}/model_control/model_control_test.py",
        models=(_model("identity_fp32"), _model("simple_identity_fp32")),
        flags=(EXPLICIT,),
    ),
    Suite(
        name="python_ensemble",
        tests=f"{ROOM}/ensemble/ensemble_test.py",
        methods=("test_ensemble",),
        models=(_model("ensemble"), _model("add_sub", "add_sub_1"), _model("add_sub", "add_sub_2")),
    ),
    Suite(
        name="python_restart",
        tests=f"{ROOM}/restart/restart_test.py",
        methods=("test_infer", "test_restart"),
        models=(folder(f"{ROOM}/restart/models"),),
        kills_children_before="test_restart",
    ),
    Suite(name="python_logging", tests=f"{ROOM}/logging/logging_test.py", models=(_model("identity_fp32_logging"),)),
    _unbatched_calls("custom_metrics", (_model("custom_metrics"),)),
    _unbatched_calls("argument_validation", (folder(f"{ROOM}/argument_validation/models"),)),
)
