"""The RPCs that tell and change what is traced and logged."""

from __future__ import annotations

from protos import inference_pb2 as pb
from serve.engine.errors import InvalidArgumentError
from serve.engine.inference_core import InferenceCore
from serve.observability.log_settings import Value
from serve.observability.observability import Observability
from serve.observability.span_exporters import OTLP

MOST = 64  # settings of one request: more than there are


class SettingsRpcs:
    """TraceSetting and LogSettings: without changes they tell what is set."""

    def __init__(self, core: InferenceCore, observability: Observability) -> None:
        self._core = core
        self._observability = observability

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Of a model, or the global ones; a model without settings of its own follows those.

        Raises:
            NotFoundError: no such model.
            InvalidArgumentError: no such setting, or not such a value; nothing has been changed.
            FailedPreconditionError: traces have nowhere to go.
        """
        _check_count(len(request.settings))
        if request.model_name:
            self._core.versions(request.model_name)
        changes = {name: list(setting.value) for name, setting in request.settings.items()}
        self._observability.update_traces(request.model_name, changes)
        to = self._observability.trace_to
        values = self._observability.traces.of(request.model_name).as_values()
        # Where on this machine the file is, is not a client's business.
        values |= {"trace_mode": ["opentelemetry"], "trace_file": [to if to in {"", OTLP} else "file"]}
        response = pb.TraceSettingResponse()
        for name, value in values.items():
            response.settings[name].value.extend(value)
        return response

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """What is logged, after the changes.

        Raises:
            InvalidArgumentError: no such setting, or not such a value; nothing has been changed.
        """
        _check_count(len(request.settings))
        changes = {name: _given(name, setting) for name, setting in request.settings.items()}
        self._observability.update_logs(changes)
        response = pb.LogSettingsResponse()
        for name, value in self._observability.logs.as_values().items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response


def _check_count(count: int) -> None:
    """Before each of them is looked at: a message has room for hundreds of thousands."""
    if count > MOST:
        raise InvalidArgumentError(f"{count} settings are given, expected at most {MOST}: there are not that many")


def _given(name: str, setting: pb.LogSettingsRequest.SettingValue) -> Value:
    kind = setting.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgumentError(f"{name} has no value, expected a bool, a number or a text")
    value: Value = getattr(setting, kind)
    return value
