"""RepositoryIndex, RepositoryModelLoad and RepositoryModelUnload.

Loading takes as long as it takes, so these are written as streams of one message each way, which on the wire is what a method
with one message each way is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos import inference_pb2 as pb
from serve.engine.errors import InvalidArgumentError, UnsupportedError
from serve.engine.inference_core import InferenceCore
from serve.engine.model import VersionState

M = TypeVar("M", bound=Message)
Answer = Callable[[AsyncIterator[Any]], AsyncIterator[Message]]
FILE_PREFIX = "file:"


class RepositoryRpcs:
    """Answers from the core."""

    def __init__(self, core: InferenceCore) -> None:
        self._core = core

    def methods(self) -> dict[str, tuple[type[Message], Answer]]:
        """Method name -> (request class, answering function)."""
        return {
            "RepositoryIndex": (pb.RepositoryIndexRequest, _one(self.index)),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, _one(self.load)),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, _one(self.unload)),
        }

    async def index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """Every model version, its state and why; with `ready`, only those that are ready."""
        _require_no_repository(request.repository_name)
        await self._core.refresh()
        entries = [
            pb.RepositoryIndexResponse.ModelIndex(name=s.name, version=s.version, state=s.state.value, reason=s.reason)
            for s in self._core.index()
            if s.state is VersionState.READY or not request.ready
        ]
        return pb.RepositoryIndexResponse(models=entries)

    async def load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        """Load or reload a model; answers once it serves.

        Parameters: "config", a ModelConfig as JSON; "file:<path in the model folder>", the content of such a file.
        """
        _require_no_repository(request.repository_name)
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, parameter in request.parameters.items():
            if name == "config":
                config = _value(name, parameter, "string_param")
            elif name.startswith(FILE_PREFIX):
                files[name.removeprefix(FILE_PREFIX)] = _value(name, parameter, "bytes_param")
            else:
                raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'config' or 'file:<path>'")
        await self._core.load(request.model_name, config, files)
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; answers once all that it had taken is answered.

        The parameter "unload_dependents" is accepted: no model here depends on another.
        """
        _require_no_repository(request.repository_name)
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                raise InvalidArgumentError(f"parameter {name!r} is not known; expected 'unload_dependents'")
            _value(name, parameter, "bool_param")
        await self._core.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


def _one(answer: Callable[[Any], Awaitable[M]]) -> Answer:
    """A method with one message each way as a stream."""

    async def stream(requests: AsyncIterator[Any]) -> AsyncIterator[Message]:
        received: list[Any] = []
        async for request in requests:  # to the end that the client gives the call
            if received:
                raise InvalidArgumentError("a second message came, expected one; this method is no stream")
            received.append(request)
        if not received:
            raise InvalidArgumentError("the call ended without a message, expected one")
        yield await answer(received[0])

    return stream


def _value(name: str, parameter: pb.ModelRepositoryParameter, kind: str) -> Any:
    given = parameter.WhichOneof("parameter_choice")
    if given != kind:
        raise InvalidArgumentError(f"parameter {name!r} is a {given or 'parameter without a value'}, expected a {kind}")
    return getattr(parameter, kind)


def _require_no_repository(name: str) -> None:
    if name:
        raise UnsupportedError(f"repository_name is {name!r}, expected ''; one repository is served here")
