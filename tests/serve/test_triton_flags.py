"""Start scripts of Triton: which command their flags become."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from halfserve.cli import command_of
from halfserve.serve.triton_flag_tables import FILES, FLAGS, SAME, SWITCH_OPTIONS
from halfserve.serve.triton_flags import TritonFlagError, shown, translated
from tests.models import save_mlp

# What tritonserver does by itself.
WORDS = ["--server-name", "triton", "--triton-errors"]
BEFORE = ["--host", "0.0.0.0", *WORDS, "--shared-memory", "--trust-python-models", "--strict-readiness"]  # noqa: S104

# The flags of the newest parser of tritonserver that was read, 2.73dev of August 2026.
TRITON_FLAGS = """
allow-client-shm allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics allow-sagemaker allow-vertex-ai
backend-config backend-directory buffer-manager-thread-count cache-config cache-directory cuda-memory-pool-byte-size
cuda-virtual-address-size disable-auto-complete-config enable-peer-access exit-on-error exit-timeout-secs grpc-address
grpc-header-forward-pattern grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size grpc-infer-response-compression-level
grpc-infer-thread-count grpc-keepalive-permit-without-calls grpc-keepalive-time grpc-keepalive-timeout
grpc-max-connection-age grpc-max-connection-age-grace grpc-max-response-pool-size grpc-port grpc-restricted-protocol
grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl grpc-use-ssl-mutual help host-policy http-address
http-header-forward-pattern http-max-input-size http-port http-restricted-api http-thread-count id load-model log-error
log-file log-format log-info log-verbose log-warning metrics-address metrics-config metrics-interval-ms metrics-port
min-supported-compute-capability model-config-name model-control-mode model-load-gpu-limit model-load-retry-count
model-load-thread-count model-namespacing model-repository model-store pinned-memory-pool-byte-size rate-limit
rate-limit-resource repoagent-directory repository-poll-secs response-cache-byte-size reuse-grpc-port reuse-http-port
sagemaker-port sagemaker-safe-port-range sagemaker-thread-count strict-model-config strict-readiness trace-config
trace-count trace-file trace-level trace-log-frequency trace-rate vertex-ai-default-model vertex-ai-port
vertex-ai-thread-count
"""


def arguments(*flags: str) -> list[str]:
    made = translated(["--model-repository=models", *flags])
    assert (made.paths, made.remarks, made.arguments[: len(BEFORE)]) == (["models"], [], BEFORE)
    return made.arguments[len(BEFORE) :]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--http-port=1 --grpc-port 2 --metrics-port=3", "--grpc-port 2 --http-port 1 --metrics-port 3"),
        ("--allow-http=false --http-port=1 --metrics-port=3", "--http-port -1 --metrics-port 3"),
        ("--allow-http=0 --allow-metrics=0 --http-port=1", "--no-http"),
        ("--allow-metrics=false --allow-grpc=true", "--metrics-port -1"),
        (
            "--model-control-mode=explicit --load-model=a --load-model=b",
            "--model-control explicit --load-model a --load-model b --model-uploads",
        ),
        (
            "--model-control-mode=poll --repository-poll-secs=1 --exit-on-error=false",
            "--model-control poll --poll-seconds 1 --keep-going",
        ),
        ("--exit-timeout-secs=7 --log-info=true", "--drain-seconds 7"),
        ("--allow-grpc=0", "--no-grpc"),
        ("--reuse-grpc-port=true --reuse-http-port=true", "--reuse-ports"),
        ("--exit-on-err=false", "--keep-going"),
        ("--model-control-mode=POLL --model-config-name=h100", "--model-control poll --model-config-name h100"),
        ("--disable-auto-complete-config --strict-model-config=true", "--require-config"),
        ("--strict-model-config=false --rate-limit=off --model-namespacing=true --allow-client-shm=true", ""),
        ("--http-max-input-size=128 --transport=grpcio", "--http-max-input-size 128 --transport grpcio"),
        ("--cache-config=local,size=1048576", "--response-cache-mib 1"),
        ("--cache-config=local,size=200", "--response-cache-mib 0.00019073486328125"),
        (
            "--metrics-config=counter_latencies=false --metrics-config summary_latencies=true",
            "--metrics-config counter_latencies=false --metrics-config summary_latencies=true",
        ),
        ("--backend-config=onnxruntime,default-max-batch-size=5", "--max-batch-size 5"),
        ("--trace-config=level=OFF --trace-config=rate=9", ""),
        (
            "--trace-config=level=OFF --trace-config=triton,file=x --trace-config=rate=9",
            "--trace-to triton:x --trace-level OFF --trace-rate 9",
        ),
        (
            "--trace-config triton,file=x --trace-level=TIMESTAMPS --trace-config triton,log-frequency=2 --trace-count=5",
            "--trace-to triton:x --trace-count 5 --trace-log-frequency 2",
        ),
        ("--trace-file=x --trace-level=max --trace-rate=9 --trace-config=rate=3", "--trace-to triton:x --trace-rate 3"),
        (
            "--trace-config=mode=opentelemetry --trace-config=level=TIMESTAMPS --trace-config=rate=9",
            "--trace-to otlp --trace-rate 9",
        ),
        (
            "--grpc-header-forward-pattern=x --http-restricted-api=health:a=b",
            "--grpc-header-forward-pattern x --http-restricted-api health:a=b",
        ),
    ],
    ids=range(24),
)
def test_flags_become_options(flags: str, expected: str) -> None:
    assert arguments(*flags.split()) == expected.split()


def test_switches_of_tritonserver_can_be_off() -> None:
    made = translated(["--model-repository=m", "--id=mine", "--allow-client-shm=false", "--strict-readiness=false"])
    assert made.arguments[2:] == ["--server-name", "mine", "--triton-errors", "--trust-python-models"]


def test_settings_of_opentelemetry_become_its_variables() -> None:
    given = ["mode=opentelemetry", "level=TIMESTAMPS", "opentelemetry,url=x:4318/v1/traces"]
    given += ["opentelemetry,resource=a=b", "opentelemetry,resource=c=d", "opentelemetry,bsp_max_queue_size=9"]
    made = translated(["--model-repository=m", *(f"--trace-config={one}" for one in given)])
    assert made.remarks == []
    assert made.variables == {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x:4318/v1/traces",
        "OTEL_RESOURCE_ATTRIBUTES": "a=b,c=d",
        "OTEL_BSP_MAX_QUEUE_SIZE": "9",
    }


def test_the_table_has_every_flag_of_the_newest_tritonserver() -> None:
    assert set(TRITON_FLAGS.split()) | {"transport", "version"} == FLAGS


@pytest.mark.parametrize(
    ("flag", "text"), [("--help", "--model-load-gpu-limit +refused: "), ("--version", "^halfserve .* 2.51 to ")]
)
def test_help_and_version_start_no_server(flag: str, text: str) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "halfserve", "triton", "--", flag], capture_output=True, text=True, check=True
    )
    assert re.search(text, shown.stdout)


def test_several_repositories_are_served_each_once() -> None:
    made = translated(["--model-repository=a", "--model-store=b", "--model-repository=a"])
    assert made.paths == ["a", "b"]


def test_every_option_that_flags_become_is_there() -> None:
    known = {option for parameter in command_of("serve").params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {*SAME.values(), *FILES.values(), *(option for _, option in SWITCH_OPTIONS.values())} <= known


def test_an_address_holds_for_all_ports() -> None:
    assert translated(["--model-store", "m", "--http-address=::1", "--grpc-address=::1"]).arguments[:2] == ["--host", "::1"]


def test_tls_takes_its_files_and_says_that_it_holds_for_http() -> None:
    files = ["--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"]
    assert arguments(*files) == []
    made = translated(["--model-repository=m", "--grpc-use-ssl=1", *files])
    assert made.arguments[len(BEFORE) :] == ["--tls-cert", "c", "--tls-key", "k"]
    assert made.remarks == ["--grpc-use-ssl: HTTP and metrics are encrypted too"]
    mutual = translated(["--model-repository=m", "--grpc-use-ssl-mutual=true", *files])
    assert mutual.arguments[-2:] == ["--tls-client-ca", "r"]


def test_each_ignored_flag_gets_one_line() -> None:
    ignored = ["--log-format=default", "--enable-peer-access=FALSE", "--metrics-interval-ms=9", "--grpc-infer-thread-count=4"]
    ignored += ["--backend-config=python,shm=1", "--trace-config=level=TIMESTAMPS"]
    made = translated(["--model-repository=m", *ignored, "--log-format=ISO8601"])
    assert made.arguments == BEFORE
    assert len(made.remarks) == 6
    assert all(re.match("--[a-z-]+(=[^ ]+)? is ignored", line) for line in made.remarks)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--http-port=1", "there is no --model-repository; expected one"),
        ("--model-repository=a --no-such-flag=1", "'--no-such-flag' is no flag of tritonserver that is known here"),
        ("--model-repository=a serve", "'serve' is no flag of tritonserver"),
        ("--model-repository=a --http-port", "--http-port has no value, expected --http-port=VALUE"),
        ("--model-repository=a --exit-on-error=maybe", "--exit-on-error is 'maybe', expected true or false"),
        ("--model-repository=a --http-address=::1 --grpc-address=::", r"the addresses differ \(::, ::1\), expected one"),
        ("--model-repository=a --cache-config=local,size=x", "--cache-config has the size 'x', expected a number of bytes"),
        (
            "--model-repository=a --trace-config=triton,file=x --trace-config=level=TIMESTAMPS --trace-config=level=TENSORS",
            "--trace-config=level=TENSORS wants tensors in traces, .*; expected TIMESTAMPS",
        ),
        ("--model-repository=a --trace-config=level=ALL", "--trace-config has the level 'all', expected TIMESTAMPS or OFF"),
        (
            "--model-repository=a --cache-config=redis,host=x",
            "--cache-config=redis,host=x cannot be honoured: .*local,size=",
        ),
        (
            "--model-repository=a --rate-limit=execution_count",
            "--rate-limit=execution_count cannot .*leave it out",
        ),
        ("--model-repository=a --rate-limit-resource=r:1", "--rate-limit-resource cannot be honoured: .*leave"),
        ("--model-repository=a --model-load-gpu-limit=0:0.5", "--model-load-gpu-limit cannot be honoured: .*leave"),
        ("--model-repository=a --model-repository=b --model-namespacing=true", "--model-namespacing=true cannot .*rename them"),
        ("--model-repository=a --allow-vertex-ai=true", "--allow-vertex-ai=true cannot be honoured: .*leave the flag out"),
        ("--model-repository=a --trace-config=mode=x", "--trace-config has the mode 'x', expected triton or opentelemetry"),
    ],
    ids=range(16),
)
def test_flags_that_cannot_be_honoured_are_refused(flags: str, text: str) -> None:
    with pytest.raises(TritonFlagError, match=f"^{text}"):
        translated(flags.split())


def test_the_command_is_shown_without_secrets() -> None:
    assert shown(["serve", "my models", "--http-restricted-api", "health:a=b"]) == (
        "serve 'my models' --http-restricted-api ***"
    )


@pytest.mark.long
def test_a_script_starts_waits_for_and_ends_the_server(tmp_path: Path) -> None:
    for root, model in (("a", "mlp"), ("b", "other")):
        save_mlp(tmp_path / root / model / "1" / "model.onnx")
    flags = [f"--model-repository={tmp_path}/a", f"--model-store={tmp_path}/b", "--http-address=127.0.0.1", "--log-verbose=1"]
    flags += ["--allow-grpc=false", f"--log-file={tmp_path}/log"]
    ports = [f"--{name}-port=0" for name in ("http", "metrics")]
    command = [sys.executable, "-m", "halfserve", "triton", "--", *flags, *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as script:
        try:
            assert script.stdout is not None
            ready = next(line for line in script.stdout if "http://" in line)
            address = ready[ready.index("http://") :].split()[0].rstrip("/,;")
            answer = httpx.get(f"{address}/v2/health/ready", timeout=60)
            assert (answer.status_code, answer.content) == (200, b"")  # curl -w "%{http_code}" prints the status alone
            assert httpx.get(f"{address}/v2", timeout=60).json()["name"] == "triton"
            error = httpx.get(f"{address}/v2/models/missing", timeout=60).json()["error"]
            assert error.startswith("Request for unknown model: 'missing' is not found: ")
            assert any("no gRPC, ready in" in line for line in script.stdout)
            assert httpx.get(f"{address}/v2/logging", timeout=60).json()["log_verbose_level"] == 1
            for model in ("mlp", "other"):
                assert httpx.get(f"{address}/v2/models/{model}/ready", timeout=60).status_code == 200
            script.send_signal(signal.SIGINT)
            assert script.wait(60) == 0
            assert (tmp_path / "log").exists()
        finally:
            script.kill()
