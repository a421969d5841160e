"""The page's files, with the headers that keep everything foreign out."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

SCRIPT = "text/javascript; charset=utf-8"
SCRIPTS = (
    "main",
    "dom",
    "requests",
    "copying",
    "charts",
    "models",
    "certificate",
    "server",
    "sign_in",
    "tensors",
    "try",
    "answers",
    "docs",
    "schema_text",
    "theme",
)
STATIC_FILES = {
    "index.html": "text/html; charset=utf-8",
    "docs.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{f"{name}.js": SCRIPT for name in SCRIPTS},
}
# Only this server's own files, and no inline script or style, so that the name of a model cannot inject any.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache", "x-frame-options": "DENY"}


def page_file(name: str, request: Request) -> Response:
    """Return a file of the page; without its content where the browser has this one already."""
    content, tag = _content(name)
    headers = {**PAGE_HEADERS, "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(None, 304, headers)
    return Response(content, headers={**headers, "content-type": STATIC_FILES[name]})


@cache
def _content(name: str) -> tuple[bytes, str]:
    """Return a file's content and entity tag."""
    content = resources.files("halfserve.serve.http.page").joinpath("static", name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'
