"""Where a model and each of its nodes come from, as ONNX metadata."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import onnx
import onnx_ir
import torch
from torch import nn

from halfserve.amp_core.policy import Policy
from halfserve.export.onnx_fp16.conversion_mark import installed_version
from halfserve.export.to_onnx.capture import WRAPPED

MODULE, SOURCE, OP = "halfserve.module", "halfserve.source", "halfserve.op"
_SCOPES, _CLASSES = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy"

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_PACKAGE = __name__.rpartition(".")[0]
_LIBRARY = ("torch.", f"{_PACKAGE}.", f"{_PACKAGE.rpartition('.')[0]}.half_module.")


def provenance(
    module: nn.Module, model: onnx_ir.Model, limits: Mapping[str, tuple[int, int | None]], policy: Policy | str | None
) -> dict[str, str]:
    """Return the metadata of an exported model: versions, the opset, the class and the hash of its source, the sizes, and the
    policy.

    `limits` holds the smallest and largest size of each dynamic dimension, by name.
    """
    entries = {
        "halfserve.version": installed_version(),
        "halfserve.torch": torch.__version__,
        "halfserve.onnx": onnx.__version__,
        "halfserve.opset": str(model.opset_imports[""]),
        "halfserve.source": _class_name(type(module)),
        "halfserve.source_sha256": source_hash(module),
        "halfserve.dimensions": json.dumps(limits, sort_keys=True),
    }
    return entries if policy is None else {**entries, "halfserve.policy": str(policy)}


def source_hash(module: nn.Module) -> str:
    """Return SHA-256 in hexadecimal over the source text of the classes of all modules in a model.

    torch's own classes count by name: torch's version has its own entry. So do classes without readable source (typed at a
    prompt).
    """
    classes = {_class_name(type(part)): type(part) for part in module.modules()}
    texts = [f"{name}\n{'' if name.startswith('torch.') else _source_text(classes[name])}\n" for name in sorted(classes)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _source_text(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def note_origins(model: onnx_ir.Model) -> None:
    """Replace the metadata that torch's exporter gives each node by three entries of our own, in place.

    `halfserve.module` is the dotted path of the torch module ("" is the model itself), `halfserve.source` the innermost line
    outside torch, as "package/file.py:42", and `halfserve.op` the torch operator, as "aten::linear". Paths of this machine
    and source text are dropped.
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
    """Copy the origin to nodes that a simplification made from their users or producers; drop other metadata. In place."""
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
    """Remove the metadata that torch's exporter and optimizer give values, graphs and the model, in place."""
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
    """File names by the module that they are imported as, which is the same on every machine."""

    def __init__(self) -> None:
        # Read from `__dict__`: a lazy module would import itself on attribute access, or fail to.
        places = {name: getattr(module, "__dict__", {}).get("__file__") for name, module in list(sys.modules.items())}
        self._modules = {file: name for name, file in sorted(places.items()) if file and name != "__main__"}
        self.source = cache(self._source)

    def _source(self, stack_trace: str) -> str | None:
        """Return the innermost frame outside torch and this package, else the innermost of all."""
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
