"""Reads a model's configuration from config.pbtxt or a load request, completes it, and checks it against the model file."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format, text_format

from halfserve.protos.datatypes import BY_CONFIG
from halfserve.protos.model_config_pb2 import ModelConfig
from halfserve.serve.engine.backend import KINDS, ONNX, OPENVINO_BACKEND, PYTHON, ModelInterface, ModelKind, asked_kinds
from halfserve.serve.engine.config.sequence_batching import complete_sequences
from halfserve.serve.engine.disk_files import read_regular_text
from halfserve.serve.engine.errors import InvalidArgumentError, ModelLoadError
from halfserve.serve.engine.tensors import ANY_SIZE, TensorSpec, can_reshape

logger = logging.getLogger(__name__)


A_NUMBER: Final = (1,)  # dims of a tensor without dimensions: Triton has no empty ones, nor a reshape to them
# Parts of the keys of CUDA and TensorRT provider options whose values are paths, libraries or addresses.
NAMING_FILES = ("path", "prefix", "table_name", "external", "bytestream", "user_compute_stream")
ENVIRONMENT = "EXECUTION_ENV_PATH"  # names the interpreter of a Python model
EXTENSION = "CPU_EXTENSION_PATH"  # names a library for an OpenVINO model
SOURCE = "config of the load request"
# Protobuf's words, in both of its formats.
UNKNOWN_FIELD = re.compile(r'Message type "(?P<message>[\w.]+)" has no field named "(?P<field>[^"]+)"')
# Names in `model_operations` of the installed package's operators; any other is a file in the repository.
OPERATOR_PACKAGES = frozenset({"onnxruntime_extensions", "onnxruntime-extensions", "ortextensions"})


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Settings of models whose config.pbtxt leaves them open.

    Attributes:
        max_batch_size: most rows in one batch, for models with a batch dimension.
        max_queue_delay_us: microseconds that a request may wait for others.
        max_queue_size: most requests that may wait for one model.
        max_queue_mib: most memory of these requests together, in MiB.
    """

    max_batch_size: int = 32
    max_queue_delay_us: int = 0
    max_queue_size: int = 8192
    max_queue_mib: int = 1024


@dataclass(frozen=True, kw_only=True)
class DeclaredConfig:
    """A config.pbtxt before it is completed.

    Attributes:
        message: the parsed file; empty if there is none.
        source: path of the file (or of the model file, if there is none), for error texts.
        says_batch_size: whether max_batch_size is written. proto3 does not distinguish a written 0 (no batching) from an absent
            one (the default).
        folder: folder of the files that it names; None for that of `source`.
    """

    message: ModelConfig
    source: Path
    says_batch_size: bool
    folder: Path | None = None

    @property
    def model_folder(self) -> Path:
        """The model's folder."""
        return self.source.parent if self.folder is None else self.folder


NOT_DECLARED: Final = DeclaredConfig(message=ModelConfig(), source=Path(), says_batch_size=False)  # of a model without files


def read_config(path: Path) -> DeclaredConfig:
    """Parse a config.pbtxt; an absent file is an empty configuration.

    Raises:
        ModelLoadError: the file cannot be read or parsed; the message gives line and column.
    """
    try:
        text = read_regular_text(path)
    except FileNotFoundError:
        return DeclaredConfig(message=ModelConfig(), source=path, says_batch_size=False)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(f"{path}: cannot be read: {reason}") from None
    try:
        config = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        reason = _unknown_field(str(error))
        if reason is not None:
            raise ModelLoadError(f"{path}, line {error.GetLine()}: {reason}") from None
        raise ModelLoadError(f"{path}: {error}; expected a ModelConfig in protobuf's text format") from None
    return DeclaredConfig(message=config, source=path, says_batch_size=bool(config.max_batch_size) or _says_zero(text))


