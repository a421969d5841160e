"""`halfserve serve` as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import trustme
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from halfserve import Client, ClientError, RetryPolicy, cli
from halfserve.compiled_build import SWITCH, build_in_use
from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.channel_settings import Tls, parse_address
from halfserve.serve.http.http_options import HttpOptions
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.server import LOST_DEVICE_DRAIN_S, LostDevice, LostDeviceError, ServerOptions, addresses
from halfserve.serve.startup_report import StartupReport, print_text
from halfserve.serve.transports.listening import Address
from halfserve.serve.transports.transport import TransportName
from tests.key_pairs import key_pair
from tests.models import FLOAT32, save_mlp
from tests.serve.engine.sequences.scene import sum_model

HALFSERVE = [sys.executable, "-m", "halfserve", "serve"]
HOST = "127.0.0.1"
GRPC = {"grpc": Address(HOST, 1, "--grpc-port")}
HTTP = {"http": Address(HOST, 2, "--http-port")}
METRICS = {"metrics": Address(HOST, 3, "--metrics-port")}
FAULT = "CUDA failure 700: an illegal memory access was encountered"


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [*HALFSERVE, *map(str, arguments), *FLOAT32, "--grpc-port", "0", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    process = start(*arguments)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def refused(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([*HALFSERVE, *map(str, arguments)], capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("switch", [pytest.param("0", marks=pytest.mark.long), "1"])
def test_a_server_says_which_build_runs(mlp: Path, switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, switch)
    expected = (
        "plain"
        if switch == "0"
        else subprocess.run([*HALFSERVE[:-1], "--version"], capture_output=True, text=True, check=True)
        .stdout.split()[2]
        .strip(":;")
    )
    with serving(mlp) as (_, ready):
        assert ready["build"] == expected
        assert ("0" in ready["build_reason"]) == (switch == "0")
        with urllib.request.urlopen(f"http://{HOST}:{ready['metrics_port']}/metrics", timeout=60) as answer:
            (line,) = (line for line in answer.read().decode().splitlines() if line.startswith("halfserve_build_info{"))
        assert f'build="{expected}"' in line


def test_the_runtime_counts_nothing_for_its_makers(mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ONNX Runtime does not count where it knows a machine that builds software, nor where it is told not to.
    for name in ("CI", "GITHUB_ACTIONS", "TF_BUILD", "JENKINS_URL", "CIRCLECI", "ORT_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(mlp) as (_, ready):
        assert ask(ready["grpc_port"]).shape == (1, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["halfserve"]


WITHOUT_HTTP = "means nothing with --no-http, which has no metrics either; leave one of them out"
TOO_LARGE = "Input should be less than or equal to "


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "Missing argument 'PATH'"),
        (["x", "--grpc-port", "99999"], "Invalid value for '--grpc-port'"),
        (["x", "--turbo"], "No such option: --turbo"),
        (["x", "--cpu", "--require-gpu"], "--cpu and --require-gpu exclude each other"),
        (["x", "--tls-cert", "cert.pem"], "TLS takes --tls-cert and --tls-key together"),
        (["x", "--load-model", "m"], "--load-model and --model-uploads need --model-control explicit"),
        (["x", "--load-on-demand", "--model-control", "poll"], "exclude each other: poll loads all models of PATH; leave one"),
        (["x", "--max-loaded-mib", "64"], "--idle-unload-seconds and --max-loaded-mib need --load-on-demand"),
        (["x", "--load-on-demand", "--model-uploads"], "--model-uploads need --model-control explicit"),
        (["x", "--shared-memory-mode", "trusted"], "--shared-memory-mode trusted needs --shared-memory"),
        (["x", "s3://b/models"], "s3://b/models is in object storage, which is the only PATH then; start a server for each"),
        (["x", "--storage-folder", "c"], "--storage-folder is for object storage, and x is on this disk; leave it out"),
        (["x", "--no-http", "--http-port", "0"], f"--http-port {WITHOUT_HTTP}"),
        (["x", "--no-http", "--metrics-port", "0"], f"--metrics-port {WITHOUT_HTTP}"),
        (["x", "--no-http", "--http-allowed-host", "a.example"], f"--http-allowed-host {WITHOUT_HTTP}"),
        (["x", "--max-batch-size", "1" + 20 * "0"], f"Invalid value for '--max-batch-size': {TOO_LARGE}"),
        (["x", "--max-queue-delay-us", "1" + 20 * "0"], f"Invalid value for '--max-queue-delay-us': {TOO_LARGE}"),
        (["x", "--threads", "1" + 20 * "0"], f"Invalid value for '--threads': {TOO_LARGE}"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert text in result.stderr


def test_a_required_gpu_is_looked_for_before_there_is_a_model(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said = refused(repository, "--require-gpu", "--model-control", "explicit")
    assert (code, said.count("\n")) == (1, 1)
    assert "--require-gpu: there is no CUDA device here" in said


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="Linux has it")
def test_connections_leave_files_for_models(repository: Path, tmp_path: Path) -> None:
    """The soft limit is raised; what is too much for connections is refused and logged, and the admin is served."""
    few = 'ulimit -Sn 64 && ulimit -Hn 128 && exec "$@"'
    command = [*HALFSERVE, str(repository), "--grpc-port", "0", "--json", "--cpu", "--model-control", "explicit"]
    command += ["--admin-socket", str(tmp_path / "admin")]
    with subprocess.Popen(["bash", "-c", few, "bash", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            limits = Path(f"/proc/{process.pid}/limits").read_text()
            assert re.search(r"Max open files +128 +128 ", limits)
            with Client(f"127.0.0.1:{ready['grpc_port']}") as client, contextlib.ExitStack() as stack:
                assert client.is_live()
                for port in [ready["grpc_port"], ready["http_port"]] * 80:
                    stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
                for _ in range(3):
                    with Client(f"unix:{tmp_path / 'admin'}") as admin:
                        admin.load_model("mlp")
                        assert client.infer("mlp", {"x": np.zeros((1, 64), np.float16)})
                        admin.unload_model("mlp")
            process.terminate()
            _, errors = process.communicate(timeout=500)
        finally:
            process.kill()
    assert process.returncode == 0
    assert re.search(
        rb"a connection was refused: \d+ are open, and there is room for \d+, as this process may open 128", errors
    )
    assert b"Traceback" not in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("kind", ["gone", pytest.param("full", marks=pytest.mark.long)])
def test_serves_although_the_report_cannot_be_written(repository: Path, kind: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone, Path("/dev/full").open("wb") as full:
        process = subprocess.Popen(
            [*HALFSERVE, repository, "--grpc-port", "0", "--no-http"],
            stdout=gone if kind == "gone" else full,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        assert process.stderr is not None
        told = next(match for line in process.stderr if (match := re.search(r"gRPC on port (\d+); standard output", line)))
        with Client(f"127.0.0.1:{told[1]}") as client:
            assert client.is_ready()
        process.terminate()
        _, errors = process.communicate(timeout=500)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "Errno" not in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux has it")
@pytest.mark.parametrize("closed", [*(pytest.param(c, marks=pytest.mark.long) for c in ("<&-", ">&- 2>&-")), "<&- >&- 2>&-"])
def test_no_file_of_the_server_gets_the_number_of_a_closed_standard_one(mlp: Path, tmp_path: Path, closed: str) -> None:
    path = tmp_path / "grpc.sock"
    command = shlex.join([*HALFSERVE, str(mlp), "--grpc-port", "0", "--no-http", "--admin-socket", str(path)])
    process = subprocess.Popen(["/bin/sh", "-c", f"exec {command} {closed}"], stdout=subprocess.DEVNULL)
    try:
        with Client(f"unix:{path}", retries=RetryPolicy(wait_for_server=True)) as client:
            client.wait_until_ready("mlp", timeout_s=60)
            standard = [Path(f"/proc/{process.pid}/fd/{number}").resolve() for number in range(3)]
        process.terminate()
        assert process.wait(60) == 0  # uvloop ends a process that closes one of these numbers
    finally:
        process.kill()
        process.wait()
    for redirection in closed.split():
        assert standard[{"<": 0, ">": 1, "2": 2}[redirection[0]]] == Path(os.devnull)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mlp(tmp_path_factory.mktemp("bare") / "mlp.onnx")


def ask(port: int) -> np.ndarray[Any, Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        x = triton.InferInput("x", [1, 64], "FP16").set_data_from_numpy(np.ones((1, 64), np.float16))
        return np.asarray(client.infer("mlp", [x]).as_numpy("y"))


@pytest.mark.parametrize("name", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_a_bare_file_is_served_until_a_signal(mlp: Path, name: signal.Signals) -> None:
    with serving(mlp, "--max-batch-size", "5") as (process, ready):
        assert ready["models"] == [
            {
                "name": "mlp",
                "version": 1,
                "provider": "CPUExecutionProvider",
                "precision": "fp32 (the fp16 model, upcast)",
                "max_batch_size": 5,
            }
        ]
        assert ask(ready["grpc_port"]).shape == (1, 10)
        process.send_signal(name)
        _, errors = process.communicate(timeout=500)
        assert (process.returncode, errors) == (0, "")


def test_what_was_taken_before_the_signal_is_answered_after_it(mlp: Path) -> None:
    request = pb.ModelInferRequest(model_name="mlp", raw_input_contents=[bytes(128)])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 64])
    with serving(mlp, "--max-queue-delay-us", "60000000") as (process, ready):
        with grpc.insecure_channel(f"127.0.0.1:{ready['grpc_port']}") as channel:
            service = "/inference.GRPCInferenceService/"
            waiting = channel.unary_unary(service + "ModelInfer").future(request.SerializeToString())
            # Nothing tells a client that its request has been taken; after so many calls on the same connection it has.
            for _ in range(50):
                channel.unary_unary(service + "ServerLive")(b"", timeout=60)
            process.send_signal(signal.SIGTERM)
            response = pb.ModelInferResponse.FromString(waiting.result(60))
        assert response.outputs[0].shape == [1, 10]
        _, errors = process.communicate(timeout=500)
        assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("transport", list(TransportName))
def test_started_sequences_are_ended_after_the_signal(tmp_path: Path, transport: TransportName) -> None:
    x = triton.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    with serving(sum_model(tmp_path), "--transport", transport, "--drain-seconds", "300") as (process, ready):
        rest = http.client.HTTPConnection("127.0.0.1", ready["http_port"], timeout=60)

        def post(**parameters: object) -> tuple[int, bytes]:
            rest.request("POST", "/v2/models/sum/infer", json.dumps({**body, "parameters": parameters}))
            answer = rest.getresponse()
            return answer.status, answer.read()

        with closing(rest), triton.InferenceServerClient(f"127.0.0.1:{ready['grpc_port']}") as client:
            client.infer("sum", [x], sequence_id=1, sequence_start=True)
            assert post(sequence_id=2, sequence_start=True)[0] == 200
            process.send_signal(signal.SIGTERM)
            while client.is_server_ready():
                pass
            client.infer("sum", [x], sequence_id=1)
            for key in (1, 3):
                with pytest.raises(InferenceServerException, match="the server is shutting down") as refused:
                    client.infer("sum", [x], sequence_id=key, sequence_start=True)
                assert refused.value.status() == "StatusCode.UNAVAILABLE"
            assert post(sequence_id=3, sequence_start=True)[0] == 503
            assert client.infer("sum", [x], sequence_id=1, sequence_end=True).as_numpy("y")[0, 0] == 3
            status, answer = post(sequence_id=2, sequence_end=True)
            assert (status, json.loads(answer)["outputs"][0]["data"]) == (200, [2.0])
        _, errors = process.communicate(timeout=500)
        assert (process.returncode, errors) == (0, "")


def test_settings_without_effect_are_warned_of(tmp_path: Path) -> None:
    save_mlp(tmp_path / "mlp" / "1" / "model.onnx")
    (tmp_path / "mlp" / "config.pbtxt").write_text("optimization { eager_batching: true }")
    with serving(tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=500)
    assert errors.strip().endswith("config.pbtxt: no effect here: optimization.eager_batching")


def test_torch_is_not_imported(mlp: Path) -> None:
    program = (
        "import sys; import halfserve.serve.serve_command, halfserve.serve.server; from pathlib import Path; "
        "import halfserve.serve.backends.onnx_runtime.onnx_backend as b; "
        "from halfserve.serve.engine.backend import DevicePlacement; "
        "from halfserve.protos.model_config_pb2 import ModelConfig; "
        "runtime, path = b.OnnxRuntime(), Path(sys.argv[1]); "
        "runtime.load(path, runtime.describe(path), DevicePlacement(use_gpu=False), ModelConfig()); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(mlp)], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("files", "supervise"),
    [
        (8, ("--supervise",)),
        (15, ()),
        pytest.param(8, (), marks=pytest.mark.long),
        pytest.param(15, ("--supervise",), marks=pytest.mark.long),
    ],
)
def test_a_limit_of_too_few_open_files_is_one_line(mlp: Path, files: int, supervise: tuple[str, ...]) -> None:
    command = ["/bin/sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *HALFSERVE, str(mlp), *supervise]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    expected = f"halfserve serve: the limit of open files is {files}, expected 64 or more: each connection is one; raise it"
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(expected)


def test_a_port_in_use_is_one_line(mlp: Path) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        code, text = refused(mlp, *FLOAT32, "--grpc-port", str(port))
    expected = f"cannot listen on 127.0.0.1:{port}: {os.strerror(98)}"
    assert (code, text.count("\n")) == (1, 1)
    assert expected in text


def test_calls_without_a_token_are_refused(mlp: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    made = subprocess.run([*HALFSERVE[:-1], "token", "alice"], capture_output=True, text=True, check=True)
    (tmp_path / "tokens").write_text(made.stderr)
    files = ("--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem", "--token-file", tmp_path / "tokens")
    tls, x = Tls(authorities=tmp_path / "ca.pem"), np.zeros((1, 64), np.float16)
    with serving(mlp, *map(str, files)) as (_, ready):
        address = f"127.0.0.1:{ready['grpc_port']}"
        with Client(address, tls=tls, token=made.stdout.strip()) as client:
            assert client.infer("mlp", {"x": x})["y"].shape == (1, 10)
        with Client(address, tls=tls) as client, pytest.raises(ClientError, match="asks for a token"):
            client.infer("mlp", {"x": x})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("public.pem", "certificate.json: is not signed, expected a signature by the private key of --certificate-key"),
        pytest.param(
            "private.pem",
            "private.pem: holds no public key; write one with: openssl pkey -in private.pem -pubout",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_certificate_key_is_asked_of_certificates(key: str, text: str, tmp_path: Path) -> None:
    key_pair(tmp_path)
    model = save_mlp(tmp_path / "mlp.onnx")
    (tmp_path / "certificate.json").write_text('{"schema": "halfserve.certificate"}')
    code, message = refused(model, "--certificate-key", str(tmp_path / key))
    assert (code, message.count("\n")) == (1, 1)
    assert text in message


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/no/such/place", "/no/such/place: not found; expected a model repository folder or an .onnx file"),
        pytest.param(Path(__file__).parents[2] / "README.md", "README.md: is not a readable ONNX file", marks=pytest.mark.long),
        pytest.param(Path(__file__).parent, "no models in it; expected <model>/<version>/model.onnx", marks=pytest.mark.long),
    ],
)
def test_a_path_without_models_says_what_to_do(path: str | Path, text: str) -> None:
    code, message = refused(path)
    assert code == 1
    assert text in message


@pytest.mark.parametrize(
    ("http", "security", "expected"),
    [
        (None, SecurityOptions(), GRPC),
        (HttpOptions(port=2, metrics_port=None), SecurityOptions(), GRPC | HTTP),
        (HttpOptions(port=2, metrics_port=3), SecurityOptions(), GRPC | HTTP | METRICS),
        (None, SecurityOptions(admin_port=0), GRPC | {"admin": Address(HOST, 0, "--admin-port")}),
        (
            None,
            SecurityOptions(admin_socket=Path("/run/admin")),
            GRPC | {"admin": Address(HOST, 0, "--admin-socket", Path("/run/admin"))},
        ),
    ],
    ids=["grpc alone", "http", "metrics", "admin port", "admin socket"],
)
def test_everything_that_is_asked_for_is_listened_on(
    http: HttpOptions | None, security: SecurityOptions, expected: dict[str, Address]
) -> None:
    assert addresses(ServerOptions(path=Path("m"), host=HOST, grpc_port=1, http=http, security=security)) == expected


def test_a_supervised_server_leaves_soon_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    lost = LostDevice(stop, is_supervised=True)
    assert (stop.is_set(), lost.shorten(30.0)) == (False, 30.0)
    lost.check()
    lost.report(FAULT)
    lost.report(FAULT)
    assert stop.is_set()
    assert (lost.shorten(30.0), lost.shorten(0.5)) == (LOST_DEVICE_DRAIN_S, 0.5)
    with pytest.raises(LostDeviceError, match=FAULT):
        lost.check()
    assert caplog.messages == ["a device computes for this process no more; another process takes over"]


def test_any_other_server_goes_on_and_says_what_would_help(caplog: pytest.LogCaptureFixture) -> None:
    stop = asyncio.Event()
    lost = LostDevice(stop, is_supervised=False)
    for _ in range(2):
        lost.report(FAULT)
    lost.check()
    assert (stop.is_set(), lost.shorten(30.0)) == (False, 30.0)
    assert caplog.messages == [
        "a device computes for this process no more; with --supervise another process would take over now"
    ]


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"), ("::1", "[::1]")])
def test_addresses_are_printed_as_clients_accept_them(host: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    ready = StartupReport(models=[], host=host, grpc_port=1, http_port=2, metrics_port=3, admin_port=4, seconds=0.5)
    print_text(ready, "http")
    assert capsys.readouterr().out.splitlines() == [
        f"REST and a page on http://{shown}:2/, metrics on {shown}:3",
        f"administration on {shown}:4",
        f"server code {build_in_use()}",
        f"gRPC on {shown}:1, ready in 0.50 s; Ctrl-C stops",
    ]
    assert parse_address(f"{shown}:1").is_local
