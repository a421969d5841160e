"""What is asked about a server and its models, and in which order; see `serve.client.exchanges.calls`."""

from __future__ import annotations

from typing import Any

from protos import inference_pb2 as pb
from serve.client.checks import check_text
from serve.client.errors import DeadlineExceeded, ModelNotFound, ServerUnavailable
from serve.client.exchanges.calls import Call, Exchange, Pause
from serve.client.exchanges.deadline import Deadline

READY_POLL_S = (0.02, 0.5)  # the first pause between two questions and the longest


def server_live() -> Exchange[bool]:
    """False as well when nobody answers."""
    return (yield from _flag(Call(method="ServerLive", request=pb.ServerLiveRequest(), answer=pb.ServerLiveResponse), "live"))


def ready(model: str | None, version: str) -> Exchange[bool]:
    """Whether the server, or one model of it, takes requests; False as well when nobody answers or the model is unknown."""
    return (yield from _flag(_ready_call(model, version), "ready"))


def wait_until_ready(model: str | None, version: str, deadline: Deadline) -> Exchange[None]:
    """Ask again and again until the server, or one model of it, takes requests.

    Raises:
        DeadlineExceeded: it did not before the deadline; the text says what it lacked at last.
    """
    call = _ready_call(model, version)
    pause_s, longest_s = READY_POLL_S
    lacking = ""
    while True:
        try:
            if (yield call).ready:
                return
            # Of a model that is not there a server says, as Triton's do, that it is not ready.
            lacking = "it is there, but not ready" if model is None else "it is not there, or not ready yet"
        except (ServerUnavailable, ModelNotFound) as error:
            lacking = str(error)
        except DeadlineExceeded as error:
            lacking = lacking or str(error)  # what was lacking before the time ran out says more
        if not deadline.allows(pause_s):
            what = "the server" if model is None else f"model {model!r}"
            raise DeadlineExceeded(f"{what} was not ready within {deadline.limit_s:.4g} s: {lacking}")
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def server_metadata() -> Exchange[pb.ServerMetadataResponse]:
    """Name, version and extensions."""
    answer: pb.ServerMetadataResponse = yield Call(
        method="ServerMetadata", request=pb.ServerMetadataRequest(), answer=pb.ServerMetadataResponse
    )
    return answer


def models(*, only_ready: bool = False) -> Exchange[list[pb.RepositoryIndexResponse.ModelIndex]]:
    """One entry per model and version of the repository, loaded or not."""
    request = pb.RepositoryIndexRequest(ready=only_ready)
    answer = yield Call(method="RepositoryIndex", request=request, answer=pb.RepositoryIndexResponse)
    return list(answer.models)


def model_metadata(name: str, version: str) -> Exchange[pb.ModelMetadataResponse]:
    """The tensors that a model takes and gives."""
    _check_model(name, version)
    request = pb.ModelMetadataRequest(name=name, version=version)
    answer: pb.ModelMetadataResponse = yield Call(method="ModelMetadata", request=request, answer=pb.ModelMetadataResponse)
    return answer


def model_config(name: str, version: str) -> Exchange[Any]:
    """The ModelConfig message that the model is served with."""
    _check_model(name, version)
    request = pb.ModelConfigRequest(name=name, version=version)
    answer = yield Call(method="ModelConfig", request=request, answer=pb.ModelConfigResponse)
    return answer.config


def statistics(name: str, version: str) -> Exchange[list[pb.ModelStatistics]]:
    """Counters since each model was loaded; of all models when the name is empty."""
    _check_model(name, version)
    request = pb.ModelStatisticsRequest(name=name, version=version)
    answer = yield Call(method="ModelStatistics", request=request, answer=pb.ModelStatisticsResponse)
    return list(answer.model_stats)


def _check_model(name: str, version: str) -> None:
    check_text(name, "a model's name")
    check_text(version, f"the version of model {name!r}")


def _ready_call(model: str | None, version: str) -> Call:
    if model is None:
        return Call(method="ServerReady", request=pb.ServerReadyRequest(), answer=pb.ServerReadyResponse)
    _check_model(model, version)
    request = pb.ModelReadyRequest(name=model, version=version)
    return Call(method="ModelReady", request=request, answer=pb.ModelReadyResponse)


def _flag(call: Call, field: str) -> Exchange[bool]:
    try:
        answer = yield call
    except (ServerUnavailable, DeadlineExceeded, ModelNotFound):
        return False
    return bool(getattr(answer, field))
