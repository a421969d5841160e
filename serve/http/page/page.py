"""The paths of the page: its files, what it shows, and certificates."""

from __future__ import annotations

from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.engine.errors import InvalidArgumentError, NotFoundError
from serve.engine.inference_core import InferenceCore
from serve.http.answers import json_answer, written_answer
from serve.http.page.certificates import Certificates
from serve.http.page.history import History
from serve.http.page.state import State

FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "main.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "models.js": "text/javascript; charset=utf-8",
    "certificate.js": "text/javascript; charset=utf-8",
    "tensors.js": "text/javascript; charset=utf-8",
    "try.js": "text/javascript; charset=utf-8",
}
# Nothing but this server's own files, and no script or style within the page itself: names of models can do no harm.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "cache-control": "no-cache", "x-frame-options": "DENY"}


class Page:
    """Serves the page."""

    def __init__(self, core: InferenceCore, whole: Page | None = None) -> None:
        self._core = core
        self._certificates: Certificates = Certificates() if whole is None else whole._certificates  # noqa: SLF001  (own class)
        self._history: History = History(core) if whole is None else whole._history  # noqa: SLF001  (as above)
        self._state = State(core, self._history, self._certificates)

    def showing(self, core: InferenceCore) -> Page:
        """The same page for those who see some of its models only, with the same past."""
        return Page(core, self)

    def routes(self) -> list[Route]:
        """All paths."""
        return [
            Route("/", self.index),
            Route("/ui/state", self.state),
            Route("/ui/certificates/{model}/{version}", self.certificate),
            Route("/ui/{file}", self.file),
        ]

    def start(self) -> None:
        """Begin to remember what models do; on the event loop."""
        self._history.start()

    def stop(self) -> None:
        """End that."""
        self._history.stop()

    async def index(self, _: Request) -> Response:
        """The page itself."""
        return _file("index.html")

    async def file(self, request: Request) -> Response:
        """One of its files."""
        name = request.path_params["file"]
        if name not in FILES:
            raise NotFoundError(f"the page has no file {name[:60]!r}")
        return _file(name)

    async def state(self, request: Request) -> Response:
        """What it shows; ?since=<seconds since the epoch> leaves out samples that it has."""
        since = request.query_params.get("since", "0")
        try:
            since_s = float(since)
        except ValueError:
            raise InvalidArgumentError(f"since is {since[:40]!r}, expected seconds since the epoch") from None
        return written_answer(await self._state.read(since_s))

    async def certificate(self, request: Request) -> Response:
        """One model version's certificate, all of it."""
        model = self._core.model(request.path_params["model"], request.path_params["version"])
        return json_answer(await self._certificates.full(model))


def _file(name: str) -> Response:
    return Response(_content(name), headers={**HEADERS, "content-type": FILES[name]})


@cache
def _content(name: str) -> bytes:
    return resources.files("serve.http.page").joinpath("static", name).read_bytes()
