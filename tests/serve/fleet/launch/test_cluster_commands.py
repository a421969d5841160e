"""`halfserve cluster` on one machine, and what it says where it cannot."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import yaml

from halfserve import Client, cli
from halfserve.serve.fleet.launch.cluster_arguments import ClusterArgumentError, ClusterArguments, ClusterError
from halfserve.serve.fleet.launch.ray_failures import explained
from tests.models import save_mlp
from tests.serve.ray_cluster.machines import WAIT_S, Machines, machines, processes_of, until

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1 as the kernel shows it, for IPv4 and in IPv6
Run = Callable[..., tuple[int, str, str]]
X = np.ones((1, 64), np.float16)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `halfserve cluster` in this process: its exit code, and what it prints."""

    def run(*arguments: str, **variables: str) -> tuple[int, str, str]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main(["cluster", *arguments])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["scale", "0"], "replicas is '0', expected a number up to 1000, or two such as 1:8"),
        (["run", "models", "--replicas", "3:1"], "replicas is '3:1', expected"),
        (["run", "models", "--gpus", "-1"], "gpus is -1.0, expected 0 or more"),
        (["run", ""], "path is empty, expected a folder or a URL"),
        (["run", "models", "--", "--grpc-port=9000"], "server has --grpc-port=9000, but"),
    ],
)
def test_arguments_that_make_no_sense_are_one_line(run: Run, arguments: list[str], line: str) -> None:
    code, out, error = run(*arguments)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert line in error


def test_the_serve_config_is_what_the_application_takes(run: Run) -> None:
    code, out, error = run(
        "run", "s3://bucket/models", "--replicas", "1:8", "--gpus", "1", "--print-serve-config", "--", "--max-batch-size", "8"
    )
    assert (code, error) == (0, "")
    (application,) = yaml.safe_load(out)["applications"]
    arguments = ClusterArguments.read(application["args"])
    assert arguments == ClusterArguments(path="s3://bucket/models", replicas="1:8", gpus=1.0, server=("--max-batch-size", "8"))
    assert ClusterArguments.read(arguments.as_given()) == arguments


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "path is missing"),
        ({"path": "models", "replica": "2"}, "replica is no argument; did you mean replicas?"),
        ({"path": "models", "cpus": "many"}, "cpus is 'many', expected a number"),
        ({"path": "models", "first_port": 80.5}, "first_port is 80.5, expected a whole number"),
        ({"path": ["models"]}, r"path is \['models'\], expected a text"),
    ],
)
def test_arguments_of_a_config_file_are_checked(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ClusterArgumentError, match=text):
        ClusterArguments.read(given)


def test_an_older_ray_is_refused_in_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfserve.serve.fleet.launch.cluster_commands.version", lambda name: "2.9.3")
    code, _, error = run("status")
    assert (code, error.count("\n")) == (1, 1)
    assert "Ray 2.9.3 is installed, expected 2.60 or newer" in error


def test_without_ray_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("halfserve.serve.fleet.launch.cluster_commands.version", version)
    code, _, error = run("status")
    assert (code, error.count("\n")) == (69, 1)
    assert "needs the package 'ray'" in error
    assert "make install EXTRAS=ray" in error


