"""`halfserve bench`, through the command's own entry."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfserve import Client
from halfserve.cli import main
from halfserve.serve.benchmark import BenchmarkError, bench_command, campaign
from halfserve.serve.benchmark.bench_command import SAME_S, sigterm_as_interrupt
from halfserve.serve.benchmark.level import Level
from halfserve.serve.benchmark.load.spec import INTERRUPTED
from halfserve.serve.protocol.rpc import Role
from halfserve.serve.security.security_options import SecurityOptions
from halfserve.serve.security.tokens import new_token
from tests.serve.benchmark.levels import level
from tests.serve.running_server import RunningServer
from tests.serve.security.guarded import Certificates, guarded_server, write_tokens

TERMINATED = """
import os, signal, sys
from halfserve.cli import main
from halfserve.serve.benchmark import campaign

campaign.measure = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
main(["bench", "mlp", "--shared-memory", "system", "--address", *sys.argv[1:]])
"""
TERMINATED_WITH_ITS_GROUP = """
import os, signal, sys
from halfserve.cli import main
from halfserve.serve.benchmark.tables import ProgressBar

signals = iter([signal.SIGTERM])
ProgressBar.window = lambda *_: [os.killpg(0, number) for number in signals]
main(["bench", "mlp", "--concurrency", "2", "--seconds", "60", "--warmup", "0", "--json", "--address", *sys.argv[1:]])
"""


def bench(*arguments: str) -> int:
    with pytest.raises(SystemExit) as finished:
        main(["bench", *arguments])
    return int(finished.value.code or 0)


def figures(server: RunningServer, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert bench(*arguments, "--address", server.address, "--warmup", "0", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_measures_and_writes_the_report(server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 64), np.float16))
    names = {"output": "bench.json", "csv": "bench.csv", "html": "bench.html", "hgrm": "bench.hgrm"}
    files = [text for option, name in names.items() for text in (f"--{option}", str(tmp_path / name))]
    load = ("--concurrency", "1:2", "--requests", "20", "--warmup", "0", "--batch-size", "4", "--input", f"x={tmp_path}/x.npy")
    assert bench("mlp", "--address", server.address, *load, *files, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [(one["concurrency"], one["requests"], one["errors"]) for one in found["levels"]] == [(1, 20, 0), (2, 20, 0)]
    assert (found["model"], found["version"], found["provider"]) == ("mlp", "3", "CPUExecutionProvider")
    assert found["levels"][0]["mean_batch_size"] == 4
    assert json.loads((tmp_path / "bench.json").read_text())["levels"] == found["levels"]
    written = {path.name for path in tmp_path.iterdir()} - {"x.npy"}
    assert written == {"bench.json", "bench.csv", "bench.html", "bench-1.hgrm", "bench-2.hgrm"}
    assert "requests/s" in captured.err


def test_rates_batch_sizes_streams_and_zeros(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    load = (
        "--rate",
        "500",
        "--requests",
        "10",
        "--arrivals",
        "constant",
        "--batch-size",
        "1,3",
        "--streaming",
        "--data",
        "zeros",
    )
    found = figures(server, capsys, "mlp", *load, "--goodput-ms", "60000")
    assert [(one["rate"], one["batch_size"], one["requests"]) for one in found["levels"]] == [(500, 1, 10), (500, 3, 10)]
    assert found["levels"][1]["rows_per_second"] == pytest.approx(3 * found["levels"][1]["goodput_per_second"])


def test_data_may_be_a_file(server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x=np.ones((3, 64), np.float32))
    found = figures(server, capsys, "mlp", "--data", str(tmp_path / "rows.npz"), "--requests", "4", "--concurrency", "1")
    assert (found["levels"][0]["requests"], found["levels"][0]["errors"]) == (4, 0)


@pytest.mark.parametrize(("connections", "expected"), [((), (4, 4)), (("--connections", "1"), (1, 1))])
def test_processes_do_not_exceed_connections(
    monkeypatch: pytest.MonkeyPatch, connections: tuple[str, ...], expected: tuple[int, int]
) -> None:
    used: list[tuple[int, int]] = []
    monkeypatch.setattr(bench_command, "default_processes", lambda: 4)
    monkeypatch.setattr(
        bench_command, "_run", lambda spec, *_, **__: used.append((spec.options.processes, spec.how.connections))
    )
    assert bench("mlp", *connections) == 0
    assert used == [expected]


def test_two_models_are_compared_in_speed_and_answers(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--concurrency", "2", "--requests", "10", "--rounds", "2")
    found = figures(server, capsys, "mlp", "--against", "mlp", *load, "--against", f"{server.address}/mlp")
    assert [one["name"] for one in found["comparison"]] == ["mlp (1)", "mlp (2)", "mlp (3)"]
    assert (found["version"], found["levels"]) == ("3", [found["comparison"][0]["rounds"][0]])
    assert found["comparison"][0]["rate_ratio"] == {"median": 1, "low": 1, "high": 1}
    assert [round_["requests"] for round_ in found["comparison"][1]["rounds"]] == [10, 10]
    assert [(one["outputs"][0]["max_abs"], one["not_compared"]) for one in found["differences"]] == [(0, []), (0, [])]


def test_answers_of_a_model_with_other_inputs_are_not_compared(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--concurrency", "1", "--requests", "2", "--rounds", "1", "--data", "zeros")
    found = figures(server, capsys, "picky", "--against", "mlp", *load, "--against", "picky")
    assert [one["name"] for one in found["comparison"]] == ["picky (1)", "mlp", "picky (2)"]
    assert [one["name"] for one in found["differences"]] == ["picky (2)"]
    inputs = "mlp takes other inputs than picky (1): x FP16[1,64] in place of i INT64[1,1]."
    assert found["notes"] == [f"{inputs} Their speed is compared, and not their answers"]


def test_a_search_reports_the_highest_load(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--concurrency", "1:3", "--requests", "10", "--max-latency-ms", "60000")
    assert bench("mlp", "--address", server.address, "--warmup", "0", *load) == 0
    assert "p99 within 60000 ms: up to 3 in flight" in capsys.readouterr().out
    assert bench("mlp", "--address", server.address, *load[:-1], "0.001", "--warmup", "0") == 1
    assert "even 1 in flight does not keep p99 within 0.001 ms" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nope"], 1, "nope"),
        (["mlp", "--concurrency", "1,x"], 2, "--concurrency 1,x: expected numbers above 0"),
        (["mlp", "--concurrency", "1", "--rate", "1"], 2, "--rate and --replay are kinds of load; expected one of them"),
        (["mlp", "--batch-size", "17"], 2, "--batch-size 17: model 'mlp' takes 1 to 16 rows a request"),
        (["mlp", "--input", "x=[1]"], 1, "has the shape [1], expected [-1, 64]"),
        (["mlp", "--shape", "z:1"], 2, "model 'mlp' has no input 'z'; expected one of x"),
        (["mlp", "--data", "ones"], 2, "--data ones: expected random, zeros, the name of a .npz file or a folder"),
        (["mlp", "--data", "none.npz"], 2, "--data none.npz: there is no file none.npz"),
        (["mlp", "--against", "host/"], 2, "--against host/: expected HOST:PORT/MODEL, or MODEL of the same server"),
        (["mlp", "--against", "mlp", "--batch-size", "1,2"], 2, "--against compares one model with one --batch-size"),
        (["mlp", "--against", "mlp", "--max-latency-ms", "1"], 2, "searches on one server with one --batch-size"),
        (["mlp", "--until-stable", "--requests", "9"], 2, "--until-stable and --requests both say when to end"),
        (["mlp", "--connections", "1", "--processes", "3"], 2, "--connections 1: expected 3 at least, one for each of"),
        (["mlp", "--connections", "501", "--processes", "1"], 2, "--connections 501: expected at most 500, 500 for each of"),
        (["mlp", "--header", "x"], 2, "--header x: expected NAME:VALUE"),
        (["mlp", "--tls-key", "/nowhere"], 2, "TLS has a client key without its certificate; give both files"),
        (["mlp", "--shared-memory", "system"], 1, "shared memory is off on this server"),
        (["picky", "--input", "i=[[7]]"], 1, "halfserve bench: "),
        (["mlp", "--output", "/nowhere/bench.json"], 1, "--output /nowhere/bench.json: there is no folder /nowhere"),
        (["mlp", "--address", "127.0.0.1:1"], 1, "no server answers at 127.0.0.1:1 (connection refused)"),
        (["mlp", "--address", "127.0.0.1"], 2, "the address must be HOST:PORT"),
    ],
)
def test_wrong_input_is_answered_in_one_line(
    server: RunningServer, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    address = [] if "--address" in arguments else ["--address", server.address]
    assert bench(*arguments, *address) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("halfserve bench: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1


def test_an_unknown_option_suggests_the_one_whose_help_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("mlp", "--page", "runs/bench.html") == 2
    assert "No such option: --page (Possible options: --html)" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["seconds", "warmup", "max-latency-ms", "percentile", "goodput-ms", "timeout"])
@pytest.mark.parametrize("number", ["inf", "nan", "1e12"])
def test_infinite_numbers_are_refused(capsys: pytest.CaptureFixture[str], option: str, number: str) -> None:
    assert bench("mlp", f"--{option}", number) == 2
    assert f"Invalid value for '--{option}'" in capsys.readouterr().err


def test_long_times_are_accepted(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--requests", "5", "--seconds", "1e8", "--timeout", "1e8", "--concurrency", "1")
    assert figures(server, capsys, "mlp", *load)["levels"][0]["requests"] == 5


def test_failed_requests_are_reported_beside_answered_ones(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    # Row 0 is fine, and it is the one that is tried before the load; row 7 makes the model fail.
    (found,) = figures(server, capsys, "picky", "--concurrency", "1", "--requests", "2", "--input", "i=[[0],[7]]")["levels"]
    assert (found["requests"], found["errors"]) == (1, 1)
    assert sum(found["errors_by_status"].values()) == 1


@pytest.mark.parametrize(
    ("ending", "code", "text"),
    [
        (BenchmarkError("at 2 in flight no request succeeded"), 1, "halfserve bench: at 2 in flight no request succeeded"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["failure", "ctrl-c"],
)
def test_the_levels_before_an_error_are_kept(
    server: RunningServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ending: BaseException,
    code: int,
    text: str,
) -> None:
    measured: list[Level] = []

    def one_level_and_no_more(*_: object) -> Level:
        if measured:
            raise ending
        measured.append(level(concurrency=1))
        return measured[0]

    monkeypatch.setattr(campaign, "measure", one_level_and_no_more)
    output = tmp_path / "bench.json"
    assert bench("mlp", "--address", server.address, "--output", str(output)) == code
    assert [one["concurrency"] for one in json.loads(output.read_text())["levels"]] == [1]
    captured = capsys.readouterr()
    assert text in captured.err
    assert "flight" in captured.out


def test_a_load_that_ended_early_is_shown_and_ends_the_sweep(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "measure", lambda *_: level(concurrency=1, ended_early="connection refused"))
    assert bench("mlp", "--address", server.address, "--concurrency", "1,2", "--json") == 1
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["levels"]) == 1
    assert "the server stopped under a load of 1 in flight: connection refused" in captured.err


@pytest.mark.parametrize("kind", ["complete", "incomplete"])
def test_a_comparison_keeps_its_complete_rounds(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    left = [level(concurrency=1)] * (5 if kind == "complete" else 1)

    def measured(*_: object) -> Level:
        return left.pop() if left else level(concurrency=1, ended_early=INTERRUPTED)

    monkeypatch.setattr(campaign, "measure", measured)
    assert bench("mlp", "--address", server.address, "--concurrency", "1", "--against", "mlp", "--json") == 130
    out = capsys.readouterr().out
    assert [len(one["rounds"]) for one in json.loads(out)["comparison"]] == [2, 2] if kind == "complete" else not out


def test_sigterm_leaves_no_shared_memory(sharing: RunningServer) -> None:
    script = [sys.executable, "-c", TERMINATED, sharing.address]
    with subprocess.Popen(script, stderr=subprocess.PIPE, text=True) as terminated:
        _, errors = terminated.communicate(timeout=500)
    assert terminated.returncode == 143, errors
    assert "Traceback" not in errors
    assert not list(Path("/dev/shm").glob(f"halfserve-{terminated.pid}-*"))  # noqa: S108  (see halfserve.serve.client.sharing)
    with Client(sharing.address) as client:
        assert client.shared_regions() == {}


def test_a_token_is_sent_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path)
    (tmp_path / "ca.pem").write_bytes(certificates.trusted)
    (token,) = write_tokens(tmp_path / "tokens", new_token("alice", [Role.INFER]))
    (tmp_path / "alice.token").write_text(f"{token}\n")
    options = SecurityOptions(tls=certificates.options, token_file=tmp_path / "tokens")
    with guarded_server(options) as (server, _):
        trusted = ("--address", server.address, "--tls-ca", str(tmp_path / "ca.pem"))
        load = ("held", *trusted, "--data", "zeros", "--requests", "4", "--concurrency", "1", "--warmup", "0")
        assert bench(*load) == 1
        assert "asks for a token" in capsys.readouterr().err
        monkeypatch.setenv("HALFSERVE_TOKEN_FILE", str(tmp_path / "alice.token"))
        assert bench(*load, "--json") == 0
        assert json.loads(capsys.readouterr().out)["levels"][0]["requests"] == 4


def test_sigterm_for_the_whole_group_keeps_what_was_measured(server: RunningServer) -> None:
    script = [sys.executable, "-c", TERMINATED_WITH_ITS_GROUP, server.address]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=500, start_new_session=True)
    assert done.returncode == 143, done.stderr
    (level,) = json.loads(done.stdout)["levels"]
    assert level["ended_early"] == INTERRUPTED
    assert level["requests"] > 0


def test_tokens_stay_out_of_the_report() -> None:
    arguments = ["bench", "mlp", "--header", "authorization: Bearer a:b", "--header=x-key:secret", "--rate", "5"]
    assert bench_command.command_line(arguments) == "halfserve bench mlp --header authorization:... --header=x-key:... --rate 5"


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_twice_at_once_interrupts_once(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, end: type[BaseException]
) -> None:
    now_s, handler = 5.0, signal.getsignal(number)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def measured() -> None:
        nonlocal now_s
        with sigterm_as_interrupt():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
            signal.raise_signal(number)  # as `timeout` does
            now_s += SAME_S
            signal.raise_signal(number)  # somebody does not want to wait

    with pytest.raises(end):
        measured()
    assert now_s == 5.0 + SAME_S
    assert signal.getsignal(number) is handler


def test_an_ignored_sigint_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with sigterm_as_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
