"""A configuration that comes with a load request, as JSON, in place of a config.pbtxt."""

from __future__ import annotations

import json
from pathlib import Path

from google.protobuf import json_format

from protos.model_config_pb2 import ModelConfig
from serve.engine.configuration.config import DeclaredConfig
from serve.engine.errors import InvalidArgumentError

# In keys of the CUDA and TensorRT providers whose values are paths, libraries to load, or addresses.
NAMING_FILES = ("path", "prefix", "table_name", "external", "bytestream", "user_compute_stream")
SOURCE = "config of the load request"


def config_from_json(text: str, folder: Path) -> DeclaredConfig:
    """Read a ModelConfig in JSON, with the names of its .proto file or in camel case.

    Args:
        text: the JSON.
        folder: of the model, where the configuration's label files lie.

    Raises:
        InvalidArgumentError: it is no JSON, or no ModelConfig; the text says where.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the config of the load request is no JSON: {_line(error)}") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError("the config of the load request is no JSON object; expected a ModelConfig's fields")
    try:
        message = json_format.ParseDict(content, ModelConfig())
    except (json_format.ParseError, RecursionError, ValueError, TypeError) as error:
        raise InvalidArgumentError(f"the config of the load request is no ModelConfig: {_line(error)}") from None
    _require_no_files(message)
    says_batch_size = bool({"max_batch_size", "maxBatchSize"} & content.keys())
    return DeclaredConfig(message=message, source=folder / SOURCE, says_batch_size=says_batch_size)


def _require_no_files(message: ModelConfig) -> None:
    """Who may load models decides about them, and not about files and addresses of the server."""
    for accelerator in message.optimization.execution_accelerators.gpu_execution_accelerator:
        for key in accelerator.parameters:
            if any(word in key for word in NAMING_FILES):
                raise InvalidArgumentError(
                    f"the config of the load request sets {key!r} of {accelerator.name!r}, which names files or memory of the "
                    "server; remove it, or put it into config.pbtxt in the repository"
                )


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
