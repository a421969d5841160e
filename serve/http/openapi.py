"""GET /openapi.json: the REST interface, described for tools."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from serve.http.answers import json_answer
from serve.protocol.service import Service


class OpenApi:
    """The document, which is written by hand; only the version is this server's."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        """The one there is."""
        return [Route("/openapi.json", self.answer)]

    async def answer(self, _: Request) -> Response:
        """The document."""
        content = document()
        content["info"]["version"] = self._service.server_metadata(pb.ServerMetadataRequest()).version
        return json_answer(content)


def document() -> dict[str, Any]:
    """The document as it is written."""
    content: dict[str, Any] = json.loads(resources.files("serve.http").joinpath("openapi.json").read_bytes())
    return content
