"""The model repository: what is in it, load and unload."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from serve.http import json_fields as fields
from serve.http.answers import json_answer
from serve.http.message_json import to_json
from serve.http.request_body import BodyReader
from serve.http.rpcs import Rpcs

FILE = "file:"


class RepositoryRoutes:
    """POST requests about the repository."""

    def __init__(self, rpcs: Rpcs, bodies: BodyReader) -> None:
        self._rpcs = rpcs
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """All of them."""
        model = "/v2/repository/models/{model}"
        return [
            Route("/v2/repository/index", self.index, methods=["POST"]),
            Route(f"{model}/load", self.load, methods=["POST"]),
            Route(f"{model}/unload", self.unload, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """Every model version and its state; of those that are ready alone with {"ready": true}."""
        content = fields.parse_object(await self._bodies.read_small(request), empty=True)
        ready = bool(fields.flag(content, "ready", "the request", default=False))
        response = await self._rpcs.call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        return json_answer([to_json(entry) for entry in response.models])

    async def load(self, request: Request) -> Response:
        """Load a model, or load it anew; parameters "config" (JSON) and "file:<path>" (base64) override what is on disk."""
        name = request.path_params["model"]
        body = await self._bodies.read(request)
        message = await self._bodies.understand(body, lambda body: _load_request(name, body))
        await self._rpcs.call("RepositoryModelLoad", message)
        return json_answer({})

    async def unload(self, request: Request) -> Response:
        """Unload a model once what it has taken is answered."""
        message = pb.RepositoryModelUnloadRequest(model_name=request.path_params["model"])
        parameters = _parameters(await self._bodies.read_small(request))
        for name in parameters:
            message.parameters[name].bool_param = bool(fields.flag(parameters, name, "parameters"))
        await self._rpcs.call("RepositoryModelUnload", message)
        return json_answer({})


def _load_request(name: str, body: bytes) -> pb.RepositoryModelLoadRequest:
    message = pb.RepositoryModelLoadRequest(model_name=name)
    parameters = _parameters(body)
    for key in parameters:
        if key.startswith(FILE):
            message.parameters[key].bytes_param = fields.base64_bytes(parameters, key, "parameters")
        else:
            message.parameters[key].string_param = fields.text(parameters, key, "parameters")
    return message


def _parameters(body: bytes) -> dict[str, object]:
    return fields.members(fields.parse_object(body, empty=True), "parameters", "the request")