def _unknown_field(error: str) -> str | None:
    """Reword protobuf's error about an unknown field, with the name that was probably meant; None for another error."""
    unknown = UNKNOWN_FIELD.search(error)
    if unknown is None:
        return None
    message = ModelConfig.DESCRIPTOR.file.pool.FindMessageTypeByName(unknown["message"])
    field, fields = unknown["field"], message.fields_by_name
    within = "" if message is ModelConfig.DESCRIPTOR else f" of {message.name}"
    inner = [name for name, known in fields.items() if known.message_type and field in known.message_type.fields_by_name]
    if inner:
        return f"{field!r} is no field{within}, but one of {inner[0]!r}; write {inner[0]} {{ {field}: ... }}"
    near = difflib.get_close_matches(field, fields, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
    return f"unknown field {field!r}{within}; {hint}"


def _says_zero(text: str) -> bool:
    """Return whether a valid text without another max_batch_size sets it to 0: only a written value replaces the 1 here."""
    return text_format.Merge(text, ModelConfig(max_batch_size=1)).max_batch_size == 0


def complete_config(declared: DeclaredConfig, interface: ModelInterface, *, name: str, defaults: Defaults) -> ModelConfig:
    """Complete a configuration from the model file, and check it against the file.

    Raises:
        ModelLoadError: a field contradicts the model file, or is not supported.
    """
    source = declared.source
    result = ModelConfig()
    result.CopyFrom(declared.message)
    if result.name not in {"", name}:
        raise ModelLoadError(
            f"{source}: name is {result.name!r}, expected the folder's name {name!r}; change it or leave it out"
        )
    if interface.kind not in asked_kinds(result):
        raise _unserved_kind(declared, interface.kind.names, f"{_names(interface.kind)} for this model file")
    _require_served_scheduling(declared)
    asks_openvino = interface.kind is ONNX and result.backend == OPENVINO_BACKEND
    result.name, result.platform = name, interface.kind.platform
    result.backend = OPENVINO_BACKEND if asks_openvino else interface.kind.backend
    if not declared.says_batch_size and not _has_whole_shapes(result, interface):
        result.max_batch_size = _usual_batch_size(interface, defaults, source)
    if result.max_batch_size < 0:
        raise ModelLoadError(f"{source}: max_batch_size is {result.max_batch_size}, expected 0 (no batching) or more")
    if result.max_batch_size and not interface.batched:
        raise ModelLoadError(
            f"{source}: max_batch_size is {result.max_batch_size}, but not every input and output of the model begins with a "
            "dimension of any size; export it with a dynamic batch dimension or set max_batch_size: 0"
        )
    if interface.most_rows is not None and result.max_batch_size > interface.most_rows:
        raise ModelLoadError(
            f"{source}: max_batch_size is {result.max_batch_size}, but the model was exported for batches of at most "
            f"{interface.most_rows}; set that or less"
        )
    batched = result.max_batch_size > 0
    unranked = interface.unranked
    _complete_tensors(result.input, interface.inputs, f"{source}: input", batched=batched, unranked=unranked)
    _complete_tensors(result.output, interface.outputs, f"{source}: output", batched=batched, unranked=unranked)
    if result.HasField("sequence_batching"):
        complete_sequences(result)
    elif result.max_batch_size and interface.kind is not PYTHON and not result.HasField("dynamic_batching"):
        result.dynamic_batching.max_queue_delay_microseconds = defaults.max_queue_delay_us
    return result


def require_served(declared: DeclaredConfig) -> None:
    """Check that a configuration asks for nothing that is unsupported for every model file.

    Raises:
        ModelLoadError: it asks for something unsupported.
    """
    if not asked_kinds(declared.message):
        served = frozenset[str]().union(*(kind.names for kind in KINDS))
        raise _unserved_kind(declared, served, ", or ".join(map(_names, KINDS)))
    _require_served_scheduling(declared)


def _unserved_kind(declared: DeclaredConfig, served: frozenset[str], expected: str) -> ModelLoadError:
    asked = [name for name in (declared.message.platform, declared.message.backend) if name]
    strange = [name for name in asked if name not in served] or asked
    return ModelLoadError(f"{declared.source}: {strange[0]!r} models are not supported, expected {expected}")


def _names(kind: ModelKind) -> str:
    return f"platform {kind.platform!r} or backend {kind.backend!r}"


def _require_served_scheduling(declared: DeclaredConfig) -> None:
    _require_cacheable(declared)
    if declared.message.HasField("ensemble_scheduling"):
        raise ModelLoadError(
            f"{declared.source}: ensemble_scheduling is not supported; set platform: 'ensemble', or use dynamic_batching"
        )


def _require_cacheable(declared: DeclaredConfig) -> None:
    config = declared.message
    if not config.response_cache.enable:
        return
    for field, has_it in (
        ("sequence_batching", config.HasField("sequence_batching")),
        ("model_transaction_policy { decoupled: true }", config.model_transaction_policy.decoupled),
    ):
        if has_it:
            raise ModelLoadError(
                f"{declared.source}: response_cache is for models with one answer that the inputs alone decide, expected no "
                f"{field}; remove one of them"
            )


def _has_whole_shapes(config: ModelConfig, interface: ModelInterface) -> bool:
    """Return whether dims include the batch dimension, as Triton reads them without a max_batch_size."""
    sizes = {spec.name: len(spec.shape) for spec in (*interface.inputs, *interface.outputs)}
    entries: tuple[Any, ...] = (*config.input, *config.output)
    return any(len(e.reshape.shape if e.HasField("reshape") else e.dims) == sizes.get(e.name) for e in entries)


def _usual_batch_size(interface: ModelInterface, defaults: Defaults, source: Path) -> int:
    if not interface.batched:
        return 0
    if len(interface.row_names) > 1:
        logger.warning(
            "%s: the first dimensions of the model's inputs and outputs are called %s, so requests are computed one by one; if "
            "they are one batch, set max_batch_size",
            source,
            ", ".join(map(repr, sorted(interface.row_names))),
        )
        return 0
    return min(defaults.max_batch_size, defaults.max_batch_size if interface.most_rows is None else interface.most_rows)


def _complete_tensors(
    declared: Any, specs: tuple[TensorSpec, ...], where: str, *, batched: bool, unranked: AbstractSet[str]
) -> None:
    entries = {entry.name: entry for entry in declared}
    known = {spec.name for spec in specs}
    if len(entries) < len(declared):
        twice = next(entry.name for entry in declared if entry is not entries[entry.name])
        raise ModelLoadError(f"{where} {twice!r} is there twice, expected each once; remove one")
    for unknown in sorted(entries.keys() - known):
        raise ModelLoadError(f"{where} {unknown!r} is not in the model, which has {', '.join(map(repr, sorted(known)))}")
    for spec in specs:
        dims = spec.shape[1:] if batched else spec.shape
        if spec.name in entries:
            _check_tensor(entries[spec.name], spec, dims, f"{where} {spec.name!r}", batched=batched)
        elif spec.name in unranked:
            raise ModelLoadError(
                f"{where} {spec.name!r} has no shape in the model, not even a rank; export the model with one, or declare "
                f"dims: {list(A_NUMBER)} where it is a single number"
            )
        else:
            declared.add(name=spec.name, data_type=spec.datatype.config, dims=dims if spec.shape else A_NUMBER)


def _check_tensor(entry: Any, spec: TensorSpec, dims: tuple[int, ...], where: str, *, batched: bool) -> None:
    if not spec.shape and not entry.dims:
        entry.dims[:] = A_NUMBER
    declared = list(entry.dims)
    if not spec.shape and set(declared) == {1} and not entry.HasField("reshape"):
        declared = []
    if min(declared, default=0) < ANY_SIZE:
        raise ModelLoadError(f"{where} has dims {declared}, expected sizes of 0 or more, or {ANY_SIZE} for any size")
    if entry.HasField("reshape"):
        declared = list(entry.reshape.shape)
        require_reshape(entry, where)
    if entry.data_type != spec.datatype.config:
        given = BY_CONFIG[entry.data_type].config_name if entry.data_type in BY_CONFIG else "no data_type"
        raise ModelLoadError(f"{where} has {given}, the model has {spec.datatype.config_name}")
    # A reshape's open sizes are the model's; others may be sizes that the model fixes.
    may_narrow = not entry.HasField("reshape")
    if len(declared) != len(dims) or any(
        m not in {d, ANY_SIZE} and not (may_narrow and d == ANY_SIZE) for d, m in zip(declared, dims, strict=True)
    ):
        hint = " (dims are without the batch dimension)" if batched else ""
        raise ModelLoadError(f"{where} has dims {declared}, the model has {list(dims)}{hint}")
    if may_narrow and ANY_SIZE in entry.dims:  # open sizes that the model fixes are replaced by the model's
        entry.dims[:] = [m if d == ANY_SIZE else d for d, m in zip(declared, dims, strict=True)]


def require_reshape(entry: Any, where: str) -> None:
    """Check the `reshape` of an input or output.

    Raises:
        ModelLoadError: tensors of its dims do not always have as many elements.
    """
    dims, own = list(entry.dims), list(entry.reshape.shape)
    if not can_reshape(dims, own):
        raise ModelLoadError(
            f"{where} has dims {dims} and reshape {own}, expected sizes of 1 or more, equally many elements, and as many "
            f"{ANY_SIZE}, with equally many elements before and between them"
        )


def client_interface(config: ModelConfig, interface: ModelInterface) -> ModelInterface:
    """Return the interface that clients see: the configuration's dims may fix open sizes, its reshapes change shapes."""
    batch = (ANY_SIZE,) if config.max_batch_size else ()

    def shown(spec: TensorSpec, entries: Any) -> TensorSpec:
        entry = next(e for e in entries if e.name == spec.name)
        own = (*batch, *entry.reshape.shape) if entry.HasField("reshape") else None
        if entry.dims and not spec.shape:  # a scalar
            own = ()
        return replace(spec, shape=(*batch, *entry.dims), model_shape=own)

    return ModelInterface(
        inputs=tuple(shown(spec, config.input) for spec in interface.inputs),
        outputs=tuple(shown(spec, config.output) for spec in interface.outputs),
        batched=interface.batched,
        kind=interface.kind,
        most_rows=interface.most_rows,
        open_ended=interface.open_ended,
    )


def config_from_json(text: str, folder: Path) -> DeclaredConfig:
    """Read a load request's ModelConfig in JSON, with the names of its .proto file or in camel case.

    Raises:
        InvalidArgumentError: the text is not JSON, or not a ModelConfig; the message gives the place.
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
        reason = _unknown_field(str(error)) or _line(error)
        raise InvalidArgumentError(f"the config of the load request is no ModelConfig: {reason}") from None
    _require_no_files(message)
    says_batch_size = bool({"max_batch_size", "maxBatchSize"} & content.keys())
    return DeclaredConfig(message=message, source=folder / SOURCE, says_batch_size=says_batch_size)


def _require_no_files(message: ModelConfig) -> None:
    """Refuse settings that name files or addresses of the server, because permission to load models does not include these."""
    for library in message.model_operations.op_library_filename:
        if library not in OPERATOR_PACKAGES:
            raise InvalidArgumentError(
                f"the config of the load request sets model_operations to {library!r}, a library on the server; expected "
                "'onnxruntime_extensions', or put it into config.pbtxt in the repository"
            )
    for key in (ENVIRONMENT, EXTENSION):
        if key in message.parameters:
            raise InvalidArgumentError(
                f"the config of the load request sets {key!r}, which names programs of the server; put it into "
                "config.pbtxt in the repository"
            )
    for accelerator in message.optimization.execution_accelerators.gpu_execution_accelerator:
        for key in accelerator.parameters:
            if any(word in key for word in NAMING_FILES):
                raise InvalidArgumentError(
                    f"the config of the load request sets {key!r} of {accelerator.name!r}, which names files or memory of the "
                    "server; remove it, or put it into config.pbtxt in the repository"
                )


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