def test_an_address_without_ray_is_one_line() -> None:
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    command = [sys.executable, "-m", "halfserve", "cluster", "status"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Ray at 127.0.0.1:1 (RAY_ADDRESS) cannot be reached: Connection refused" in done.stderr


def refused(folder: Path, *arguments: str, prefix: str = "", **variables: str) -> str:
    """The one line with which `halfserve cluster` ends where Ray cannot be used."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = f'{prefix} exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", command, "sh", sys.executable, "-m", "halfserve", "cluster", *arguments],
        env=environment | {"RAY_TMPDIR": str(folder)} | variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    return done.stderr.removeprefix("halfserve cluster: ").rstrip()


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["--detach"]])
def test_a_folder_that_ray_cannot_write_to_is_named(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(tmp_path / "file", "run", "models", *options)
    assert line.startswith(f"Ray cannot be started: it cannot write to {tmp_path / 'file'}")
    assert line.endswith(": Not a directory; set RAY_TMPDIR to another folder")


@pytest.mark.long
def test_a_limit_of_the_machine_is_named(tmp_path: Path) -> None:
    line = refused(tmp_path, "run", "models", prefix="ulimit -n 512;")
    assert (
        line == "Ray cannot be started: the limit on open files is 512, expected 1024 or more; raise it with `ulimit -n 65536`"
    )
    long = tmp_path / ("long" * 25)
    long.mkdir()
    assert "the path of its sockets is longer than 107 bytes; set RAY_TMPDIR to another folder" in refused(
        long, "run", "models"
    )


@pytest.mark.long
def test_another_program_at_rays_address_or_port_is_named() -> None:
    # tmp_path is too long for Ray's sockets.
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as other:
        folder = Path(name)
        port = other.getsockname()[1]
        line = refused(folder, "status", RAY_ADDRESS=f"127.0.0.1:{port}")
        assert line.startswith(
            f"Ray at 127.0.0.1:{port} (RAY_ADDRESS) cannot be reached: another program listens there, or Ray"
        )
        line = refused(folder, "run", "models", RAY_GCS_SERVER_PORT=str(port))
        assert line.startswith(f"Ray cannot be started: port {port} is taken; end the program that listens there")


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            "The current node timed out during startup. This could happen because some of the raylet failed to startup",
            "its processes did not start in time, which happens on a busy machine; try again",
        ),
        (
            "Version mismatch: The cluster:\n  Ray: 2.60.1\n  Python: 3.12.1\nThis process:\n  Ray: 2.60.0\n  Python: 3.11.7",
            "it runs Ray 2.60.1 on Python 3.12.1, and this is Ray 2.60.0 on Python 3.11.7; install the same versions",
        ),
        ("", "Failed to connect to Ray cluster; a hint"),
        (
            "No node info found matching attributes: ''",
            "it has no node on this machine; end what is left of it with `ray stop`",
        ),
    ],
)
def test_what_ray_raises_is_one_line(raised: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.write(2, b"a line of Ray's C++\n")
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(raised)

    with pytest.raises(ClusterError) as error, explained("Ray cannot be used", "; a hint"):
        fail()
    assert str(error.value).startswith("Ray cannot be used: ")
    assert "\n" not in str(error.value)
    assert line in str(error.value)
    assert capfd.readouterr().err == ""


def listens(pid: int) -> set[str]:
    """The addresses that a process listens on, but for a replica's port that Ray Serve opens on all of them."""
    process, found = Path(f"/proc/{pid}"), set()
    with contextlib.suppress(OSError):  # it has ended
        if process.joinpath("cmdline").read_text().startswith("ray::ServeReplica"):
            return set()
        sockets = {str(one.readlink()) for one in process.joinpath("fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for line in process.joinpath("net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    found.add(fields[1].partition(":")[0])
    return found


def run_here(found: Machines, folder: Path) -> tuple[list[str], str, dict[str, str]]:
    """The command that runs a cluster of one model on this machine, the mark of its processes, and its environment."""
    save_mlp(folder / "models" / "mlp" / "1" / "model.onnx")
    mark = found.mark()
    options = ("--first-port", "0", "--", "--warm-up-seconds", "0", "--lame-duck-seconds", "0")
    return found.command("run", str(folder / "models"), *options), mark, {**found.environment(mark), "RAY_ADDRESS": "local"}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_cluster_on_this_machine_serves_until_ctrl_c(tmp_path: Path) -> None:
    with machines([]) as found:
        command, mark, environment = run_here(found, tmp_path)
        with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True) as process:
            assert process.stdout is not None
            ready = re.fullmatch(r"ready: 1 server; clients take cluster://(\S+)\n", process.stdout.readline())
            assert ready, process.stderr and process.stderr.read()
            with Client(ready[1], timeout_s=WAIT_S) as client:
                assert client.infer("mlp", {"x": X})["y"].shape == (1, 10)
            environment.pop("RAY_ADDRESS")
            asked = subprocess.run(
                found.command("status"), env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
            )
            assert (asked.returncode, asked.stderr) == (0, "")
            assert asked.stdout.startswith("halfserve: 1 member, 1 of 1 replicas run")
            assert ready[1] in asked.stdout
            heard = {pid: listens(pid) for pid in processes_of(mark)}
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that it has started
            out, error = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (0, "")
        assert re.fullmatch(r"started Ray on this machine, at 127\.0\.0\.1:\d+\ndraining\n", error)
        assert sum(map(len, heard.values())) > 5
        assert {address for found in heard.values() for address in found} <= LOOPBACK
        until(lambda: not processes_of(mark), "end of all processes")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_killed_member_and_a_stop_are_a_line_each_in_the_run(tmp_path: Path) -> None:
    with machines([]) as found:
        command, mark, environment = run_here(found, tmp_path)
        with subprocess.Popen(command, env=environment, stdout=PIPE, stderr=PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith("ready: 1 server")
            assert process.stderr.readline().startswith("started Ray on this machine")
            (server,) = (pid for pid in processes_of(mark) if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
            os.kill(server, signal.SIGKILL)
            assert process.stderr.readline() == "halfserve cluster: a server has ended, 0 of 1 run; Ray starts another one\n"
            environment.pop("RAY_ADDRESS")
            stop = [*found.command("stop")]
            stopped = subprocess.run(stop, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
            assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, "", "stopped\n")
            out, error = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out, error) == (0, "", "stopped\n")
        until(lambda: not processes_of(mark), "end of all processes")
