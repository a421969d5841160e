"""Options from the environment and from a config file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve import Client, RetryPolicy, cli
from halfserve.configuration import PREFIX
from tests.models import save_mlp
from tests.written_blocks import blocks_of

CONFIGURABLE = [name for name, stage in cli.STAGES.items() if stage.configurable]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with some variables: its exit code, and what it prints."""

    def run(*arguments: str | Path, **variables: str) -> tuple[int, str, str]:
        with monkeypatch.context() as changed:
            for name in [name for name in os.environ if name.startswith(PREFIX)]:
                changed.delenv(name)
            for name, value in variables.items():
                changed.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main([*map(str, arguments)])
            printed = capsys.readouterr()
            return int(ended.value.code or 0), printed.out, printed.err

    return run


def in_effect(printed: tuple[int, str, str], command: str = "serve") -> dict[str, Any]:
    code, out, err = printed
    assert (code, err) == (0, "")
    table: dict[str, Any] = tomllib.loads(out)[command]
    return table


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "halfserve.toml"
        path.write_text(text)
        return path

    return write


def test_command_line_over_environment_over_file_over_default(run: Run, file: Callable[[str], Path]) -> None:
    print_config = ["serve", "--print-config"]
    configured = [*print_config, "--config", file("[serve]\nthreads = 1\n")]
    assert in_effect(run(*print_config))["threads"] == 0
    assert in_effect(run(*configured))["threads"] == 1
    assert in_effect(run(*configured, HALFSERVE_SERVE_THREADS="2"))["threads"] == 2
    assert in_effect(run(*configured, "--threads", "3", HALFSERVE_SERVE_THREADS="2"))["threads"] == 3
    assert in_effect(run(*configured, HALFSERVE_SERVE_THREADS=""))["threads"] == 1


def test_each_value_is_printed_with_its_source(run: Run, file: Callable[[str], Path]) -> None:
    path = file('[serve]\npath = "models"\n')
    _, out, _ = run("serve", "--cpu", "--print-config", HALFSERVE_SERVE_CONFIG=str(path), HALFSERVE_SERVE_HTTP="0")
    lines = out.splitlines()
    assert 'path = "models"  # config file ' + f"{path}: [serve] path" in lines
    assert "http = false  # variable HALFSERVE_SERVE_HTTP" in lines
    assert "cpu = true  # command line" in lines
    assert "# http_port is not set  # default" in lines


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.long] if name == "train" else []) for name in CONFIGURABLE]
)
def test_what_is_printed_is_a_config_file_of_the_same_values(command: str, run: Run, file: Callable[[str], Path]) -> None:
    first = run(command, "--print-config", **{f"HALFSERVE_{command}_JSON".upper(): "1"})
    values = in_effect(first, command)
    assert values["json"] is True
    assert len(values) > 10
    assert in_effect(run(command, "--print-config", "--config", file(first[1])), command) == values


def test_the_config_file_of_the_guide_is_taken(run: Run, file: Callable[[str], Path]) -> None:
    (text,) = (block.text for block in blocks_of("docs/guides/operations.md") if block.language == "toml")
    values = in_effect(run("serve", "--print-config", "--config", file(text)))
    assert values.items() >= tomllib.loads(text)["serve"].items()


def test_lists_and_odd_texts_survive(run: Run, file: Callable[[str], Path]) -> None:
    odd = 'a "b" \\ \x7f\t\n😀'
    printed = run("serve", odd, "--load-model", "a b", "--print-config", HALFSERVE_SERVE_HTTP_ALLOWED_HOST=" one  two ")
    values = in_effect(printed)
    assert (values["path"], values["load_model"], values["http_allowed_host"]) == (odd, ["a b"], ["one", "two"])
    assert in_effect(run("serve", "--print-config", "--config", file(printed[1]))) == values


