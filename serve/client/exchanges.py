"""What is said to a server and in which order, without any input or output.

Each function is a generator: it yields the calls to make, is sent their answers (or has their InferenceClientError thrown into
it) and returns the result. A client only carries the calls out, so that the synchronous and the asyncio client cannot differ.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos import inference_pb2 as pb
from serve.client.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServerUnavailable
from serve.client.messages import Parameter, infer_request, output_arrays
from serve.client.tensors import Array


@dataclass(frozen=True, kw_only=True)
class Call:
    """One unary RPC to make: its name, the message to send, and the class of the answer."""

    method: str
    request: Message
    answer: type[Message]


Answer = TypeVar("Answer")
Exchange = Generator[Call, Any, Answer]
MetadataCache = dict[tuple[str, str], pb.ModelMetadataResponse]


def server_live() -> Exchange[bool]:
    """False as well when nobody answers."""
    return (yield from _flag(Call(method="ServerLive", request=pb.ServerLiveRequest(), answer=pb.ServerLiveResponse), "live"))


def ready(model: str | None, version: str) -> Exchange[bool]:
    """Whether the server, or one model of it, takes requests; False as well when nobody answers or the model is unknown."""
    if model is None:
        call = Call(method="ServerReady", request=pb.ServerReadyRequest(), answer=pb.ServerReadyResponse)
    else:
        call = Call(
            method="ModelReady", request=pb.ModelReadyRequest(name=model, version=version), answer=pb.ModelReadyResponse
        )
    return (yield from _flag(call, "ready"))


def server_metadata() -> Exchange[pb.ServerMetadataResponse]:
    """Name, version and extensions."""
    answer: pb.ServerMetadataResponse = yield Call(
        method="ServerMetadata", request=pb.ServerMetadataRequest(), answer=pb.ServerMetadataResponse
    )
    return answer


def models() -> Exchange[list[pb.RepositoryIndexResponse.ModelIndex]]:
    """One entry per model and version of the repository, loaded or not."""
    answer = yield Call(method="RepositoryIndex", request=pb.RepositoryIndexRequest(), answer=pb.RepositoryIndexResponse)
    return list(answer.models)


def model_metadata(name: str, version: str) -> Exchange[pb.ModelMetadataResponse]:
    """The tensors that a model takes and gives."""
    request = pb.ModelMetadataRequest(name=name, version=version)
    answer: pb.ModelMetadataResponse = yield Call(method="ModelMetadata", request=request, answer=pb.ModelMetadataResponse)
    return answer


def model_config(name: str, version: str) -> Exchange[Any]:
    """The ModelConfig message that the model is served with."""
    request = pb.ModelConfigRequest(name=name, version=version)
    answer = yield Call(method="ModelConfig", request=request, answer=pb.ModelConfigResponse)
    return answer.config


def statistics(name: str, version: str) -> Exchange[list[pb.ModelStatistics]]:
    """Counters since each model was loaded; of all models when the name is empty."""
    request = pb.ModelStatisticsRequest(name=name, version=version)
    answer = yield Call(method="ModelStatistics", request=request, answer=pb.ModelStatisticsResponse)
    return list(answer.model_stats)


def infer_message(request: pb.ModelInferRequest) -> Exchange[pb.ModelInferResponse]:
    """A request that the caller has built, and the response as it came."""
    answer: pb.ModelInferResponse = yield Call(method="ModelInfer", request=request, answer=pb.ModelInferResponse)
    return answer


def infer(
    cache: MetadataCache,
    model: str,
    inputs: Mapping[str, Any],
    *,
    version: str,
    outputs: Sequence[str] | None,
    request_id: str,
    parameters: Mapping[str, Parameter] | None,
) -> Exchange[dict[str, Array]]:
    """Ask for the metadata once per model, then for the inference.

    A model can be replaced while the client lives, so metadata from the cache never has the last word: a request that does not
    fit it is judged again by fresh metadata, and one that the server refuses makes the client forget it.
    """
    key = (model, version)
    cached = cache.get(key)
    build = partial(
        infer_request, inputs=inputs, version=version, outputs=outputs, request_id=request_id, parameters=parameters
    )
    if cached is None:
        cache[key] = yield from model_metadata(model, version)
    try:
        request = build(cache[key])
    except InvalidRequest:
        if cached is None:
            raise
        cache[key] = yield from model_metadata(model, version)
        request = build(cache[key])
    try:
        return output_arrays((yield from infer_message(request)))
    except (InvalidRequest, ModelNotFound):
        cache.pop(key, None)
        raise


def _flag(call: Call, field: str) -> Exchange[bool]:
    try:
        answer = yield call
    except (ServerUnavailable, DeadlineExceeded, ModelNotFound):
        return False
    return bool(getattr(answer, field))
