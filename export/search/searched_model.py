"""The model that a search works on: repaired, with named nodes and known types, as the converter sees it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import onnx
import onnx_ir

from halfserve.export.conversion_settings import PipelineSettings
from halfserve.export.onnx_files.model_file import densify, open_model
from halfserve.export.onnx_fp16.conversion_report import float_nodes
from halfserve.export.onnx_fp16.graph import all_graphs, all_nodes, bodies, is_float
from halfserve.export.onnx_fp16.opset_upgrade import upgrade_opset
from halfserve.export.onnx_fp16.prepare import prepare, repair_model


@dataclass(frozen=True, kw_only=True)
class SearchedNode:
    """A node of the main graph, including its bodies, that computes on floats.

    The torch module, the source line and the torch operation ("aten::linear") that it comes from are those of the model's
    metadata. `weight_bytes` is the number of bytes that its weights save in float16.
    """

    name: str
    op_type: str
    module: str | None
    source: str | None
    op: str | None
    weight_bytes: int


@dataclass(frozen=True, kw_only=True)
class SearchedModel:
    """A float32 model, ready to be searched.

    Attributes:
        original: The given model, from which conversions start; its opset is raised already where the settings ask for it.
        prepared: The repaired model, whose nodes are searched.
        floats: Names of all float32 tensors in `prepared`, including bodies.
        nodes: The main graph's float nodes by name, in the graph's order.
        settings: Settings of the conversions, whose opset is raised already.
        made: Names of the nodes in `prepared` that repairs made.
    """

    original: onnx.ModelProto
    prepared: onnx.ModelProto
    floats: frozenset[str]
    nodes: dict[str, SearchedNode] = field(default_factory=dict)
    settings: PipelineSettings
    made: frozenset[str] = frozenset()

    def present(self, names: Collection[str]) -> list[str]:
        """Return the names that exist in the model when a conversion keeps all of them.

        A repair skips kept nodes, so a node that it would have made, such as a Clip before a cube, is then absent.
        """
        if not self.made.intersection(names):
            return sorted(names)
        repaired = onnx_ir.from_proto(self.original)
        repair_model(repaired, replace(self.settings, keep_fp32_nodes=(*self.settings.keep_fp32_nodes, *names)))
        found = {node.name for node in all_nodes(repaired)}
        return sorted(name for name in names if name in found or name not in self.made)


def searched_model(model: onnx.ModelProto | onnx_ir.Model, settings: PipelineSettings) -> SearchedModel:
    """Prepare a copy of a model as `convert` does before it converts.

    Raises:
        ExportError: The model is invalid, too large for one message, or cannot be prepared.
    """
    original = onnx.ModelProto()
    given = open_model(model if isinstance(model, onnx.ModelProto) else onnx_ir.to_proto(model)).proto
    if settings.upgrade_opset:
        raised = onnx_ir.from_proto(given)
        upgrade_opset(raised, settings)
        given, settings = onnx_ir.to_proto(raised), replace(settings, upgrade_opset=False)
    original.CopyFrom(given)
    densify(original)
    prepared = onnx_ir.from_proto(original)
    prepare(prepared, settings)
    own = {node.name for node in all_nodes(prepared)}
    if settings.repair:
        repair_model(prepared, settings)
    main = {node.name for node in prepared.graph}
    found = {node.name: _searched(node) for node in float_nodes(prepared) if node.name in main}
    found |= {node.name: _searched(node) for node in prepared.graph if any(bodies(node)) and node.name not in found}
    return SearchedModel(
        original=original,
        prepared=onnx_ir.to_proto(prepared),
        floats=frozenset(_float_names(prepared)),
        nodes={node.name or "": found[node.name] for node in prepared.graph if node.name in found},
        settings=settings,
        made=frozenset(node.name or "" for node in all_nodes(prepared) if node.name not in own),
    )


def _searched(node: onnx_ir.Node) -> SearchedNode:
    props = node.metadata_props
    weights = {value for value in node.inputs if value is not None and value.is_initializer() and is_float(value)}
    sizes = [value.const_value.size for value in weights if value.const_value is not None]
    return SearchedNode(
        name=node.name or "",
        op_type=f"{node.domain}:{node.op_type}" if node.domain else node.op_type,
        module=props.get("halfserve.module"),
        source=props.get("halfserve.source"),
        op=props.get("halfserve.op"),
        weight_bytes=2 * sum(sizes),
    )


def _float_names(model: onnx_ir.Model) -> set[str]:
    names: set[str] = set()
    for graph in all_graphs(model):
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        names |= {
            value.name for value in values if value.name and is_float(value) and isinstance(value.type, onnx_ir.TensorType)
        }
    return names
