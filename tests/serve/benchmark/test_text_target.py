"""`halfserve bench MODEL --endpoint`: texts over REST, to our server and to others."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import trustme

from tests.serve.benchmark.test_bench_command import bench
from tests.serve.conftest import load_repository
from tests.serve.http.running_http import running_http
from tests.serve.http.tasks.small_text_models import save_text_model
from tests.serve.http.tasks.test_tei_embeddings import LONG, save_token_model
from tests.serve.running_server import running_server

TEXTS = ["the train", "a cat", "every river waits"]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """gRPC address and URL of a server with the models "embedder", "ranker", "classifier", "sparse" and "tokens"."""
    repository = tmp_path_factory.mktemp("text-models")
    for name in ("embedder", "ranker", "classifier", "sparse"):
        save_text_model(repository, name)
    save_token_model(repository, "tokens")
    with running_server(lambda: load_repository(repository)) as server, running_http(server) as rest:
        yield server.address, f"http://127.0.0.1:{rest.port}"


class Other(BaseHTTPRequestHandler):
    """Answers in two chunks, or refuses every fourth request and closes the connection then."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        if len(self.bodies) % 4:
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"2\r\n[[\r\n2\r\n]]\r\n0\r\n\r\n")
            return
        self.close_connection = True
        self.send_response(429)
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(b'{"error": "too\\nmany", "error_type": "Overloaded"}')

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@contextmanager
def other_server(context: ssl.SSLContext | None = None) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Port of a server that is not ours, and the bodies that it gets."""
    bodies: list[dict[str, Any]] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Recorder", (Other,), {"bodies": bodies})) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port, bodies
        finally:
            server.shutdown()
            thread.join()


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The report, and what is written beside it."""
    assert bench(*arguments, "--warmup", "0", "--json") == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    return found, captured.err


@pytest.mark.parametrize(
    ("model", "path"),
    [
        *(("embedder", path) for path in ("/embed", "/similarity", "/v1/embeddings")),
        *(("ranker", path) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
        ("classifier", "/predict"),
        ("sparse", "/embed_sparse"),
        ("tokens", "/embed_all"),
    ],
)
def test_each_path_is_measured_with_the_servers_own_counters(
    addresses: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, path: str
) -> None:
    address, url = addresses
    texts = TEXTS if path == "/v1/embeddings" else [*TEXTS, LONG]  # that alone cuts no text
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    load = ("--concurrency", "3", "--requests", "9", "--batch-size", "1,4", "--texts", str(tmp_path / "texts.txt"))
    found, beside = figures(capsys, model, "--endpoint", url + path, "--address", address, *load)
    assert [(one["requests"], one["errors"], one["batch_size"]) for one in found["levels"]] == [(9, 0, 1), (9, 0, 4)]
    assert (found["address"], found["version"], found["provider"]) == (url + path, "1", "CPUExecutionProvider")
    assert all(one["mean_batch_size"] >= 1 and one["server_ms"]["compute"] > 0 for one in found["levels"])
    assert found["levels"][1]["rows_per_second"] == 4 * found["levels"][1]["requests_per_second"]
    assert "warning" not in beside


def test_another_server_gets_the_lines_of_a_file_and_its_refusals_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    load = ("--concurrency", "1", "--requests", "11", "--batch-size", "2", "--texts", str(tmp_path / "texts.txt"))
    with other_server() as (port, bodies):
        endpoint = f"http://127.0.0.1:{port}/behind/a/proxy/v1/embeddings"
        found, beside = figures(capsys, "m", "--endpoint", endpoint, "--address", "127.0.0.1:1", *load)
    (level,) = found["levels"]
    assert (level["requests"], level["errors_by_status"]) == (8, {"HTTP 429": 3})
    assert level["error_messages"] == {"HTTP 429": "too many"}
    assert bodies[1:3] == [{"model": "m", "input": TEXTS[:2]}, {"model": "m", "input": [TEXTS[2], TEXTS[0]]}]
    assert "without the server's counters" in beside


def test_rest_is_measured_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with other_server(context) as (port, bodies):
        endpoint = ("--endpoint", f"https://127.0.0.1:{port}/embed", "--tls-ca", str(tmp_path / "ca.pem"))
        found, _ = figures(capsys, "a b", *endpoint, "--address", "127.0.0.1:1", "--concurrency", "1", "--requests", "2")
    assert found["levels"][0]["requests"] == 2
    assert bodies[0]["inputs"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--endpoint", "/nope"], 2, "--endpoint /nope: expected one of /embed, "),
        (["--endpoint", "http://127.0.0.1:x/embed"], 2, "expected one of /embed, "),
        (["--endpoint", "ftp://127.0.0.1/embed"], 2, "expected one of /embed, "),
        (["--endpoint", "//127.0.0.1/embed"], 2, "expected one of /embed, "),
        (["--endpoint", "http://127.0.0.1:1/embed"], 1, "no server answers at http://127.0.0.1:1/embed (connection refused)"),
        (["--endpoint", "URL/embed?model=a"], 2, "expected one of /embed, "),
        (["--endpoint", "URL/embed", "--shape", "x:1", "--streaming"], 2, "one server; leave --shape, --streaming out"),
        (["--endpoint", "URL/embed", "--texts", "none.txt"], 2, "--texts none.txt: No such file or directory"),
        (
            ["--endpoint", "URL/embed", "--texts", "/dev/null"],
            2,
            "--texts /dev/null: it has no text, expected one in each line",
        ),
        (["--endpoint", "URL/rerank"], 1, "/rerank refused the first request: HTTP 4"),
        (["--texts", "none.txt"], 2, "--texts are for a REST path; expected --endpoint too"),
    ],
)
def test_wrong_options_are_answered_in_one_line(
    addresses: tuple[str, str], capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, text: str
) -> None:
    address, url = addresses
    assert bench("nope", "--address", address, *(argument.replace("URL", url) for argument in arguments)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("halfserve bench: ")
    assert text in captured.err
    assert captured.err.count("\n") == 1