@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_stays_float32_may_be_configured(command: str, run: Run, file: Callable[[str], Path]) -> None:
    path = file(f'[{command}]\nkeep_fp32_nodes = ["head/*"]\nmin_agreement = 0.5\n')
    values = in_effect(run(command, "--print-config", "--config", path), command)
    assert (values["keep_fp32_nodes"], values["keep_fp32_ops"], values["min_agreement"]) == (["head/*"], [], 0.5)


def test_secrets_are_not_printed(run: Run) -> None:
    _, out, _ = run("bench", "m", "--header", "authorization: Bearer hidden", "--print-config")
    assert tomllib.loads(out)["bench"]["header"] == ["***"]
    _, out, _ = run("serve", "s3://key:hidden@host/bucket?signature=hidden", "--print-config")
    assert re.fullmatch(r"s3:/+\*\*\*@host/bucket\?\*\*\*", tomllib.loads(out)["serve"]["path"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\ngrpc-port = 1", "[serve] grpc-port is no option; did you mean grpc_port?"),
        ("[serve]\ntransprot = 'grpcio'", "[serve] transprot is no option; did you mean transport?"),
        ("[sevre]\n", "[sevre] is no configurable command; did you mean serve?"),
        ("grpc_port = 1", "grpc_port stands outside of a table; put it below [serve]"),
        ("serve = 1", "serve is a value, expected a table [serve]"),
        ("[serve]\ngrpc_port = 99999", "[serve] grpc_port: Input should be less than or equal to 65535"),
        ("[serve]\ngrpc_port = 1.5", "[serve] grpc_port: Input should be a valid integer"),
        (
            "[serve]\ngrpc_port = true",
            "[serve] grpc_port is 'True', expected what its option takes: a text, a number, or a list",
        ),
        ("[serve]\nload_model = 'digits'", "[serve] load_model: Value must be an iterable"),
        ("[serve]\npath = 2027-01-01", "[serve] path is '2027-01-01', expected what its option takes"),
        ("[serve]\ncpu = 'yes'", "[serve] cpu is 'yes', expected true or false"),
        ("[serve]\ntransport = 'tcp'", "[serve] transport: "),
        ("[serve", "is not TOML: "),
        ("[serve]\nx = " + 5000 * "[", "is not TOML: "),
        ("[serve]\nthreads = 1\nthreads = 2", "is not TOML: "),
    ],
)
def test_a_wrong_config_file_is_one_line(text: str, said: str, run: Run, file: Callable[[str], Path]) -> None:
    path = file(text)
    code, out, err = run("serve", "x", "--config", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"halfserve serve: config file {path}")
    assert said in err


def test_a_config_file_that_cannot_be_read_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, said in (("none", "cannot be read: No such file or directory"), ("latin", "is not UTF-8 text"), (".", "a dir")):
        code, _, err = run("serve", "x", "--config", tmp_path / name)
        assert (code, err.count("\n")) == (2, 1)
        assert said in err


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HALFSERVE_SERVE_GRPC_PROT", "1", "HALFSERVE_SERVE_GRPC_PROT is no option; did you mean HALFSERVE_SERVE_GRPC_PORT?"),
        ("HALFSERVE_SERVE_AS_JSON", "1", "HALFSERVE_SERVE_AS_JSON is no option"),
        ("HALFSERVE_SERVE_PRINT_CONFIG", "1", "HALFSERVE_SERVE_PRINT_CONFIG is no option"),
        ("HALFSERVE_SERVE_GRPC_PORT", "99999", "HALFSERVE_SERVE_GRPC_PORT: Input should be less than or equal to 65535"),
        ("HALFSERVE_SERVE_CPU", "perhaps", "HALFSERVE_SERVE_CPU: Input should be a valid boolean"),
        ("HALFSERVE_SERVE_TRACE_LEVEL", "LOUD", "HALFSERVE_SERVE_TRACE_LEVEL: 'LOUD' is not one of 'off', 'timestamps'."),
    ],
)
def test_a_wrong_variable_of_the_command_is_refused(name: str, value: str, said: str, run: Run) -> None:
    code, out, err = run("serve", "x", **{name: value})
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("halfserve serve: ")
    assert said in err


