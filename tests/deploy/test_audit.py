"""Known vulnerabilities of pinned packages: pip-audit asks a database that answers, that fails, and that is not there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.release.audit import FOUND, NOTHING_CHECKED, audit

pytest.importorskip("pip_audit", reason="make audit and make release install pip-audit")
AFFECTED = {"package": {"name": "h11", "ecosystem": "PyPI"}, "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "0.16.0"}]}]}
KNOWN = {"id": "PYSEC-1", "summary": "Bodies are smuggled.", "affected": [AFFECTED]}


class Database(BaseHTTPRequestHandler):
    """A database as OSV's, which knows one vulnerability of h11 0.14.0, and fails for any request after /broken."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_affected = (asked["package"]["name"], asked["version"]) == ("h11", "0.14.0")
        answer = json.dumps({"vulns": [KNOWN]} if is_affected else {}).encode()
        self.send_response(503 if self.path == "/broken" else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def database() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Database) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("h11", "places", "status", "said"),
    [
        ("0.14.0", ["/broken", "/"], FOUND, "h11 0.14.0 has PYSEC-1: Bodies are smuggled. (repaired in 0.16.0)"),
        ("0.16.0", ["/"], 0, "2 of 2 packages of {pins} were checked; none has a known vulnerability"),
        ("0.16.0", ["/broken"], NOTHING_CHECKED, "no vulnerability database can be reached; nothing was checked"),
    ],
)
def test_an_audit_without_a_database_does_not_look_like_a_success(
    tmp_path: Path, h11: str, places: list[str], status: int, said: str
) -> None:
    pins = tmp_path / "constraints.txt"
    pins.write_text(f"# Pins.\nh11=={h11}\nml_dtypes==0.5.4\n")
    cache = ("--cache-dir", str(tmp_path / "cache"))
    with database() as url:
        result = audit(pins, [("--vulnerability-service", "osv", "--osv-url", url + place) for place in places], cache)
    assert result.status == status
    assert said.format(pins=pins) in "\n".join(result.lines)
