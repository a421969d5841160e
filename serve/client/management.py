"""Exchanges for health, metadata, statistics, the model repository, settings and shared memory regions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from halfserve.protos import inference_pb2 as pb
from halfserve.serve.client.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, ServerUnavailable, check_text
from halfserve.serve.client.exchange import Deadline, Exchange, Pause, UnaryRpc

READY_POLL_S = (0.02, 0.5)  # first and longest pause between two polls
LogSetting = bool | int | str
TraceSetting = str | int | float | Sequence[str] | None
CONFIG = "config"
FILE = "file:"


def server_live() -> Exchange[bool]:
    return (yield from _flag(UnaryRpc(pb.ServerLiveRequest()), "live"))


def ready(model: str | None, version: str) -> Exchange[bool]:
    """Return whether the server, or one model, takes requests; False if no server answers or the model is unknown."""
    return (yield from _flag(_ready_call(model, version), "ready"))


def wait_until_ready(model: str | None, version: str, deadline: Deadline) -> Exchange[None]:
    """Poll until the server, or one model, takes requests.
    Raises DeadlineExceeded: it was not ready before the deadline; the text gives the last reason.
    """
    call = _ready_call(model, version)
    pause_s, longest_s = READY_POLL_S
    lacking = ""
    while True:
        try:
            if (yield call).ready:
                return
            # Servers such as Triton answer "not ready" for a model that does not exist.
            lacking = "it is there, but not ready" if model is None else "it is not there, or not ready yet"
        except (ServerUnavailable, ModelNotFound) as error:
            lacking = str(error)
        except DeadlineExceeded as error:
            lacking = lacking or str(error)  # an earlier reason is more specific than the time limit
        if not deadline.allows(pause_s):
            what = "the server" if model is None else f"model {model!r}"
            raise DeadlineExceeded(f"{what} was not ready within {deadline.limit_s:.4g} s: {lacking}")
        yield Pause(pause_s)
        pause_s = min(2 * pause_s, longest_s)


def server_metadata() -> Exchange[pb.ServerMetadataResponse]:
    answer: pb.ServerMetadataResponse = yield UnaryRpc(pb.ServerMetadataRequest())
    return answer


def models(*, only_ready: bool = False) -> Exchange[list[pb.RepositoryIndexResponse.ModelIndex]]:
    """Yield one entry per model and version of the repository, loaded or not."""
    answer = yield UnaryRpc(pb.RepositoryIndexRequest(ready=only_ready))
    return list(answer.models)


def model_metadata(name: str, version: str) -> Exchange[pb.ModelMetadataResponse]:
    _check_model(name, version)
    answer: pb.ModelMetadataResponse = yield UnaryRpc(pb.ModelMetadataRequest(name=name, version=version))
    return answer


def model_config(name: str, version: str) -> Exchange[Any]:
    _check_model(name, version)
    answer = yield UnaryRpc(pb.ModelConfigRequest(name=name, version=version))
    return answer.config


def statistics(name: str, version: str) -> Exchange[list[pb.ModelStatistics]]:
    """Counters since each model was loaded; of all models when the name is empty."""
    _check_model(name, version)
    answer = yield UnaryRpc(pb.ModelStatisticsRequest(name=name, version=version))
    return list(answer.model_stats)


def _check_model(name: str, version: str) -> None:
    check_text(name, "a model's name")
    check_text(version, f"the version of model {name!r}")


def _ready_call(model: str | None, version: str) -> UnaryRpc:
    if model is None:
        return UnaryRpc(pb.ServerReadyRequest())
    _check_model(model, version)
    return UnaryRpc(pb.ModelReadyRequest(name=model, version=version))


def _flag(call: UnaryRpc, field: str) -> Exchange[bool]:
    try:
        answer = yield call
    except (ServerUnavailable, DeadlineExceeded, ModelNotFound):
        return False
    return bool(getattr(answer, field))


def load_model(name: str, config: Mapping[str, Any] | str | None, files: Mapping[str, bytes] | None) -> Exchange[None]:
    """Load or reload a model; see `Client.load_model`."""
    if files and config is None:
        raise InvalidRequest("files of a model to load need a config beside them; give both, or neither")
    request = pb.RepositoryModelLoadRequest(model_name=_named(name))
    if config is not None:
        request.parameters[CONFIG].string_param = _json_object(config)
    for path, content in (files or {}).items():
        check_text(path, "the path of a model's file")
        if not isinstance(content, bytes):
            raise InvalidRequest(f"file {path!r} of a model to load must be bytes, not {type(content).__name__}")
        request.parameters[FILE + path].bytes_param = content
    # Idempotent: a repeated load costs time and memory, but has the same outcome.
    yield UnaryRpc(request)


def unload_model(name: str, *, dependents: bool) -> Exchange[None]:
    request = pb.RepositoryModelUnloadRequest(model_name=_named(name))
    request.parameters["unload_dependents"].bool_param = dependents
    yield UnaryRpc(request)


def log_settings(changes: Mapping[str, LogSetting]) -> Exchange[dict[str, LogSetting]]:
    """Change some settings of the server's log, and return all of them."""
    request = pb.LogSettingsRequest()
    for name, value in changes.items():
        setting = request.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int) and 0 <= value < 2**32:
            setting.uint32_param = value
        elif isinstance(value, str):
            check_text(value, f"log setting {name!r}")
            setting.string_param = value
        else:
            raise InvalidRequest(f"log setting {name!r} must be a bool, a whole number of 0 or more, or text, not {value!r}")
    answer = yield UnaryRpc(request)
    chosen = {name: (setting, setting.WhichOneof("parameter_choice")) for name, setting in sorted(answer.settings.items())}
    return {name: getattr(setting, choice) for name, (setting, choice) in chosen.items() if choice is not None}


