"""The user's settings, what stays float32, and the mark by which the converter recognizes its own work."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version

import onnx
import onnx_ir
from onnx_ir import AttributeType

from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import FP16, HalfType, TargetDevice
from halfserve.export.onnx_fp16.graph import all_graphs, all_nodes, nodes_within

_WILDCARDS = frozenset("*?[")
CONVERTED = "halfserve.converted"
_BY, _SETTINGS, _GRAPH = f"{CONVERTED}.by", f"{CONVERTED}.settings", f"{CONVERTED}.graph"
_SIMPLE_ATTRIBUTES = frozenset(AttributeType[name] for name in ("FLOAT", "FLOATS", "INT", "INTS", "STRING", "STRINGS"))


@dataclass(frozen=True, kw_only=True)
class ConversionSettings:
    """The settings of one conversion.

    Attributes:
        keep_io_types: True: inputs and outputs keep their types; False: they become half precision; or names and patterns of
            inputs and outputs to keep.
        keep_fp32_ops: Operators, or patterns, that stay float32.
        keep_fp32_nodes: Nodes, or patterns, that stay float32.
        repair: Whether to first rewrite operations that would exceed the half type.
        half: The type to convert to.
        target_device: Where the model shall run; "any" stands for both. ONNX Runtime refuses a bfloat16 node without a kernel
            on CUDA; on CPUs the server computes bfloat16 models in float32. "cuda" spells out SiLU for its kernels.
    """

    keep_io_types: bool | tuple[str, ...] = True
    keep_fp32_ops: tuple[str, ...] = ()
    keep_fp32_nodes: tuple[str, ...] = ()
    repair: bool = True
    half: HalfType = FP16
    target_device: TargetDevice = "any"

    @property
    def needs_cuda_kernels(self) -> bool:
        """Whether a node without a CUDA kernel for the half type must stay float32: casts are added around float16 alone."""
        return self.half.has_float32_range and self.target_device != "cpu"

    def keeps(self, name: str | None) -> bool:
        """Whether the input or output of this name keeps its type."""
        if isinstance(self.keep_io_types, bool):
            return self.keep_io_types
        return any(fnmatchcase(name or "", pattern) for pattern in self.keep_io_types)

    def summary(self) -> str:
        """All settings but the type in one line, the same for equal ones; targets "any" and "cpu" are one for float16."""
        kept = self.keep_io_types if isinstance(self.keep_io_types, bool) else ",".join(self.keep_io_types)
        return (
            f"keep_io_types={kept} keep_fp32_ops={','.join(self.keep_fp32_ops)} "
            f"keep_fp32_nodes={','.join(self.keep_fp32_nodes)} repair={self.repair}"
            f"{f' target={self.target_device}' if self.half.has_float32_range or self.target_device == 'cuda' else ''}"
        )


def settings_of(
    keep_io_types: bool | Collection[str],
    keep_fp32_ops: Collection[str] | None,
    keep_fp32_nodes: Collection[str] | None,
    repair: bool,
    half: HalfType = FP16,
    target_device: TargetDevice = "any",
) -> ConversionSettings:
    """The settings with sorted lists, so that equal settings compare equal."""
    return ConversionSettings(
        keep_io_types=keep_io_types if isinstance(keep_io_types, bool) else _sorted(keep_io_types),
        keep_fp32_ops=_sorted(keep_fp32_ops),
        keep_fp32_nodes=_sorted(keep_fp32_nodes),
        repair=repair,
        half=half,
        target_device=target_device,
    )


def _sorted(names: Collection[str] | None) -> tuple[str, ...]:
    return tuple(sorted({names} if isinstance(names, str) else set(names or ())))


class ModelNames:
    """The names in a model, before and after it is prepared: a list may name what inlining or a repair removes."""

    def __init__(self, model: onnx_ir.Model) -> None:
        self.operators: set[str] = set()
        self.nodes: set[str] = set()
        self.interface = {value.name or "" for value in (*model.graph.inputs, *model.graph.outputs)}
        self.add(model)

    def add(self, model: onnx_ir.Model) -> None:
        """Add a model's names, those in its functions included."""
        functions = (node for function in model.functions.values() for node in nodes_within(function.graph))
        for node in (*all_nodes(model), *functions):
            self.operators |= {node.op_type, _qualified(node)}
            self.nodes.add(node.name or "")


