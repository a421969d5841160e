"""Suites of loading, reloading and unloading models, and of shutdown. ONNX models have the names of other frameworks."""

from __future__ import annotations

from tests.triton_qa.onnx_models import add_sub, add_sub_ensembles
from tests.triton_qa.repository import copied, edited, placed, renamed, without
from tests.triton_qa.sequence_models import plain_sequence
from tests.triton_qa.suite import Builder, Suite

FLOATS = ("float32", "float32", "float32")
INTEGERS = ("int32", "int32", "int32")
SUFFIX = "_float32_float32_float32"
ONE_AND_THREE = "specific { versions: [1, 3] }"
VERSIONS = (1, 2, 3)
REPOSITORY, SECOND = "--model-repository={models}", "--model-repository={tests}/models_0"
MISSING = "--model-repository={root}/missing"
EXPLICIT, NO_CONTROL = "--model-control-mode=explicit", "--model-control-mode=none"
GOES_ON, FIVE, COMPLETE = "--exit-on-error=false", "--exit-timeout-secs=5", "--strict-model-config=false"
LENIENT, STRICT = "--strict-readiness=false", "--strict-readiness=true"
POLL = ("--repository-poll-secs=1", "--model-control-mode=poll", FIVE)
IDENTITY = "models/identity_zero_1_int32"
SLOW_LOADS = "    def initialize(self, args):\n        import time\n        time.sleep(10)\n"
LOGGED_LOADS = (
    "    def initialize(self, args):\n"
    "        pb_utils.Logger.log_info(f'[PB model] Loading version {args[\"model_version\"]}')\n"
)
SLOW_REQUESTS = 'dynamic_batching {}\nparameters [ { key: "execute_delay_ms"; value: { string_value: "5000" }} ]'


def _models(*prefixes: str, batch: int = 8) -> tuple[Builder, ...]:
    return tuple(add_sub(*FLOATS, prefix=prefix, batch=batch, versions=VERSIONS, policy=ONE_AND_THREE) for prefix in prefixes)


def _simple(*prefixes: str, batch: int = 8) -> tuple[Builder, ...]:
    return tuple(
        add_sub_ensembles(*FLOATS, prefix=prefix, batch=batch, versions=VERSIONS, policy=ONE_AND_THREE, kinds=("simple",))
        for prefix in prefixes
    )


def _suite(
    method: str,
    *models: Builder,
    flags: tuple[str, ...] = (FIVE,),
    end: str = "",
    ready_path: str = "/v2/health/ready",
    **environment: str,
) -> Suite:
    return Suite(
        name=f"lifecycle_{method}{end}",
        tests="L0_lifecycle/lifecycle_test.py",
        methods=(f"test_{method}",),
        models=models,
        flags=flags,
        environment={"TRITON_SERVER_VERSION": "2.51.0", "CUDA_VISIBLE_DEVICES": "", **environment},
        ready_path=ready_path,
        method_seconds=240,
    )


def _python_identity(
    name: str = "identity_fp32", added_code: str = "", versions: tuple[int, ...] = (1,)
) -> tuple[Builder, ...]:
    files = tuple(f"models/{name}/{version}/model.py" for version in versions)
    return (
        copied("python_models/identity_fp32", name, versions=versions),
        *(edited(file, adding=added_code) for file in files if added_code),
    )


