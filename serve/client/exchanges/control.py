"""What changes a server: models loaded and unloaded, shared memory registered, logging and tracing set."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from protos import inference_pb2 as pb
from serve.client.checks import check_text
from serve.client.errors import InvalidRequest
from serve.client.exchanges.calls import Call, Exchange

LogSetting = bool | int | str
TraceSetting = str | int | float | Sequence[str] | None
CONFIG = "config"
FILE = "file:"


def load_model(name: str, config: Mapping[str, Any] | str | None, files: Mapping[str, bytes] | None) -> Exchange[None]:
    """Load a model, or load it anew.

    Args:
        name: the model's.
        config: overrides its config.pbtxt: the JSON form of ModelConfig, as text or as what json.loads makes of it.
        files: override the model's files: path in the model's folder, such as "1/model.onnx" -> content. They need a config.
    """
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
    # A second load would load the same thing twice, which costs time and memory, but the outcome is the same.
    yield Call(method="RepositoryModelLoad", request=request, answer=pb.RepositoryModelLoadResponse)


def unload_model(name: str, *, dependents: bool) -> Exchange[None]:
    """Stop serving a model; `dependents` too, if asked for."""
    request = pb.RepositoryModelUnloadRequest(model_name=_named(name))
    request.parameters["unload_dependents"].bool_param = dependents
    yield Call(method="RepositoryModelUnload", request=request, answer=pb.RepositoryModelUnloadResponse)


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
    answer = yield Call(method="LogSettings", request=request, answer=pb.LogSettingsResponse)
    chosen = {name: (setting, setting.WhichOneof("parameter_choice")) for name, setting in sorted(answer.settings.items())}
    return {name: getattr(setting, choice) for name, (setting, choice) in chosen.items() if choice is not None}


def trace_settings(model: str, changes: Mapping[str, TraceSetting]) -> Exchange[dict[str, list[str]]]:
    """Change some settings of the server's tracing, of all models or of one, and return all of them; None clears a setting."""
    check_text(model, "a model's name")
    request = pb.TraceSettingRequest(model_name=model)
    for name, value in changes.items():
        values = [] if value is None else [value] if isinstance(value, str | int | float) else list(value)
        texts = [str(one) for one in values]
        check_text("".join(texts), f"trace setting {name!r}")
        request.settings[name].value.extend(texts)
    answer = yield Call(method="TraceSetting", request=request, answer=pb.TraceSettingResponse)
    return {name: list(setting.value) for name, setting in sorted(answer.settings.items())}


def register_region(name: str, key: str, byte_size: int) -> Exchange[None]:
    """Tell the server of a shared memory object."""
    request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=byte_size)
    # Not idempotent: the second call would find the name taken.
    yield Call(
        method="SystemSharedMemoryRegister", request=request, answer=pb.SystemSharedMemoryRegisterResponse, idempotent=False
    )


def unregister_region(name: str) -> Exchange[None]:
    """Make the server forget a shared memory object."""
    request = pb.SystemSharedMemoryUnregisterRequest(name=name)
    yield Call(method="SystemSharedMemoryUnregister", request=request, answer=pb.SystemSharedMemoryUnregisterResponse)


def regions() -> Exchange[dict[str, pb.SystemSharedMemoryStatusResponse.RegionStatus]]:
    """What is registered, by name."""
    answer = yield Call(
        method="SystemSharedMemoryStatus",
        request=pb.SystemSharedMemoryStatusRequest(),
        answer=pb.SystemSharedMemoryStatusResponse,
    )
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
