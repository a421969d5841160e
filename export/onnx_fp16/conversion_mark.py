"""The mark in a converted model's metadata, by which the converter recognizes its own work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

import onnx_ir
from onnx_ir import AttributeType

from halfserve.export.conversion_settings import ConversionSettings
from halfserve.export.onnx_fp16.graph import all_graphs

CONVERTED = "halfserve.converted"
_BY, _SETTINGS, _GRAPH = f"{CONVERTED}.by", f"{CONVERTED}.settings", f"{CONVERTED}.graph"
_SIMPLE_ATTRIBUTES = frozenset(AttributeType[name] for name in ("FLOAT", "FLOATS", "INT", "INTS", "STRING", "STRINGS"))

_ALWAYS = ("keep_io_types", "keep_fp32_ops", "keep_fp32_nodes", "repair")
_OF_OWN_RULES = ("dtype", "target_device", "upgrade_opset")  # the opset is in the graph's fingerprint


def mark(model: onnx_ir.Model, settings: ConversionSettings) -> None:
    """Write version, settings and the graph's fingerprint into the metadata of a converted model."""
    model.metadata_props[CONVERTED] = settings.half.name
    model.metadata_props[_BY] = f"halfserve {installed_version()}"
    model.metadata_props[_SETTINGS] = summary(settings)
    model.metadata_props[_GRAPH] = fingerprint(model)


def summary(settings: ConversionSettings) -> str:
    """Return all settings but the type in one line, the same for equal ones; targets "any" and "cpu" are one for float16.

    A field that is neither of the four first nor has a rule of its own is shown where it is not the default, so that the marks
    of older versions, which did not know it, stay valid.
    """
    parts = [f"{name}={_shown(getattr(settings, name))}" for name in _ALWAYS]
    if settings.half.has_float32_range or settings.target_device == "cuda":
        parts.append(f"target={settings.target_device}")
    others = (field for field in fields(ConversionSettings) if field.name not in {*_ALWAYS, *_OF_OWN_RULES})
    values = ((field, getattr(settings, field.name)) for field in others)
    return " ".join([*parts, *(f"{field.name}={_shown(value)}" for field, value in values if value != field.default)])


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def is_marked(model: onnx_ir.Model, settings: ConversionSettings) -> bool:
    """Return whether a conversion with these settings made the model, and its graph has not changed since."""
    props = model.metadata_props
    return (
        props.get(CONVERTED) == settings.half.name
        and props.get(_SETTINGS) == summary(settings)
        and props.get(_GRAPH) == fingerprint(model)
    )


def fingerprint(model: onnx_ir.Model) -> str:
    """Return SHA-256 of the graph's structure and types, without names of nodes, metadata and weights' numbers."""
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
    """Return the version of halfserve; "unknown" in a source tree that is not installed."""
    try:
        return version("halfserve")
    except PackageNotFoundError:
        return "unknown"
