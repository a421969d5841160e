"""Suites that releases since 24.10 have: readiness of Python models, cancelled calls, response parameters, histograms."""

from __future__ import annotations

from tests.triton_qa.repository import copied
from tests.triton_qa.suite import Builder, Suite

ROOM, MODELS = "L0_backend_python", "python_models"
READINESS = f"{ROOM}/model_readiness"
CANCELS = (
    "test_decoupled_bls_cancel",
    "test_decoupled_bls_ignore_cancel",
    "test_decoupled_bls_cancel_after_cancellation",
    "test_decoupled_bls_cancel_after_completion",
)
HISTOGRAMS, PLAIN = ("--metrics-config", "histogram_latencies=true"), (("model_transaction_policy .*", ""),)
DECOUPLED_MODEL = "L0_metrics/ensemble_decoupled/async_execute_decouple"
BUCKETS = """model_metrics { metric_control: [ {
  metric_identifier: { family: "nv_inference_first_response_histogram_ms" }
  histogram_options: { buckets: [ -1, 0.0, 1, 2.5 ] }
} ] }"""


def _model(name: str, made: str = "", **options: object) -> Builder:
    return copied(f"{MODELS}/{name}", made, **options)  # type: ignore[arg-type]  # (options of copied)


def _ready(end: str, value: str, seconds: float) -> Builder:
    code = "readiness_coroutine_model.py" if value == "coroutine" else "readiness_model.py"
    settings = {"READINESS_FN_RETURN_VALUE": value, "READINESS_FN_DELAY_SECS": str(seconds)}
    text = "\n".join(f'parameters: {{ key: "{key}" value: {{ string_value: "{held}" }} }}' for key, held in settings.items())
    return _model("identity_fp32", f"is_ready_fn_{end}", code=f"{READINESS}/test_models/{code}", adding=text)


NEWER = (
    Suite(
        name="newer_is_ready",
        sources="newer",
        tests=f"{READINESS}/test_model_readiness.py",
        models=(
            _model("identity_fp32"),
            _ready("returns_true", "true", 0.1),
            _ready("returns_false", "false", 0.1),
            _ready("raises_error", "exception", 0.1),
            _ready("returns_non_boolean", "non_boolean", 0.1),
            _ready("timeout", "true", 8),
            _ready("coroutine_returns_true", "coroutine", 0.1),
            copied(f"{READINESS}/test_models/is_ready_fn_returns_true_decoupled"),
        ),
        flags=("--strict-readiness=false",),
        left_out={"TestModelReadiness.test_model_not_ready": "needs the process of a model to be killed before"},
    ),
    Suite(
        name="newer_bls_cancel",
        sources="newer",
        tests=f"{ROOM}/decoupled/decoupled_test.py",
        methods=CANCELS,
        models=(
            _model("response_sender_until_cancelled"),
            *(
                copied(f"{ROOM}/decoupled/models/decoupled_bls_{name}")
                for name in ("async_cancel", "cancel", "cancel_after_complete")
            ),
        ),
    ),
    Suite(
        name="newer_response_parameters",
        sources="newer",
        tests=f"{ROOM}/parameters/response_parameters_test.py",
        models=tuple(_model(f"response_parameters{end}") for end in ("", "_decoupled", "_bls")),
    ),
    *(
        Suite(
            name=f"newer_class_count_{client}",
            sources="newer",
            tests="L0_parameters/class_count_test.py",
            models=(
                _model("identity_fp32"),
                _model("identity_fp32", "identity_bytes", replacing=(("TYPE_FP32", "TYPE_STRING"),)),
            ),
            environment={"CLIENT_TYPE": client},
        )
        for client in ("http", "grpc")
    ),
    Suite(
        name="newer_histograms",
        sources="newer",
        tests="L0_metrics/histogram_metrics_test.py",
        methods=("test_ensemble_decoupled",),
        models=(
            copied(DECOUPLED_MODEL),
            copied(DECOUPLED_MODEL, "async_execute", replacing=PLAIN),
            copied("L0_metrics/ensemble_decoupled/ensemble"),
        ),
        flags=HISTOGRAMS,
    ),
    Suite(
        name="newer_histogram_buckets",
        sources="newer",
        tests="L0_metrics/histogram_metrics_test.py",
        methods=("test_buckets_override",),
        models=(copied(DECOUPLED_MODEL, adding=BUCKETS),),
        flags=HISTOGRAMS,
        environment={"OVERRIDE_BUCKETS": "-1,0,1,2.5,+Inf"},
    ),
)