SAVED, PLAN, GRAPH = (f"{prefix}{SUFFIX}" for prefix in ("savedmodel", "plan", "graphdef"))
LIFECYCLE = (
    _suite("parse_error_noexit", flags=(MISSING, STRICT, GOES_ON), ready_path=""),
    _suite("parse_error_noexit", flags=(REPOSITORY, MISSING, LENIENT, GOES_ON), ready_path="", end="_several"),
    *(
        _suite(
            method,
            *_models("graphdef", "savedmodel"),
            placed("models_0", *_models("onnx", "plan")),
            without(f"models/{GRAPH}/3/*"),
            flags=(REPOSITORY, SECOND, GOES_ON, FIVE, readiness),
            ready_path="",
        )
        for method, readiness in (("parse_error_modelfail", STRICT), ("parse_error_modelfail_nostrict", LENIENT))
    ),
    _suite(
        "parse_error_no_model_config",
        *_models("graphdef", "savedmodel"),
        placed("models_0", *_models("onnx", "plan")),
        without(f"models/{GRAPH}/config.pbtxt"),
        flags=(REPOSITORY, SECOND, GOES_ON, FIVE, "--strict-model-config=true"),
        ready_path="",
    ),
    _suite(
        "init_error_modelfail",
        plain_sequence("int32"),
        *_models("graphdef", "savedmodel"),
        placed("models_0", add_sub(*INTEGERS, versions=VERSIONS, policy="all { }"), *_models("onnx")),
        edited("models/onnx_sequence_int32/config.pbtxt", replacing=(('"OUTPUT', '"_OUTPUT'),)),
        edited("models_0/onnx_int32_int32_int32/config.pbtxt", replacing=(('"OUTPUT', '"_OUTPUT'),)),
        flags=(REPOSITORY, SECOND, GOES_ON, FIVE),
        ready_path="",
    ),
    _suite(
        "parse_error_model_no_version",
        *_models("savedmodel", "onnx", "plan", "graphdef"),
        without(*(f"models/{GRAPH}/{version}" for version in VERSIONS)),
        flags=(GOES_ON, FIVE),
        ready_path="",
    ),
    *(
        _suite(method, *_models("savedmodel"), renamed(f"models/{SAVED}/3", f"models/{SAVED}/{name}"), flags=(GOES_ON, FIVE))
        for method, name in (("parse_ignore_zero_prefixed_version", "003"), ("parse_ignore_non_intergral_version", "abc"))
    ),
    *(
        _suite(method, *_models("graphdef", "onnx", "plan"), placed(".", *_models("savedmodel")), flags=flags)
        for method, flags in (("dynamic_model_load_unload", POLL), ("dynamic_model_load_unload_disabled", (NO_CONTROL, FIVE)))
    ),
    *(
        _suite(method, add_sub(*INTEGERS, prefix="graphdef", versions=VERSIONS, policy="all { }"), flags=flags)
        for method, flags in (
            ("dynamic_version_load_unload", POLL),
            ("dynamic_version_load_unload_disabled", (NO_CONTROL, FIVE)),
        )
    ),
    _suite(
        "dynamic_model_modify",
        *_models("savedmodel", "plan"),
        *(
            builder
            for prefix in ("savedmodel", "plan")
            for builder in (
                edited(
                    f"models/{prefix}{SUFFIX}/config.pbtxt",
                    into=f"config.pbtxt.{prefix}",
                    replacing=(("^version_policy.*", ""),),
                ),
                edited(
                    f"models/{prefix}{SUFFIX}/config.pbtxt",
                    into=f"config.pbtxt.wrong.{prefix}",
                    replacing=(("output0_labels", "wrong_output0_labels"),),
                ),
                edited(
                    f"models/{prefix}{SUFFIX}/output0_labels.txt",
                    into=f"models/{prefix}{SUFFIX}/wrong_output0_labels.txt",
                    replacing=(("label", "label9"),),
                ),
            )
        ),
        flags=POLL,
    ),
    _suite("dynamic_file_delete", *_models("savedmodel", "plan"), flags=(*POLL, COMPLETE)),
    *(
        _suite(
            method,
            *_models("graphdef", "savedmodel"),
            placed("models_0", *_models("onnx")),
            placed(".", *_models("savedmodel")),
            without(f"models/{SAVED}/3"),
            flags=(REPOSITORY, SECOND, *flags),
        )
        for method, flags in (
            ("multiple_model_repository_polling", POLL),
            ("multiple_model_repository_control", (EXPLICIT, FIVE)),
        )
    ),
    *(
        _suite(method, *_models("onnx", batch=1), *_simple("onnx", batch=1), flags=(EXPLICIT, FIVE, COMPLETE, LENIENT))
        for method in ("model_control", "model_control_ensemble")
    ),
    _suite(
        "model_control_fail",
        *_models("onnx", batch=1),
        without("models/*/*/*"),
        flags=(EXPLICIT, FIVE, COMPLETE, LENIENT),
    ),
    *(
        _suite(
            "multiple_model_repository_control_startup_models",
            *_models("plan", "onnx", batch=1),
            *_models("savedmodel"),
            placed("models_0", *_simple("plan", "onnx", batch=1), *_models("savedmodel")),
            flags=(REPOSITORY, SECOND, EXPLICIT, LENIENT, COMPLETE, GOES_ON, *(f"--load-model={name}" for name in names)),
            end=end,
        )
        for end, names in (("", (SAVED, PLAN, f"simple_onnx{SUFFIX}")), ("_all", ("*",)))
    ),
    _suite(
        "model_repository_index",
        *_models("graphdef", "savedmodel", "onnx"),
        placed("models_0", *_simple("graphdef", "savedmodel"), *_models("onnx")),
        flags=(
            *(REPOSITORY, SECOND, EXPLICIT, LENIENT, COMPLETE, GOES_ON),
            *(f"--load-model={name}{SUFFIX}" for name in ("onnx", "graphdef", "simple_savedmodel")),
        ),
    ),
    *(
        _suite(
            f"model_availability_on_reload_{number}",
            copied(
                "L0_lifecycle/identity_zero_1_int32",
                versions=(1, 2),
                adding="version_policy: { specific { versions: [1] }}",
            ),
            edited(f"{IDENTITY}/config.pbtxt", into="config.pbtxt.v2", replacing=((r"versions: \[1\]", "versions: [2]"),)),
            edited(f"{IDENTITY}/config.pbtxt", into="config.pbtxt.new"),
            flags=(EXPLICIT, FIVE, COMPLETE, "--load-model=identity_zero_1_int32", LENIENT),
            end=end,
            **environment,
        )
        for number in (2, 3)
        for end, environment in (("_grpc", {"TRITONSERVER_USE_GRPC": "1"}), ("_http", {}))
    ),
    _suite(
        "config_override",
        *_models("onnx"),
        without(f"models/onnx{SUFFIX}/1/*", f"models/onnx{SUFFIX}/3/*"),
        flags=(EXPLICIT, COMPLETE),
    ),
    _suite(
        "file_override",
        *_models("onnx"),
        without(f"models/onnx{SUFFIX}/1"),
        flags=(EXPLICIT, f"--load-model=onnx{SUFFIX}", COMPLETE),
    ),
    _suite(
        "file_override_security",
        *_models("onnx"),
        flags=(EXPLICIT, COMPLETE),
    ),
    _suite("shutdown_dynamic", copied("custom_models/custom_zero_1_float32", adding=SLOW_REQUESTS), flags=("--log-verbose=1",)),
    _suite("shutdown_sequence", copied("custom_models/custom_sequence_int32"), flags=("--log-verbose=1",)),
    _suite(
        "shutdown_ensemble",
        copied("L0_lifecycle/ensemble_zero_1_float32"),
        copied("custom_models/custom_zero_1_float32", adding=SLOW_REQUESTS),
        flags=("--log-verbose=1",),
    ),
    _suite(
        "concurrent_model_load_speedup",
        *(copied("L0_lifecycle/identity_zero_1_int32", f"identity_zero_1_int32_{number}") for number in (1, 2)),
        *(builder for number in (1, 2) for builder in _python_identity(f"python_identity_fp32_{number}", SLOW_LOADS)),
        flags=(EXPLICIT,),
    ),
    _suite(
        "concurrent_model_load",
        copied("L0_lifecycle/identity_zero_1_int32", "identity_model"),
        placed("models_v2", copied("python_models/identity_fp32", "identity_model")),
        flags=(EXPLICIT,),
    ),
    _suite(
        "concurrent_model_load_unload",
        copied("L0_lifecycle/identity_zero_1_int32"),
        copied("L0_lifecycle/ensemble_zero_1_float32"),
        copied(
            "custom_models/custom_zero_1_float32",
            adding='parameters [ { key: "creation_delay_sec"; value: { string_value: "10" }} ]',
        ),
        flags=(EXPLICIT,),
    ),
    _suite(
        "concurrent_model_instance_load_speedup",
        *_python_identity(added_code=SLOW_LOADS),
        without("models/identity_fp32/config.pbtxt"),
        flags=(EXPLICIT,),
    ),
    _suite("shutdown_while_loading", *_python_identity(added_code=SLOW_LOADS), flags=(EXPLICIT, "--log-verbose=2")),
    _suite("shutdown_with_live_connection", copied("python_models/add_sub"), flags=()),
    *(
        _suite(
            method,
            *_models("savedmodel"),
            edited(
                f"models/{SAVED}/config.pbtxt",
                into=into,
                replacing=(("^version_policy:.*", "version_policy: { specific: { versions: [2] }}"),),
            ),
            *more,
            flags=(*POLL, "--model-config-name=custom"),
        )
        for method, into, more in (
            (
                "add_custom_config",
                "config.pbtxt.custom.savedmodel",
                # The folder that the test copies the file to.
                (
                    edited(f"models/{SAVED}/config.pbtxt", into=f"models/{SAVED}/configs/unused"),
                    without(f"models/{SAVED}/configs/unused"),
                ),
            ),
            ("delete_custom_config", f"models/{SAVED}/configs/custom.pbtxt", ()),
        )
    ),
    _suite(
        "load_new_model_version",
        *_python_identity(added_code=LOGGED_LOADS, versions=VERSIONS),
        edited("models/identity_fp32/config.pbtxt", adding="version_policy: { specific: { versions: [1, 2] } }\n"),
        flags=(EXPLICIT, "--load-model=*"),
        PYTHONDONTWRITEBYTECODE="True",
    ),
)
