"""Loads Python models: completes their configuration, and starts a process for each copy."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.backends.python.environment import interpreter_for
from halfserve.serve.backends.python.model_runners import ChildFailedError, ChildProcess, ModelThread, OnEvent, Runner
from halfserve.serve.backends.python.python_backend import PythonBackend, PythonModel
from halfserve.serve.backends.python.services import CopyServices, Services
from halfserve.serve.engine.backend import PYTHON, DevicePlacement, ModelInterface
from halfserve.serve.engine.config.model_config import ENVIRONMENT, DeclaredConfig
from halfserve.serve.engine.config.parameters import own_parameter
from halfserve.serve.engine.config.sequence_batching import sequence_tensors
from halfserve.serve.engine.cuda_driver import device_count
from halfserve.serve.engine.disk_files import read_regular_text
from halfserve.serve.engine.errors import MAX_TEXT, InstanceLostError, ModelLoadError, cut
from halfserve.serve.engine.model_calls import ModelCalls
from halfserve.serve.engine.repository.model_loading import OwnDeclaration, declared_interface

logger = logging.getLogger(__name__)

ISOLATION = "halfserve.python_isolation"
STRICT = "halfserve.strict_outputs"
COMPLETES = "auto_complete_config"


class PythonRuntime:
    """Runs model.py files."""

    def __init__(self) -> None:
        self._services = Services()

    def connect(self, calls: ModelCalls) -> None:
        """See `CoreUser`."""
        self._services.calls = calls
        calls.core.figures.custom_metrics = self._services.metrics.read

    def declared(self, path: Path, config: DeclaredConfig, name: str) -> OwnDeclaration:
        """See `DeclaringRuntime`."""
        completed = self._completed(path, config, name)
        # As Triton reads it: without a max_batch_size it is 0, and dims are whole shapes.
        completed = replace(completed, says_batch_size=True)
        return OwnDeclaration(completed, self._interface(path, completed))

    def _completed(self, path: Path, declared: DeclaredConfig, name: str) -> DeclaredConfig:
        """Return the configuration, completed by the model's auto_complete_config where it has one.

        Raises:
            ModelLoadError: the file cannot be read or imported, or contradicts its configuration.
        """
        try:
            text = read_regular_text(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ModelLoadError(f"{path}: cannot be read: {reason}") from None
        if COMPLETES not in text:
            return declared
        given = _for_completion(declared, name)
        copy = CopyServices(self._services, f"{name}/{path.parent.name}")
        copy.calls.is_loading = True
        child = ChildProcess(name, interpreter_for(declared.message, path), copy.handle, copy.stop)
        copy.answer = child.answer
        try:
            reply, _ = _called(child, path, {"k": "complete", "path": str(path), "config": _json(given)})
        finally:
            child.kill()
        if reply["config"] is None:
            return declared
        try:
            message = json_format.Parse(reply["config"], ModelConfig())
        except json_format.ParseError as error:
            raise ModelLoadError(f"{path}: {COMPLETES} returned no ModelConfig: {str(error).splitlines()[0]}") from None
        return DeclaredConfig(message=message, source=declared.source, says_batch_size=True)

    def _interface(self, path: Path, declared: DeclaredConfig) -> ModelInterface:
        """Return the interface that a completed configuration declares.

        Raises:
            ModelLoadError: an input or output has no datatype or dims.
        """
        config = declared.message
        if not config.output:  # as a model that only loads others, or has effects
            logger.warning(
                "%s: the Python model %s has no outputs; unless that is meant, declare inputs and outputs there or in its "
                '%s, e.g. output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }',
                *(declared.source, path.name, COMPLETES),
            )
        interface = declared_interface(declared, PYTHON)
        added_inputs, added_outputs = sequence_tensors(config)
        return replace(
            interface,
            inputs=tuple({spec.name: spec for spec in (*added_inputs, *interface.inputs)}.values()),
            outputs=tuple({spec.name: spec for spec in (*added_outputs, *interface.outputs)}.values()),
            open_ended=True,
        )

    def describe(self, path: Path) -> ModelInterface:
        """See `Runtime`; a model.py has its interface in its configuration.

        Raises:
            ModelLoadError: always.
        """
        raise ModelLoadError(f"{path}: is a Python model, which needs a model repository: <model>/<version>/{path.name}")

    def load(self, path: Path, interface: ModelInterface, placement: DevicePlacement, config: ModelConfig) -> PythonBackend:
        """Start a process with one copy.

        Raises:
            ModelLoadError: the interpreter is missing, or the model.py cannot be imported or initialized.
        """
        model = PythonModel(
            name=config.name,
            version=int(path.parent.name),
            interface=interface,
            batched=config.max_batch_size > 0,
            is_decoupled=config.model_transaction_policy.decoupled,
            path=str(path),
            has_strict_outputs=bool(own_parameter(config, STRICT, path)),
        )
        on_thread = own_parameter(config, ISOLATION, path) == "thread"
        if on_thread and ENVIRONMENT in config.parameters:
            raise ModelLoadError(
                f"{path}: {ISOLATION} is 'thread' and {ENVIRONMENT} is set, expected one of them: a thread runs the server's "
                "Python"
            )
        interpreter = interpreter_for(config, path)

        def start(on_event: OnEvent, on_end: Callable[[], None]) -> Runner:
            return ModelThread(on_event, on_end) if on_thread else ChildProcess(model.label, interpreter, on_event, on_end)

        backend = PythonBackend(model, "python thread" if on_thread else "python process", self._services, start)
        try:
            backend.load(_arguments(model, config, placement))
        except (ChildFailedError, InstanceLostError) as error:
            backend.give_up()
            raise _refused(path, error) from None
        return backend


def _called(child: ChildProcess, path: Path, header: dict[str, Any]) -> tuple[Mapping[str, Any], Any]:
    try:
        return child.call(header)
    except (ChildFailedError, InstanceLostError) as error:
        raise _refused(path, error) from None


def _refused(path: Path, error: ChildFailedError | InstanceLostError) -> ModelLoadError:
    if isinstance(error, ChildFailedError) and error.trace:
        logger.error("%s: %s", path, error, extra={"trace": error.trace})
    return ModelLoadError(cut(f"{path}: {error}", MAX_TEXT))


def _for_completion(declared: DeclaredConfig, name: str) -> ModelConfig:
    message = ModelConfig()
    message.CopyFrom(declared.message)
    message.name = message.name or name
    message.backend = PYTHON.backend
    return message


def _json(config: ModelConfig) -> str:
    """Return a configuration as Triton hands it to a model: the field names of the .proto file, defaults included, numbers as
    such.
    """
    content = json_format.MessageToDict(config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(_with_numbers(content, config.DESCRIPTOR))


def _with_numbers(content: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    """Protobuf's JSON with 64-bit integers as numbers, and not as text."""
    for name, value in content.items():
        field = descriptor.fields_by_name[name]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_value = field.message_type.fields_by_name["value"]
            if of_value.message_type is not None:
                content[name] = {key: _with_numbers(one, of_value.message_type) for key, one in value.items()}
        elif field.message_type is not None:
            many = isinstance(value, list)
            parts = [_with_numbers(one, field.message_type) for one in (value if many else [value])]
            content[name] = parts if many else parts[0]
        elif field.cpp_type in {field.CPPTYPE_INT64, field.CPPTYPE_UINT64}:
            content[name] = [int(one) for one in value] if isinstance(value, list) else int(value)
    return content


def _arguments(model: PythonModel, config: ModelConfig, placement: DevicePlacement) -> dict[str, str]:
    """Arguments of `initialize`."""
    on_gpu = placement.require_gpu or (placement.use_gpu and placement.device_id < device_count())
    return {
        "model_config": _json(config),
        "model_instance_kind": "GPU" if on_gpu else "CPU",
        "model_instance_device_id": str(placement.device_id),
        "model_repository": str(Path(model.path).parent.parent),
        "model_version": str(model.version),
        "model_name": model.name,
        "model_instance_name": f"{model.name}_0_0",
    }
