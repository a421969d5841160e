"""The routes of the page for people: its files, the state that it shows, and certificates."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from halfserve.serve.engine.errors import InvalidArgumentError, NotFoundError
from halfserve.serve.engine.inference_core import InferenceCore
from halfserve.serve.http.guards import GRANT
from halfserve.serve.http.page.certificates import Certificates
from halfserve.serve.http.page.examples import examples_of
from halfserve.serve.http.page.model_history import ModelHistory
from halfserve.serve.http.page.page_files import STATIC_FILES, page_file
from halfserve.serve.http.page.page_state import PageState
from halfserve.serve.http.responses import dump_json, json_response, json_text_response
from halfserve.serve.http.routing.route_table import serves
from halfserve.serve.protocol.rpc import STATISTICS, Access
from halfserve.serve.security.gate import AccessGrant

OPEN = Access(None, None)  # the files are the same on every server, and ask for the token


class Page:
    def __init__(self, core: InferenceCore, whole: Page | None = None) -> None:
        """Make the page of these models; `whole` is the page of all models, whose history it shares."""
        self._core = core
        self._certificates: Certificates = Certificates() if whole is None else whole._certificates  # noqa: SLF001  (own class)
        self._history: ModelHistory = ModelHistory(core) if whole is None else whole._history  # noqa: SLF001  (as above)
        self._state = PageState(core, self._history, self._certificates)

    def restricted_to(self, core: InferenceCore) -> Page:
        """Return the page of some of the models, for a restricted token."""
        return Page(core, self)

    def start(self) -> None:
        """Start to record the history; on the event loop."""
        self._history.start()

    def stop(self) -> None:
        self._history.stop()

    @serves("GET", "/", OPEN)
    async def index(self, request: Request) -> Response:
        return page_file("index.html", request)

    @serves("GET", "/docs", OPEN)
    async def docs(self, request: Request) -> Response:
        return page_file("docs.html", request)

    @serves("GET", "/ui/files/{file}", OPEN)
    async def file(self, request: Request) -> Response:
        name = request.path_params["file"]
        if name not in STATIC_FILES:
            raise NotFoundError(f"the page has no file {name[:60]!r}")
        return page_file(name, request)

    @serves("GET", "/ui/state", STATISTICS)
    async def state(self, request: Request) -> Response:
        """Return the state as JSON; ?since=<seconds since the epoch> leaves out older samples."""
        since = request.query_params.get("since", "0")
        try:
            since_s = float(since)
        except ValueError:
            raise InvalidArgumentError(f"since is {since[:40]!r}, expected seconds since the epoch") from None
        grant: AccessGrant | None = request.scope.get(GRANT)
        return json_text_response(await self._state.read(since_s, "" if grant is None else grant.holder))

    @serves("GET", "/ui/examples/{model}/{version}", STATISTICS)
    async def examples(self, request: Request) -> Response:
        model = self._core.model(request.path_params["model"], request.path_params["version"])
        return json_text_response(await asyncio.to_thread(lambda: dump_json(examples_of(model))))

    @serves("GET", "/ui/certificates/{model}/{version}", STATISTICS)
    async def certificate(self, request: Request) -> Response:
        model = self._core.model(request.path_params["model"], request.path_params["version"])
        return json_response(await self._certificates.full(model))