def test_a_wrong_choice_is_named_without_the_name_of_its_check(run: Run) -> None:
    for command, option in (("serve", "--trace-level"), ("bench", "--arrivals")):
        code, _, err = run(command, "x", option, "LOUD")
        assert code == 2
        assert f"Error: Invalid value for '{option}': 'LOUD' is not one of " in err


def test_a_client_takes_its_servers_address_from_a_variable(run: Run) -> None:
    code, _, err = run("infer", "m", "--input", "x=1", HALFSERVE_INFER_ADDRESS="127.0.0.1:1")
    assert (code, err.split(" (")[0]) == (1, "halfserve infer: no server answers at 127.0.0.1:1")


def test_a_variable_that_no_command_reads_is_told_of(run: Run) -> None:
    variables = {"HALFSERVE_GRPC_PORT": "1", "HALFSERVE_RELEASE": "7", "HALFSERVE_TOKEN_FILE": "alice.token"}
    code, _, err = run("serve", "--print-config", **variables)
    assert code == 0
    assert err.splitlines() == [
        "halfserve serve: the variable HALFSERVE_GRPC_PORT has no effect; did you mean HALFSERVE_SERVE_GRPC_PORT?",
        "halfserve serve: the variable HALFSERVE_RELEASE has no effect",
        "halfserve serve: the variable HALFSERVE_TOKEN_FILE has no effect; did you mean HALFSERVE_SERVE_TOKEN_FILE?",
    ]


def test_variables_of_others_are_left_alone(run: Run) -> None:
    for_others = {"HALFSERVE_COMPILED": "0", "HALFSERVE_TRAIN_EPOCHS": "3"}
    of_kubernetes = {
        "HALFSERVE_PORT": "tcp://10.0.0.1:8001",
        "HALFSERVE_SERVE_PORT": "tcp://10.0.0.1:8001",
        "HALFSERVE_SERVICE_HOST": "10.0.0.1",
        "HALFSERVE_SERVE_SERVICE_PORT_GRPC": "8001",
        "HALFSERVE_PORT_8001_TCP_ADDR": "10.0.0.1",
    }
    values = in_effect(run("serve", "--print-config", **for_others, **of_kubernetes))
    assert "token_file" not in values


def test_a_client_may_have_the_variable_of_its_token_file_in_two_names(run: Run) -> None:
    shared, own = {"HALFSERVE_TOKEN_FILE": "all"}, {"HALFSERVE_BENCH_TOKEN_FILE": "bench"}
    for variables, expected in ((shared, "all"), (own, "bench"), (shared | own, "bench")):
        values = in_effect(run("bench", "m", "--print-config", **variables), "bench")
        assert values["token_file"] == expected


@pytest.mark.long
def test_a_restarted_worker_keeps_the_config_file_that_its_supervisor_read(tmp_path: Path) -> None:
    config = tmp_path / "halfserve.toml"
    model = save_mlp(tmp_path / "mlp.onnx")
    config.write_text(f"[serve]\npath = {json.dumps(str(model))}\ngrpc_port = 0\nhttp = false\nsupervise = true\njson = true\n")
    environment = os.environ | {"HALFSERVE_SERVE_CPU": "1"}
    command = [sys.executable, "-m", "halfserve", "serve", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            ready = json.loads(process.stdout.readline())
            assert (ready["http_port"], ready["models"][0]["name"]) == (None, "mlp")
            config.write_text("[serve")
            (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(worker), signal.SIGKILL)
            retry = RetryPolicy(wait_for_server=True)
            with Client(f"127.0.0.1:{ready['grpc_port']}", timeout_s=60, retries=retry) as client:
                assert client.infer("mlp", {"x": np.ones((1, 64), np.float16)})["y"].shape == (1, 10)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