def trace_settings(model: str, changes: Mapping[str, TraceSetting]) -> Exchange[dict[str, list[str]]]:
    """Change some settings of the server's tracing, of all models or of one, and return all; None clears a setting."""
    check_text(model, "a model's name")
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in changes.items():
        values = [] if value is None else [value] if isinstance(value, str | int | float) else list(value)
        texts = [str(one) for one in values]
        check_text("".join(texts), f"trace setting {name!r}")
        request.settings[name].value.extend(texts)
    answer = yield UnaryRpc(request)
    return {name: list(setting.value) for name, setting in sorted(answer.settings.items())}


def register_region(name: str, key: str, byte_size: int) -> Exchange[None]:
    # Not idempotent: the second call would find the name taken.
    yield UnaryRpc(pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size), idempotent=False)


def unregister_region(name: str) -> Exchange[None]:
    yield UnaryRpc(pb.SystemSharedMemoryUnregisterRequest(name=name))


def register_cuda_region(name: str, handle: bytes, byte_size: int, device_id: int) -> Exchange[None]:
    try:
        request = pb.CudaSharedMemoryRegisterRequest(name=name, raw_handle=handle, byte_size=byte_size, device_id=device_id)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"no CUDA region can be registered with that: {error}; expected a name, the 64 bytes of a cudaIpcMemHandle_t, and "
            "whole numbers"
        ) from None
    yield UnaryRpc(request, idempotent=False)


def unregister_cuda_region(name: str) -> Exchange[None]:
    yield UnaryRpc(pb.CudaSharedMemoryUnregisterRequest(name=name))


def regions() -> Exchange[dict[str, pb.SystemSharedMemoryStatusResponse.RegionStatus]]:
    answer = yield UnaryRpc(pb.SystemSharedMemoryStatusRequest())
    return dict(answer.regions)


def _named(name: str) -> str:
    check_text(name, "a model's name")
    if not name:
        raise InvalidRequest("the model has no name; expected that of a folder in the server's model repository")
    return name


def _json_object(config: Mapping[str, Any] | str) -> str:
    text = config if isinstance(config, str) else json.dumps(dict(config))
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the model's config is no JSON: {error.msg} at {error.pos}; expected a ModelConfig object"
        ) from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"the model's config must be a JSON object with a ModelConfig's fields, not {text[:40]}")
    return text
