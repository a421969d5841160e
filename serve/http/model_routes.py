"""Health, metadata, configuration and statistics of the server and its models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from serve.engine.errors import UnavailableError
from serve.engine.inference_core import InferenceCore
from serve.http.answers import json_answer, written_answer, written_one_by_one
from serve.http.message_json import to_json
from serve.http.rpcs import Rpcs

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"


class ModelRoutes:
    """GET requests about what is served."""

    def __init__(self, core: InferenceCore, rpcs: Rpcs) -> None:
        self._core = core
        self._rpcs = rpcs

    def routes(self) -> list[Route]:
        """All of them."""
        found = [
            Route("/v2", self.server_metadata),
            Route("/v2/", self.server_metadata),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/v2/models/stats", self.statistics),
        ]
        for path in (MODEL, VERSION):
            found += [
                Route(path, self.metadata),
                Route(f"{path}/ready", self.model_ready),
                Route(f"{path}/config", self.config),
                Route(f"{path}/stats", self.statistics),
            ]
        return found

    async def server_metadata(self, _: Request) -> Response:
        """Name, version and extensions."""
        return json_answer(to_json(await self._rpcs.call("ServerMetadata", pb.ServerMetadataRequest())))

    async def live(self, _: Request) -> Response:
        """200 as long as the process answers."""
        return json_answer(to_json(await self._rpcs.call("ServerLive", pb.ServerLiveRequest())))

    async def ready(self, _: Request) -> Response:
        """200 where requests are taken, 503 otherwise."""
        response = await self._rpcs.call("ServerReady", pb.ServerReadyRequest())
        if not response.ready:
            raise UnavailableError("the server takes no requests now; send them to another replica")
        return json_answer(to_json(response))

    async def model_ready(self, request: Request) -> Response:
        """200 where the model takes requests, 503 where it does not; 404, which the RPC cannot say, where it is not known."""
        name, version = _named(request)
        if not self._core.is_model_ready(name, version):
            raise UnavailableError(f"model {name!r} takes no requests now; send them to another replica")
        return json_answer({"name": name, "ready": True})

    async def metadata(self, request: Request) -> Response:
        """Inputs, outputs and versions of a model."""
        name, version = _named(request)
        return json_answer(to_json(await self._rpcs.call("ModelMetadata", pb.ModelMetadataRequest(name=name, version=version))))

    async def config(self, request: Request) -> Response:
        """A model's completed configuration."""
        name, version = _named(request)
        response = await self._rpcs.call("ModelConfig", pb.ModelConfigRequest(name=name, version=version))
        return json_answer(to_json(response.config))

    async def statistics(self, request: Request) -> Response:
        """Counters of a model version, of all versions, or of everything."""
        name, version = _named(request)
        response = await self._rpcs.call("ModelStatistics", pb.ModelStatisticsRequest(name=name, version=version))
        counters = await written_one_by_one(to_json(of_version) for of_version in response.model_stats)
        return written_answer(f'{{"model_stats":{counters}}}')


def _named(request: Request) -> tuple[str, str]:
    return request.path_params.get("model", ""), request.path_params.get("version", "")
