"""A hub in this process that answers what huggingface_hub asks of the Hugging Face Hub; its models lie in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

ROUTES = (
    re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?"),
    re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/(?P<tree>.*))?"),
    re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/paths-info/(?P<revision>[^/]+)(?P<info>)"),
    re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)"),
)
# A status, and what the hub's X-Error-Code says with it.
Fault = tuple[int, str]


@dataclass
class HubRepository:
    """One model: the files of each commit, and the commits of branches and tags."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    token: str = ""  # needed to read it


class HubServer:
    """What a test sees of it.

    Attributes:
        url: For HF_ENDPOINT.
        fetched: Paths of the files that were read, in order.
        fault: Decides by method and path which requests fail; None lets one pass.
    """

    def __init__(self) -> None:
        self._models: dict[str, HubRepository] = {}
        self._ends = False
        self.fetched: list[str] = []
        self.fault: Callable[[str, str], Fault | None] = lambda _method, _path: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            do_HEAD = do_POST = do_GET  # noqa: N815  (their names there)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (its name there)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread.start()

    def push(self, name: str, folder: Path, revision: str = "main", *, token: str = "") -> str:
        """Put all files of a folder on the hub as one commit; returns its hash."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in sorted(files.items()):
            digest.update(path.encode() + b"\0" + content)
        model = self._models.setdefault(name, HubRepository())
        model.commits[digest.hexdigest()] = files
        model.revisions[revision] = digest.hexdigest()
        model.token = token
        return digest.hexdigest()

    def stop(self) -> None:
        """Stop answering, on open connections too; later calls do nothing."""
        self._ends = True
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        if self._ends:
            request.close_connection = True
            return
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = urlsplit(request.path).path
        fault = self.fault(request.command, unquote(path))
        found = next((match for route in ROUTES if (match := route.fullmatch(path))), None)
        model = None if found is None else self._models.get(unquote(found["name"]))
        if fault is not None:
            _send(request, fault[0], b"{}", {"X-Error-Code": fault[1]})
        elif found is None or model is None:
            _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif model.token and request.headers.get("Authorization") != f"Bearer {model.token}":
            _send(request, 401, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            revision = unquote(found["revision"] or "main")
            commit = model.revisions.get(revision, revision)
            if commit not in model.commits:
                _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                self._answer_about(request, found.groupdict(), commit, model.commits[commit], body)

    def _answer_about(
        self, request: BaseHTTPRequestHandler, asked: dict[str, str | None], commit: str, files: dict[str, bytes], body: bytes
    ) -> None:
        headers = {"X-Repo-Commit": commit}
        if (file := asked.get("file")) is not None:
            content = files.get(unquote(file))
            if content is None:
                _send(request, 404, b"", {**headers, "X-Error-Code": "EntryNotFound"})
                return
            if request.command == "GET":
                self.fetched.append(unquote(file))
            tag = hashlib.sha256(content).hexdigest()
            _send(request, 200, content, {**headers, "ETag": f'"{tag}"', "Accept-Ranges": "bytes"})
        elif "tree" in asked:
            below, nested = unquote(asked["tree"] or ""), "recursive=" in request.path
            _send_json(request, _tree(files, f"{below}/" if below else "", nested=nested), headers)
        elif "info" in asked:
            _send_json(request, [entry for path in json.loads(body)["paths"] for entry in _info(files, path)], headers)
        else:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            _send_json(request, {"id": asked["name"], "sha": commit, "siblings": siblings}, headers)


def _tree(files: dict[str, bytes], below: str, *, nested: bool) -> list[dict[str, object]]:
    inside = [path.removeprefix(below) for path in files if path.startswith(below)]
    shown = {path if nested else path.partition("/")[0] for path in inside}
    return [entry for path in sorted(shown) for entry in _info(files, below + path)]


def _info(files: dict[str, bytes], path: str) -> list[dict[str, object]]:
    if path in files:
        tag = hashlib.sha1(files[path], usedforsecurity=False).hexdigest()
        return [{"type": "file", "path": path, "size": len(files[path]), "oid": tag}]
    is_folder = any(file.startswith(f"{path}/") for file in files)
    return [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40}] if is_folder else []


def _send_json(request: BaseHTTPRequestHandler, content: object, headers: dict[str, str]) -> None:
    _send(request, 200, json.dumps(content).encode(), {**headers, "Content-Type": "application/json"})


def _send(request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str]) -> None:
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
    if wanted and status == 200:
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        status, content = 206, content[first : last + 1]
    request.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


@contextmanager
def hub_server(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[HubServer]:
    """A hub that this process and its children ask, with an empty cache in `cache`.

    huggingface_hub reads the environment once, so that its constants are set too.
    """
    server = HubServer()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(cache / "assets"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HOME", str(cache))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield server
    finally:
        server.stop()
