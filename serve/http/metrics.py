"""GET /metrics: what Prometheus scrapes."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve.engine.inference_core import InferenceCore


class Metrics:
    """The metrics of one server."""

    def __init__(self, core: InferenceCore) -> None:
        self._core = core

    def routes(self) -> list[Route]:
        """The one there is."""
        return [Route("/metrics", self.answer)]

    async def answer(self, _: Request) -> Response:
        """All metrics, as text."""
        # Imported when first asked for: a start does not wait for it. On a thread: nor do other requests.
        module: Any = await asyncio.to_thread(import_module, "serve.observability.exposition")
        body, content_type = await module.exposition(self._core)
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})
