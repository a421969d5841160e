"""The conformance kit: our server passes it on each transport, and it finds what a server does wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from halfserve.conformance.checks import CheckResult, Outcome, run_check
from halfserve.conformance.conformance_command import ConformanceTargetError, conformance_checks
from tests.models import save_echo_types, save_mlp
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.running_server import TRANSPORTS, running_server


@pytest.fixture(scope="module", params=TRANSPORTS)
def addresses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Addresses of gRPC and REST of a server on models of all data types, and its transport."""
    root = tmp_path_factory.mktemp("repository")
    save_mlp(root / "mlp" / "1" / "model.onnx")
    save_echo_types(root / "echo_types" / "1" / "model.onnx")
    with (
        running_server(lambda: load_repository(root), TRANSPORTS[request.param]) as server,
        running_http(server) as rest,
    ):
        yield server.address, f"127.0.0.1:{rest.port}", request.param


def results_of(address: str, rest: str, *models: str) -> list[CheckResult]:
    return [run_check(check) for check in conformance_checks(address, rest, models)]


def test_our_server_conforms(addresses: tuple[str, str, str]) -> None:
    results = results_of(*addresses[:2])
    failed = {result.name: result.reason for result in results if result.outcome is Outcome.FAIL}
    if addresses[2] == "grpcio":  # its core knows no padding
        failed.pop("http2.padding")
    assert failed == {}
    assert len({result.name for result in results}) == len(results) > 80
    left_out = {result.name for result in results if result.outcome is Outcome.NOT_OFFERED}
    assert left_out <= {"rest.health_objects", "grpc.infer.typed[mlp]", "grpc.infer.typed[echo_types]"}


class WrongServer(BaseHTTPRequestHandler):
    """Answers each request with the same JSON, whatever was asked."""

    def do_GET(self) -> None:
        body = json.dumps({"name": "m", "version": "", "inputs": [], "outputs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815  (the standard library's name)

    def log_message(self, format: str, *arguments: object) -> None: ...  # noqa: A002  (the standard library's name)


@pytest.fixture
def wrong_server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), WrongServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_that_answers_the_same_to_all_fails(wrong_server: str) -> None:
    found = {result.name: result for result in results_of("", wrong_server, "m")}
    assert found["rest.server_live"].outcome is Outcome.PASS
    assert found["rest.infer.unknown_model"].reason.startswith("expected a status of errors, typically 400, got 200")
    assert found["rest.server_metadata"].reason.startswith("expected a name and a version")
    assert found["rest.keep_alive"].outcome is Outcome.NOT_OFFERED


def test_the_command_writes_results_and_exits_with_1(wrong_server: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "halfserve.conformance", "-", "--rest", wrong_server, "--model", "m"]
    files = ["--json", str(tmp_path / "c.json"), "--junit", str(tmp_path / "c.xml")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "c.json").read_text())
    suite = ET.parse(tmp_path / "c.xml").getroot()  # noqa: S314  (a file of the kit)
    assert int(suite.attrib["failures"]) == len(suite.findall("testcase/failure")) == found["counts"]["fail"] > 0
    assert int(suite.attrib["tests"]) == len(found["checks"]) == sum(found["counts"].values())
    assert done.stdout.splitlines()[-1].split(" ")[0] == str(found["counts"]["pass"])


def test_where_no_server_can_be_asked_the_error_says_so(wrong_server: str, free_port: int) -> None:
    with pytest.raises(ConformanceTargetError, match="'here' is no address, expected HOST:PORT"):
        results_of("", "here")
    with pytest.raises(ConformanceTargetError, match="'here' is no address, expected HOST:PORT"):
        results_of("here", "")
    with pytest.raises(ConformanceTargetError, match="expected the address of a gRPC port, or --rest"):
        results_of("", "")
    done = subprocess.run(
        [sys.executable, "-m", "halfserve.conformance", "-", "--rest", f"127.0.0.1:{free_port}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, "Connection refused" in done.stderr) == (3, True)
