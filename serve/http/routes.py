"""The REST routes of health, metadata, statistics, the repository, metrics and OpenAPI.

Each calls the RPC of the same purpose, so that REST and gRPC share all checks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from halfserve.protos import inference_pb2 as pb
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.errors import UnavailableError
from halfserve.serve.http import json_bodies as fields
from halfserve.serve.http.guards import peer_of
from halfserve.serve.http.request_body import BodyReader, answered_or_gone
from halfserve.serve.http.responses import dump_json, dump_list, empty_response, json_response, json_text_response, message_dict
from halfserve.serve.http.routing.document import openapi_document
from halfserve.serve.http.routing.kserve_bodies import IndexBody, LoadBody, UnloadBody
from halfserve.serve.http.routing.operations import DONE, OF_MODEL, BodyContent, DescribedAnswer, RestOperation, Tag
from halfserve.serve.http.routing.route_table import MODEL, VERSION, declared_by, serves, serves_versions
from halfserve.serve.protocol.rpc import (
    DESCRIPTION,
    HEALTH,
    METADATA,
    METRICS,
    MODEL_CONFIG,
    MODEL_READY,
    REPOSITORY_CHANGE,
    REPOSITORY_INDEX,
    STATISTICS,
    RpcCall,
)
from halfserve.serve.protocol.service import SERVICE, Service

REPOSITORY_MODEL = "/v2/repository/models/{model}"
FILE = "file:"


def _statistics(name: str, summary: str, since: str, errors: AbstractSet[int]) -> RestOperation:
    answer = DescribedAnswer(f"Totals since {since} was loaded; times in nanoseconds.", BodyContent(pb.ModelStatisticsResponse))
    return RestOperation(name, Tag.MODELS, summary, answer, errors=errors)


class ModelRoutes:
    """Routes of the server's and the models' health, metadata and statistics, and of the repository."""

    def __init__(self, service: Service, bodies: BodyReader) -> None:
        self._core = service.core
        self._bodies = bodies
        self._call, self._done = partial(rpc_response, service), partial(rpc_done, service)

    @serves(
        "GET",
        "/v2",
        METADATA,
        RestOperation(
            "serverMetadata",
            Tag.SERVER,
            "Name, version and extensions of the server",
            DescribedAnswer("The server.", BodyContent(pb.ServerMetadataResponse)),
        ),
    )
    @serves("GET", "/v2/", METADATA)
    async def server_metadata(self, request: Request) -> Response:
        return json_response(message_dict(await self._call(request, "ServerMetadata", pb.ServerMetadataRequest())))

    @serves(
        "GET",
        "/v2/health/live",
        HEALTH,
        RestOperation("serverLive", Tag.SERVER, "Whether the process answers", DescribedAnswer("It does.")),
    )
    async def live(self, request: Request) -> Response:
        """200 without a body, as in Triton: scripts print the status behind it, and compare that."""
        await self._call(request, "ServerLive", pb.ServerLiveRequest())
        return empty_response()

    @serves(
        "GET",
        "/v2/health/ready",
        HEALTH,
        RestOperation("serverReady", Tag.SERVER, "Whether requests are taken", DescribedAnswer("They are."), errors={503}),
    )
    async def ready(self, request: Request) -> Response:
        """200 without a body if requests are accepted, 503 otherwise."""
        response = await self._call(request, "ServerReady", pb.ServerReadyRequest())
        if not response.ready:
            raise UnavailableError("the server takes no requests now; send them to another replica")
        return empty_response()

    @serves_versions(
        "GET",
        "/ready",
        MODEL_READY,
        RestOperation("modelReady", Tag.MODELS, "Whether {model} takes requests", DescribedAnswer("It does."), errors=OF_MODEL),
    )
    async def model_ready(self, request: Request) -> Response:
        """200 without a body if the model accepts requests, 503 if not, and 404, which the RPC cannot say, if it is unknown."""
        name, version = _named(request)
        self._core.is_model_ready(name, version)  # raises what the RPC cannot say
        if not (await self._call(request, "ModelReady", pb.ModelReadyRequest(name=name, version=version))).ready:
            raise UnavailableError(f"model {name!r} takes no requests now; send them to another replica")
        return empty_response()

    @serves_versions(
        "GET",
        "",
        METADATA,
        RestOperation(
            "modelMetadata",
            Tag.MODELS,
            "Inputs and outputs of {model}",
            DescribedAnswer(
                "The batch dimension is included where the model has one; -1 takes any size.",
                BodyContent(pb.ModelMetadataResponse),
            ),
            errors=OF_MODEL,
        ),
    )
    async def model_metadata(self, request: Request) -> Response:
        name, version = _named(request)
        return json_response(
            message_dict(await self._call(request, "ModelMetadata", pb.ModelMetadataRequest(name=name, version=version)))
        )

    @serves_versions(
        "GET",
        "/config",
        MODEL_CONFIG,
        RestOperation(
            "modelConfig",
            Tag.MODELS,
            "The completed configuration of {model}",
            DescribedAnswer("A ModelConfig, as JSON.", BodyContent(ModelConfig)),
            errors=OF_MODEL,
        ),
    )
    async def model_config(self, request: Request) -> Response:
        name, version = _named(request)
        response = await self._call(request, "ModelConfig", pb.ModelConfigRequest(name=name, version=version))
        return json_response(message_dict(response.config))

    @serves(
        "GET",
        "/v2/models/stats",
        STATISTICS,
        _statistics("allStatistics", "Counters of everything that is served", "each", set()),
    )
    @serves(
        "GET",
        f"{MODEL}/stats",
        STATISTICS,
        _statistics("modelStatistics", "Counters of all versions of a model", "it", OF_MODEL),
    )
    @serves(
        "GET",
        f"{VERSION}/stats",
        STATISTICS,
        _statistics("modelStatisticsOfVersion", "Counters of one version of a model", "it", OF_MODEL),
    )
    async def statistics(self, request: Request) -> Response:
        """Counters of a model version, of all versions, or of all models."""
        name, version = _named(request)
        response = await self._call(request, "ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version))
        counters = await dump_list(message_dict(of_version) for of_version in response.model_stats)
        return json_text_response(f'{{"model_stats":{counters}}}')

    @serves(
        "POST",
        "/v2/repository/index",
        REPOSITORY_INDEX,
        RestOperation(
            "repositoryIndex",
            Tag.REPOSITORY,
            "Every model version and its state",
            DescribedAnswer("By name and version.", BodyContent(list[pb.RepositoryIndexResponse.ModelIndex])),
            takes=(BodyContent(IndexBody, example={"ready": True}),),
            is_body_optional=True,
        ),
    )
    async def repository_index(self, request: Request) -> Response:
        """Return every model version and its state; {"ready": true} asks for the ready ones alone."""
        content = fields.parse_object(await self._bodies.read_small(request), empty=True)
        ready = bool(fields.flag(content, "ready", "the request", default=False))
        response = await self._call(request, "RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        return json_response([message_dict(entry) for entry in response.models])

    @serves(
        "POST",
        f"{REPOSITORY_MODEL}/load",
        REPOSITORY_CHANGE,
        RestOperation(
            "loadModel",
            Tag.REPOSITORY,
            "Load a model, or load it again",
            DONE,
            "Answers once the model serves; what served before goes on until then. Only where the server lets clients load "
            "models.",
            takes=(BodyContent(LoadBody),),
            is_body_optional=True,
            errors={404, 409},
        ),
    )
    async def load(self, request: Request) -> Response:
        """Load or reload a model; parameters "config" (JSON) and "file:<path>" (base64) override what is on disk."""
        name = request.path_params["model"]
        body = await self._bodies.read(request)
        message = await self._bodies.understand(body, lambda body: _load_request(name, body))
        loading = asyncio.ensure_future(self._done(request, "RepositoryModelLoad", message))
        if not await answered_or_gone(request, loading, lambda: None):
            raise ClientDisconnect
        return loading.result()

    @serves(
        "POST",
        f"{REPOSITORY_MODEL}/unload",
        REPOSITORY_CHANGE,
        RestOperation(
            "unloadModel",
            Tag.REPOSITORY,
            "Unload a model",
            DONE,
            "Answers once what the model had taken is answered.",
            takes=(BodyContent(UnloadBody),),
            is_body_optional=True,
            errors={404, 409},
        ),
    )
    async def unload(self, request: Request) -> Response:
        """Unload a model after its accepted requests are answered."""
        message = pb.RepositoryModelUnloadRequest(model_name=request.path_params["model"])
        parameters = _parameters(await self._bodies.read_small(request))
        for name in parameters:
            message.parameters[name].bool_param = bool(fields.flag(parameters, name, "parameters"))
        return await self._done(request, "RepositoryModelUnload", message)


async def rpc_response(service: Service, request: Request, rpc: str, message: Message) -> Any:
    """Return the response message of an RPC for a REST request. Raises InferenceError: the errors of the RPC."""
    return await service.rpcs[f"/{SERVICE}/{rpc}"].method(message, _call_of(service, request))


async def rpc_done(service: Service, request: Request, rpc: str, message: Message) -> Response:
    await rpc_response(service, request, rpc, message)
    return json_response({})


def _call_of(service: Service, request: Request) -> RpcCall:
    return RpcCall(server=service, peer=peer_of(request.scope), headers=dict(request.scope["headers"]))


def _named(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")


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


class MetricsRoute:
    """The route of the metrics, for Prometheus."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @serves(
        "GET",
        "/metrics",
        METRICS,
        RestOperation(
            "metrics",
            Tag.SERVER,
            "Everything that is measured, for Prometheus",
            DescribedAnswer("Prometheus' text format.", BodyContent(str, media_type="text/plain")),
        ),
    )
    async def answer(self, request: Request) -> Response:
        body, content_type = await self._service.metrics.method(Empty(), _call_of(self._service, request))
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})


class OpenApiRoute:
    """The route of the REST interface's description, for tools."""

    def __init__(self, service: Service, answering: Sequence[object]) -> None:
        """Describe the routes of the objects `answering`, and this one."""
        self._service = service
        self._answering = answering
        self._text: str | None = None  # the document, once it was asked for

    @serves(
        "GET",
        "/openapi.json",
        DESCRIPTION,
        RestOperation("openApi", Tag.SERVER, "This document", DescribedAnswer("OpenAPI 3.1.", BodyContent(dict[str, Any]))),
    )
    async def answer(self, _: Request) -> Response:
        if self._text is None:  # on a thread, as it takes 10 ms
            version = self._service.server_version
            self._text = dump_json(await asyncio.to_thread(openapi_document, declared_by(*self._answering, self), version))
        return json_text_response(self._text)
