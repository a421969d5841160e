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
from halfserve.serve.triton_flags import FILES, SAME, TritonFlagError, shown, translated
from tests.models import save_mlp

BEFORE = ["--host", "0.0.0.0", "--shared-memory", "--trust-python-models"]  # noqa: S104  (tritonserver's default)


def arguments(*flags: str) -> list[str]:
    made = translated(["--model-repository=models", *flags])
    assert (made.paths, made.remarks, made.arguments[:4]) == (["models"], [], BEFORE)
    return made.arguments[4:]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--http-port=1 --grpc-port 2 --metrics-port=3", "--http-port 1 --grpc-port 2 --metrics-port 3"),
        ("--allow-metrics=false --allow-grpc=true", "--metrics-port -1"),
        (
            "--model-control-mode=explicit --load-model=a --load-model=b",
            "--model-control explicit --load-model a --load-model b --model-uploads",
        ),
        (
            "--model-control-mode=poll --repository-poll-secs=1 --exit-on-error=false",
            "--model-control poll --poll-seconds 1 --keep-going",
        ),
        ("--exit-timeout-secs=7 --strict-readiness=false --log-info=true", "--drain-seconds 7"),
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
    ids=range(15),
)
def test_flags_become_options(flags: str, expected: str) -> None:
    assert arguments(*flags.split()) == expected.split()


def test_several_repositories_are_served_each_once() -> None:
    made = translated(["--model-repository=a", "--model-store=b", "--model-repository=a"])
    assert made.paths == ["a", "b"]


def test_every_option_that_flags_become_is_there() -> None:
    known = {option for parameter in command_of("serve").params for option in parameter.opts}
    assert {*SAME.values(), *FILES.values()} <= known


def test_an_address_holds_for_all_ports() -> None:
    assert translated(["--model-store", "m", "--http-address=::1", "--grpc-address=::1"]).arguments[:2] == ["--host", "::1"]


def test_tls_takes_its_files_and_says_that_it_holds_for_http() -> None:
    files = ["--grpc-server-cert=c", "--grpc-server-key=k", "--grpc-root-cert=r"]
    assert arguments(*files) == []
    made = translated(["--model-repository=m", "--grpc-use-ssl=1", *files])
    assert made.arguments[4:] == ["--tls-cert", "c", "--tls-key", "k"]
    assert made.remarks == ["--grpc-use-ssl: HTTP and metrics are encrypted too"]
    mutual = translated(["--model-repository=m", "--grpc-use-ssl-mutual=true", *files])
    assert mutual.arguments[-2:] == ["--tls-client-ca", "r"]


def test_each_ignored_flag_gets_one_line() -> None:
    ignored = ["--log-verbose=1", "--strict-readiness=true", "--metrics-interval-ms=9", "--rate-limit=off"]
    ignored += ["--backend-config=python,shm=1", "--trace-config=level=TIMESTAMPS"]
    made = translated(["--model-repository=m", *ignored, "--log-verbose=2"])
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
        ("--model-repository=a --trace-config=mode=x", "--trace-config has the mode 'x', expected triton or opentelemetry"),
    ],
    ids=range(10),
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
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    command = [sys.executable, "-m", "halfserve", "triton", "--", *flags, *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as script:
        try:
            assert script.stdout is not None
            ready = next(line for line in script.stdout if "http://" in line)
            address = ready[ready.index("http://") :].split()[0].rstrip("/,;")
            answer = httpx.get(f"{address}/v2/health/ready", timeout=60)
            assert (answer.status_code, answer.content) == (200, b"")  # curl -w "%{http_code}" prints the status alone
            for model in ("mlp", "other"):
                assert httpx.get(f"{address}/v2/models/{model}/ready", timeout=60).status_code == 200
            script.send_signal(signal.SIGINT)
            assert script.wait(60) == 0
        finally:
            script.kill()
