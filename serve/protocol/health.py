"""grpc.health.v1.Health: Check and Watch, for the server as a whole (""), its inference service, and each model by name."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from serve.engine.errors import InvalidArgumentError, NotFoundError
from serve.engine.inference_core import InferenceCore

Response = health_pb2.HealthCheckResponse
RECHECK_S = 1.0


class Health:
    """Answers from the core's readiness; it keeps no state of its own."""

    SERVICE = "grpc.health.v1.Health"
    CHECK_PATH = f"/{SERVICE}/Check"
    WATCH_PATH = f"/{SERVICE}/Watch"
    request = health_pb2.HealthCheckRequest

    def __init__(self, core: InferenceCore, inference_service: str) -> None:
        self._core = core
        self._overall = {"", inference_service}

    def check(self, request: health_pb2.HealthCheckRequest) -> Message:
        """The status now.

        Raises:
            NotFoundError: neither a service nor a model has this name.
        """
        status = self._status(request.service)
        if status == Response.SERVICE_UNKNOWN:
            raise NotFoundError(f"{request.service!r} is neither a service nor a model here; '' asks for the server as a whole")
        return Response(status=status)  # type: ignore[no-any-return]  # grpc_health ships no types

    async def watch(self, requests: AsyncIterator[health_pb2.HealthCheckRequest]) -> AsyncIterator[Message]:
        """The status now and again whenever it changes, for as long as the client listens."""
        async for request in requests:
            told: int | None = None
            while True:
                changed = self._core.changed
                status = self._status(request.service)
                if status != told:
                    told = status
                    yield Response(status=status)
                # An instance that breaks, or a guard that finds fault, tells nobody; to be late by a moment does no harm. Many
                # who watch do not all look at once, which would delay requests.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RECHECK_S * random.uniform(0.5, 1.5)):  # noqa: S311  (no secret)
                        await changed.wait()
        raise InvalidArgumentError("Watch got no request; expected one HealthCheckRequest")

    def _status(self, service: str) -> int:
        if service in self._overall:
            return int(Response.SERVING if self._core.is_ready else Response.NOT_SERVING)
        if not self._core.knows(service):
            return int(Response.SERVICE_UNKNOWN)
        return int(Response.SERVING if self._core.is_model_ready(service) else Response.NOT_SERVING)
