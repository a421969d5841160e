"""Invalid REST requests, each with the statuses that HTTP or the protocol allows, and the client that sends them."""

from __future__ import annotations

import gzip
import http.client
import json
import random
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.harness.http2_frames import connected
from tests.serve.running_server import WAIT_S

INFER = "/v2/models/affine/infer"
CLOSED = 0  # the connection ended without an answer


@dataclass(frozen=True)
class RestFault:
    kind: str
    statuses: frozenset[int]  # right HTTP statuses
    body: bytes = b""
    path: str = ""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)  # additional headers
    raw: bytes = b""  # bytes to send on a separate connection instead of the request


class RestClient:
    """Sends requests over one persistent connection, which is reopened if the server closes it.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(address, timeout=WAIT_S)

    def complaint(self, fault: RestFault) -> str:
        """Send a request; returns the fault of the answer, "" if it is right."""
        if fault.raw:
            status, text = self._say(fault.raw), ""
        else:
            status, text = self._ask(fault)
        if status not in fault.statuses:
            return f"HTTP {status} {text[:200]}, expected one of {sorted(fault.statuses)}; sent {fault.body[:100]!r}"
        return "" if fault.raw or status == 200 or _has_reason(text) else f"HTTP {status} without a reason: {text[:200]}"

    def close(self) -> None:
        self._connection.close()

    def _ask(self, fault: RestFault) -> tuple[int, str]:
        try:
            self._connection.request(fault.method, fault.path, fault.body or None, dict(fault.headers))
            response = self._connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except (http.client.HTTPException, ConnectionError) as error:
            self._connection.close()
            return CLOSED, repr(error)

    def _say(self, data: bytes) -> int:
        with connected(self._address) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = b"".join(iter(lambda: connection.recv(65_536), b""))
            except ConnectionError:
                return CLOSED
        return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else CLOSED


def _has_reason(text: str) -> bool:
    try:
        content = json.loads(text)
    except ValueError:
        return False
    return isinstance(content, dict) and bool(content.get("error"))


def _body(**changes: object) -> bytes:
    """A request that is valid except for these fields of its only input."""
    tensor: dict[str, object] = {"name": "x", "datatype": "FP16", "shape": [1, 8], "data": [0.5] * 8}
    return json.dumps({"inputs": [tensor | changes]}).encode()


def _rest(kind: str, body: bytes, *statuses: int, **headers: str) -> RestFault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RestFault(kind, frozenset(statuses), body, INFER, headers=named)


def no_json(chance: random.Random) -> RestFault:
    """Bytes that are not JSON, or JSON that is cut off, nested too deeply, or not an object."""
    whole = _body()
    cases = [
        b"\xff" + chance.randbytes(30),
        whole[: chance.randrange(1, len(whole))],
        whole + b"}",
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"[]",
        b"null",
        b"1" * 5000,
        b'{"inputs": [' + b"9" * 5000 + b"]}",
        whole.replace(b'"', b"'"),
    ]
    return _rest("REST: no JSON", chance.choice(cases), 400)


def wrong_field(chance: random.Random) -> RestFault:
    """A field of the wrong kind, size or number."""
    changes: list[dict[str, object]] = [
        {"name": 5},
        {"name": "z"},
        {"datatype": chance.choice(["FP32", "fp16", "", "X" * 500])},
        {"datatype": None},
        {"shape": chance.choice([[1], [1, 9], [-1, 8], [2**70, 8], [1.0, 8], [True, 8], "1,8", {}, [0, 8], [17, 8]])},
        {"data": chance.choice([[], [1] * 7, ["x"] * 8, [None] * 8, {}, "AAAA", [[1] * 4, [1] * 3], [1e9] * 8, [10**400] * 8])},
        {"data": [[[[[0.5] * 8]]]]},
        {"parameters": chance.choice([5, [], "x", {"binary_data_size": 16}, {"binary_data_size": -1}, {"a": {}}])},
        {"parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 16}},
    ]
    return _rest("REST: wrong fields", _body(**chance.choice(changes)), 400)


def wrong_document(chance: random.Random) -> RestFault:
    documents: list[object] = [
        {},
        {"inputs": []},
        {"inputs": {}},
        {"inputs": [5]},
        {"inputs": None},
        {"id": 5, "inputs": []},
        {"inputs": [{}]},
        {"inputs": [], "outputs": 5},
        {"inputs": [], "parameters": [1]},
    ]
    return _rest("REST: wrong document", json.dumps(chance.choice(documents)).encode(), 400)


def wrong_length(chance: random.Random) -> RestFault:
    """Inference-Header-Content-Length that does not fit the body."""
    text = chance.choice(["-1", "x", "1e3", "999999", "9" * 30, "5", " ", "\u00b2"])
    return _rest("REST: header length", _body(), 400, Inference_Header_Content_Length=text)


def wrong_coding(chance: random.Random) -> RestFault:
    """Bodies that do not decompress, or decompress without end."""
    whole = gzip.compress(_body(), mtime=0)
    body, coding, statuses = chance.choice(
        [
            (whole[:-9], "gzip", {400}),
            (b"no gzip", "gzip", {400}),
            (_body(), "deflate", {400}),
            (_body(), "snappy", {415, 501}),
            (whole, "br", {415, 501}),
        ]
    )
    return _rest("REST: content coding", body, *statuses, Content_Encoding=coding)


def wrong_path(chance: random.Random) -> RestFault:
    path, statuses = chance.choice(
        [
            ("/v2/models/nobody/infer", {404}),
            ("/v2/models/affine/versions/7/infer", {404}),
            ("/v2/models/affine/versions/x/infer", {400}),
            ("/v2/models/" + "a" * 3000 + "/infer", {404}),
            ("/v2/models/..%2f..%2fetc%2fpasswd/infer", {404}),
            ("/v2/models/affine%00/infer", {400}),
            ("/v2/models/affine/infer%0a", {400}),
            ("/v2/nothing", {404}),
            ("//v2/models/affine/infer", {404}),
        ]
    )
    return RestFault("REST: wrong path", frozenset(statuses), _body(), path)


def wrong_method(chance: random.Random) -> RestFault:
    """Methods that the path does not support."""
    method = chance.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
    return RestFault("REST: wrong method", frozenset({405}), path=INFER, method=method)


def no_http(chance: random.Random) -> RestFault:
    """Bytes that are not HTTP/1.1, or contradict themselves: refused with 400, or by closing the connection.

    Bytes that could be HTTP but name no path get 404.
    """
    post = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n".encode()
    raw = chance.choice(
        [
            chance.randbytes(200) + b"\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET\r\n\r\n",
            post + b"Content-Length: -5\r\n\r\n",
            post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
            post + b"Content-Length: 500\r\n\r\n{}",
            post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
            post + b"a b: c\r\n\r\n",
            post + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
        ]
    )
    return RestFault("REST: no HTTP", frozenset({CLOSED, 400, 404, 431, 505}), raw=raw)


MAKERS: tuple[Callable[[random.Random], RestFault], ...] = (
    no_json,
    wrong_field,
    wrong_document,
    wrong_length,
    wrong_coding,
    wrong_path,
    wrong_method,
    no_http,
)