def require_known(known: ModelNames, settings: ConversionSettings) -> None:
    """Check that every entry of the lists matches a name, so that a typing error is noticed.

    An operator that ONNX has and this model does not use is accepted: one list may serve several models.

    Raises:
        ExportError: An entry matches nothing; the text suggests the nearest name.
    """
    existing = {schema.name for schema in onnx.defs.get_all_schemas()} if settings.keep_fp32_ops else set()
    _require(settings.keep_fp32_ops, known.operators, known.operators | existing, "keep_fp32_ops", "operator")
    _require(settings.keep_fp32_nodes, known.nodes, known.nodes, "keep_fp32_nodes", "node")
    if not isinstance(settings.keep_io_types, bool):
        _require(settings.keep_io_types, known.interface, known.interface, "keep_io_types", "input or output")


def keep_reason(node: onnx_ir.Node, settings: ConversionSettings) -> str | None:
    """The reason for which the settings keep a node in float32; None where they do not."""
    for pattern in settings.keep_fp32_nodes:
        if _matches(pattern, node.name or ""):
            return "in keep_fp32_nodes" if pattern == node.name else f"matches {pattern!r} in keep_fp32_nodes"
    for pattern in settings.keep_fp32_ops:
        if _matches(pattern, node.op_type) or _matches(pattern, _qualified(node)):
            return f"{node.op_type} is in keep_fp32_ops"
    return None


def _qualified(node: onnx_ir.Node) -> str:
    return f"{node.domain}:{node.op_type}" if node.domain else node.op_type


def _matches(pattern: str, name: str) -> bool:
    return pattern == name or fnmatchcase(name, pattern)


def _require(patterns: Collection[str], present: Collection[str], allowed: Collection[str], where: str, what: str) -> None:
    for pattern in patterns:
        if pattern in allowed or any(_matches(pattern, name) for name in present):
            continue
        kind = "pattern" if _WILDCARDS & set(pattern) else what
        near = difflib.get_close_matches(pattern, sorted(allowed), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "; the model has none" if not present else ""
        raise ExportError(f"{where}: the {kind} {pattern!r} matches no {what} of the model{hint}")


def mark(model: onnx_ir.Model, settings: ConversionSettings) -> None:
    """Write version, settings and the graph's fingerprint into the metadata of a converted model."""
    model.metadata_props[CONVERTED] = settings.half.name
    model.metadata_props[_BY] = f"halfserve {installed_version()}"
    model.metadata_props[_SETTINGS] = settings.summary()
    model.metadata_props[_GRAPH] = fingerprint(model)


def is_marked(model: onnx_ir.Model, settings: ConversionSettings) -> bool:
    """Whether a conversion with these settings made the model, and its graph has not changed since."""
    props = model.metadata_props
    return (
        props.get(CONVERTED) == settings.half.name
        and props.get(_SETTINGS) == settings.summary()
        and props.get(_GRAPH) == fingerprint(model)
    )


def fingerprint(model: onnx_ir.Model) -> str:
    """SHA-256 of the graph's structure and types, without names of nodes, metadata and weights' numbers."""
    digest = hashlib.sha256()
    for domain, number in sorted(model.opset_imports.items()):
        digest.update(f"{domain}={number};".encode())
    for graph in all_graphs(model):
        for line in _lines(graph):
            digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _lines(graph: onnx_ir.Graph) -> Iterator[str]:
    for value in (*graph.inputs, *graph.outputs):
        yield f"{value.name}:{value.type}"
    for value in graph.initializers.values():
        tensor = value.const_value
        yield f"{value.name}={_tensor(tensor) if tensor is not None else ''}"
    for node in graph:
        inputs = ",".join(value.name or "" if value is not None else "" for value in node.inputs)
        outputs = ",".join(value.name or "" for value in node.outputs).rstrip(",")  # files leave out absent outputs at the end
        attributes = ",".join(_attribute(attribute) for _, attribute in sorted(node.attributes.items()))
        yield f"{node.domain}:{node.op_type}({inputs})->({outputs})[{attributes}]"


def _attribute(attribute: onnx_ir.Attr) -> str:
    if attribute.is_ref():
        return f"{attribute.name}=@{attribute.ref_attr_name}"
    if attribute.type == AttributeType.TENSOR:
        return f"{attribute.name}={_tensor(attribute.as_tensor())}"
    return (
        f"{attribute.name}={attribute.value!r}"
        if attribute.type in _SIMPLE_ATTRIBUTES
        else f"{attribute.name}:{attribute.type.name}"
    )


def _tensor(tensor: onnx_ir.TensorProtocol) -> str:
    return f"{tensor.dtype.name}{list(tensor.shape.numpy())}"


def installed_version() -> str:
    """The version of halfserve; "unknown" in a source tree that is not installed."""
    try:
        return version("halfserve")
    except PackageNotFoundError:
        return "unknown"
