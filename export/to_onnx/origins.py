"""Where in the torch model each node of the graph comes from, as metadata of the node."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import onnx_ir

from export.to_onnx.capture import WRAPPED

MODULE, SOURCE, OP = "halfserve.module", "halfserve.source", "halfserve.op"
_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY = ("torch.", "export.to_onnx.", "export.halving.")


def note_origins(model: onnx_ir.Model) -> None:
    """Replace what torch's exporter notes about each node by our own three entries, in place.

    `halfserve.module` is the dotted path of the torch module ("" is the model itself), `halfserve.source` the innermost line
    outside torch, as "package/file.py:42", and `halfserve.op` the torch operator, as "aten::linear". No path of this machine
    and no source text is kept.
    """
    files = _FileNames()
    for node in _nodes(model):
        given = dict(node.metadata_props)
        node.metadata_props.clear()
        scopes, classes = _list(given.get(_SCOPES)), _list(given.get(_CLASSES))
        if len(scopes) > 1:
            node.metadata_props[MODULE] = scopes[-2].removeprefix(WRAPPED).removeprefix(".")
        if source := files.source(given.get("pkg.torch.onnx.stack_trace", "")):
            node.metadata_props[SOURCE] = source
        if classes and classes[-1].startswith(("aten.", "halfserve.")):
            node.metadata_props[OP] = "aten::" + classes[-1].split(".")[1]


def spread_origins(model: onnx_ir.Model) -> None:
    """Let nodes that a simplification made inherit from what they feed or read; drop every other note. In place."""
    nodes = list(_nodes(model))
    for node in reversed(nodes):
        if MODULE not in node.metadata_props:
            _inherit(node, [user for value in node.outputs for user, _ in value.uses()])
    for node in nodes:
        if MODULE not in node.metadata_props:
            _inherit(node, [producer for value in node.inputs if value and (producer := value.producer())])
        kept = {key: node.metadata_props[key] for key in (MODULE, SOURCE, OP) if key in node.metadata_props}
        node.metadata_props.clear()
        node.metadata_props.update(kept)
        node.doc_string = None


def drop_notes(model: onnx_ir.Model) -> None:
    """Remove what torch's exporter and optimizer note about values, graphs and the model, in place."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        graph.doc_string = None
        for value in (*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)):
            value.metadata_props.clear()
            value.doc_string = None


def _nodes(model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _inherit(node: onnx_ir.Node, relatives: list[onnx_ir.Node]) -> None:
    for relative in relatives:
        if MODULE in relative.metadata_props:
            node.metadata_props.update({k: v for k, v in relative.metadata_props.items() if k in (MODULE, SOURCE, OP)})
            return


def _list(text: str | None) -> list[str]:
    return [str(item) for item in ast.literal_eval(text)] if text else []


class _FileNames:
    """Files by the name that they are imported under, which is the same on every machine."""

    def __init__(self) -> None:
        # Out of its dict: a module that imports itself when it is asked for anything would do so here, or fail to.
        places = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in list(sys.modules.items())}
        self._modules = {file: name for name, file in sorted(places.items()) if file and name != "__main__"}
        self.source = cache(self._source)

    def _source(self, stack_trace: str) -> str | None:
        """The innermost frame outside torch and this package; the innermost of all where there is none."""
        frames = [(file, line, self._modules.get(file, "")) for file, line in _FRAME.findall(stack_trace)]
        theirs = [frame for frame in frames if not f"{frame[2]}.".startswith(_LIBRARY)]
        for file, line, module in (theirs or frames)[-1:]:
            return f"{_relative(file, module)}:{line}"
        return None


def _relative(file: str, module: str) -> str:
    path = Path(file)
    if module:
        parts = module.split(".")
        folders = parts if path.stem == "__init__" else parts[:-1]
        return "/".join([*folders, path.name])
    inner = [path.name]
    while (path.parent / "__init__.py").exists():
        path = path.parent
        inner.insert(0, path.name)
    return "/".join(inner)
