"""Read and change what is traced and logged, while the server runs."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos import inference_pb2 as pb
from serve.engine.errors import InvalidArgumentError
from serve.http import json_fields as fields
from serve.http.answers import json_answer
from serve.http.request_body import BodyReader
from serve.http.rpcs import Rpcs

LEVELS = "trace_level"  # the one setting that has several values


class SettingsRoutes:
    """Trace settings, of all models or of one, and log settings."""

    def __init__(self, rpcs: Rpcs, bodies: BodyReader) -> None:
        self._rpcs = rpcs
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """All of them."""
        trace = ("/v2/trace/setting", "/v2/models/{model}/trace/setting")
        return [
            *(Route(path, self.trace, methods=["GET"]) for path in trace),
            *(Route(path, self.set_trace, methods=["POST"]) for path in trace),
            Route("/v2/logging", self.log, methods=["GET"]),
            Route("/v2/logging", self.set_log, methods=["POST"]),
        ]

    async def trace(self, request: Request) -> Response:
        """What is traced."""
        return await self._trace(pb.TraceSettingRequest(model_name=request.path_params.get("model", "")))

    async def set_trace(self, request: Request) -> Response:
        """Change what is traced; null gives a setting its default back."""
        message = pb.TraceSettingRequest(model_name=request.path_params.get("model", ""))
        for name, value in fields.parse_object(await self._bodies.read_small(request), empty=True).items():
            values = [] if value is None else value if isinstance(value, list) else [value]
            message.settings[name].value.extend([_text(name, entry) for entry in values])
        return await self._trace(message)

    async def log(self, _: Request) -> Response:
        """What is logged."""
        return await self._log(pb.LogSettingsRequest())

    async def set_log(self, request: Request) -> Response:
        """Change what is logged."""
        message = pb.LogSettingsRequest()
        for name, value in fields.parse_object(await self._bodies.read_small(request), empty=True).items():
            if isinstance(value, bool):
                message.settings[name].bool_param = value
            elif isinstance(value, int) and 0 <= value < 2**32:
                message.settings[name].uint32_param = value
            else:
                message.settings[name].string_param = _text(name, value)
        return await self._log(message)

    async def _trace(self, message: pb.TraceSettingRequest) -> Response:
        settings = (await self._rpcs.call("TraceSetting", message)).settings
        content: dict[str, Any] = {}
        for name, setting in sorted(settings.items()):
            values = list(setting.value)
            content[name] = values if name == LEVELS or len(values) > 1 else "".join(values)
        return json_answer(content)

    async def _log(self, message: pb.LogSettingsRequest) -> Response:
        settings = (await self._rpcs.call("LogSettings", message)).settings
        return json_answer({name: getattr(s, s.WhichOneof("parameter_choice")) for name, s in sorted(settings.items())})


def _text(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise InvalidArgumentError(f"setting {name!r} is no text or whole number, expected one")
    return str(value)
