"""A real S3 API in this process (moto's), in front of which a test may put faults."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import botocore.session
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
TRUNCATED, FLIPPED = "truncated", "flipped"
TESTS = "AWS4-HMAC-SHA256 Credential=tests/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
# What becomes of a request (its method and its path without the bucket): a status, a URL to redirect to, an answer's content,
# TRUNCATED, FLIPPED (one of its bits), or None for the true answer.
Fault = Callable[[str, str], int | str | bytes | None]


read_once = functools.cache(botocore.session.create_loader)


class Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002  (its name there)
        pass


class S3Server:
    """What a test sees of it.

    Attributes:
        requests: Method and path of each request.
        headers: Names of the last one's headers.
        fault: Decides what becomes of requests; it may also change the store meanwhile.
    """

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.requests: list[tuple[str, str]] = []
        self.headers: set[str] = set()
        self.fault: Fault | None = None
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"].removeprefix(f"/{BUCKET}").removeprefix("/")
        fault = None
        if environ.get("HTTP_AUTHORIZATION") != TESTS:
            self.requests.append((method, path))
            self.headers = {name[5:].replace("_", "-").title() for name in environ if name.startswith("HTTP_")}
            fault = self.fault(method, path) if self.fault else None
        if isinstance(fault, int):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{fault} Fault", [("Content-Length", "0")])
            return [b""]
        if isinstance(fault, str) and fault.startswith("http:"):
            start_response("307 Temporary Redirect", [("Content-Length", "0"), ("Location", fault)])
            return [b""]
        if isinstance(fault, bytes):
            start_response("200 OK", [("Content-Length", str(len(fault)))])
            return [fault]
        content = b"".join(self._moto(environ, start_response))
        if fault == FLIPPED:
            return [bytes([content[0] ^ 1]) + content[1:]]
        return [content[: len(content) // 2] if fault == TRUNCATED else content]

    def put(self, path: str, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Write an object, as another program would."""
        self._ask("PUT", f"/{BUCKET}/{path}", content, headers)

    def delete(self, path: str) -> None:
        self._ask("DELETE", f"/{BUCKET}/{path}")

    def get(self, path: str) -> bytes:
        return self._ask("GET", f"/{BUCKET}/{path}")

    def keys(self) -> list[str]:
        """Every object, in alphabetical order."""
        listing = self._ask("GET", f"/{BUCKET}").decode()
        return [part.partition("</Key>")[0] for part in listing.split("<Key>")[1:]]

    def _ask(self, method: str, path: str, content: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        try:
            connection.request(method, path, body=content, headers={"Authorization": TESTS, **(headers or {})})
            answer = connection.getresponse()
            assert answer.status < 300, (method, path, answer.status)
            return answer.read()
        finally:
            connection.close()

    def start(self) -> None:
        self._thread.start()
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{BUCKET}")

    def stop(self) -> None:
        """Stop answering; later calls do nothing."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with an empty bucket, to which s3:// leads in this process."""
    server = S3Server()
    # Without it, each session of a client reads the descriptions of AWS's interfaces again.
    monkeypatch.setattr(botocore.session, "create_loader", read_once)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server.start()
    try:
        yield server
    finally:
        server.stop()
