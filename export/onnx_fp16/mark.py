"""The mark that a conversion leaves in a model's metadata, by which the converter knows its own work again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import onnx_ir
from onnx_ir import AttributeType

from export.onnx_fp16.graph_walk import all_graphs
from export.onnx_fp16.settings import Settings

CONVERTED = "halfserve.converted"
_BY, _SETTINGS, _GRAPH = f"{CONVERTED}.by", f"{CONVERTED}.settings", f"{CONVERTED}.graph"


def mark(model: onnx_ir.Model, settings: Settings) -> None:
    """Write into the metadata that the model is float16 now, by which version and settings, and the graph's fingerprint."""
    model.metadata_props[CONVERTED] = "float16"
    model.metadata_props[_BY] = f"halfserve {_version()}"
    model.metadata_props[_SETTINGS] = settings.summary()
    model.metadata_props[_GRAPH] = fingerprint(model)


def is_marked(model: onnx_ir.Model, settings: Settings) -> bool:
    """Whether the model is what a conversion with these settings left: marked, and its graph untouched since."""
    props = model.metadata_props
    return (
        props.get(CONVERTED) == "float16"
        and props.get(_SETTINGS) == settings.summary()
        and props.get(_GRAPH) == fingerprint(model)
    )


def fingerprint(model: onnx_ir.Model) -> str:
    """SHA-256 of the graph's structure and types, without names of nodes, metadata and the weights' numbers."""
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
        outputs = ",".join(value.name or "" for value in node.outputs).rstrip(",")  # files leave out absent ones at the end
        attributes = ",".join(_attribute(attribute) for _, attribute in sorted(node.attributes.items()))
        yield f"{node.domain}:{node.op_type}({inputs})->({outputs})[{attributes}]"


def _attribute(attribute: onnx_ir.Attr) -> str:
    if attribute.is_ref():
        return f"{attribute.name}=@{attribute.ref_attr_name}"
    if attribute.type == AttributeType.TENSOR:
        return f"{attribute.name}={_tensor(attribute.as_tensor())}"
    simple = (
        AttributeType.FLOAT,
        AttributeType.FLOATS,
        AttributeType.INT,
        AttributeType.INTS,
        AttributeType.STRING,
        AttributeType.STRINGS,
    )
    return f"{attribute.name}={attribute.value!r}" if attribute.type in simple else f"{attribute.name}:{attribute.type.name}"


def _tensor(tensor: onnx_ir.TensorProtocol) -> str:
    return f"{tensor.dtype.name}{list(tensor.shape.numpy())}"


def _version() -> str:
    try:
        return version("halfserve")
    except PackageNotFoundError:
        return "unknown"
