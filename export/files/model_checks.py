"""What every ONNX model must be before anything is done with it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache

import onnx

from export.errors import ExportError
from export.files.graph_checks import require_sound_graphs
from export.files.node_checks import require_complete_nodes
from export.files.proto_walk import all_nodes
from export.files.tensor_checks import require_whole_tensors

OLDEST_IR_VERSION = 3
HEAD_BYTES = 32  # of a file, for `no_model`
_HEADS = {
    b"version https://git-lfs": "it is a Git LFS pointer: run `git lfs pull`",
    b"PK\x03\x04": "it is a zip archive, as PyTorch checkpoints are: see `halfserve export`",
    b"\x1f\x8b": "it is compressed: unpack it first",
    b"\x89HDF": "it is an HDF5 file: export it to ONNX first",
    b"<!DOCTYPE": "it is a web page: the download went wrong",
    b"<html": "it is a web page: the download went wrong",
}


def no_model(name: str, head: bytes, reason: str = "") -> ExportError:
    """The error for bytes that are no ONNX model, with a guess at what they are instead.

    Args:
        name: The model, as errors call it.
        head: The first bytes.
        reason: What is wrong, if known.
    """
    guess = next((text for start, text in _HEADS.items() if head.startswith(start)), reason)
    return ExportError(f"{name} is not an ONNX model or is damaged" + (f": {guess}" if guess else ""))


def require_sound(model: onnx.ModelProto, name: str) -> None:
    """Check that this is a model, of versions that the installed library knows, made of operators that exist.

    Raises:
        ExportError: It is not; the text says what to do.
    """
    if not model.HasField("graph"):
        raise no_model(name, b"", "it has no graph")
    if not model.graph.output:
        raise no_model(name, b"", "it has no outputs")
    if model.ir_version > onnx.IR_VERSION:
        raise ExportError(
            f"{name} has IR version {model.ir_version}; onnx {onnx.__version__} knows up to {onnx.IR_VERSION}; upgrade onnx"
        )
    if model.ir_version < OLDEST_IR_VERSION or not model.opset_import:
        raise ExportError(
            f"{name} has IR version {model.ir_version} and opsets {_opsets(model) or 'none'}; "
            f"expected IR {OLDEST_IR_VERSION} or later and an opset: export the model again"
        )
    newest = onnx.defs.onnx_opset_version()
    opset = _opsets(model).get("", 0)
    if opset > newest:
        raise ExportError(f"{name} has opset {opset}; onnx {onnx.__version__} knows up to {newest}; upgrade onnx")
    _require_known_operators(model, name, opset)
    require_sound_graphs(model, name)
    require_complete_nodes(model, name, _schemas(model, opset))
    require_whole_tensors(model, name)


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in model.opset_import}


def _schemas(model: onnx.ModelProto, opset: int) -> Callable[[str], onnx.defs.OpSchema | None]:
    """Finds the operators of ONNX's that a model does not define anew."""
    own = {function.name for function in model.functions if function.domain in ("", "ai.onnx")}
    return cache(lambda op_type: None if op_type in own else onnx.defs.get_schema(op_type, opset, ""))


def _require_known_operators(model: onnx.ModelProto, name: str, opset: int) -> None:
    own = {function.name for function in model.functions if function.domain in ("", "ai.onnx")}
    used: dict[str, onnx.NodeProto] = {}
    for node in all_nodes(model):
        if node.domain in ("", "ai.onnx"):
            used.setdefault(node.op_type, node)
    for op_type, node in used.items():
        if op_type in own:
            continue
        where = f"{name}: node {node.name or next(iter(node.output), '')!r} is a {op_type!r}"
        if not opset:
            raise ExportError(f"{where}, but the model imports no opset of ONNX's own operators; export it again")
        try:
            onnx.defs.get_schema(op_type, opset, "")
        except onnx.defs.SchemaError as error:
            raise ExportError(f"{where}, which ONNX's opset {opset} does not have{_hint(op_type)}") from error


def _hint(op_type: str) -> str:
    known = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    if op_type in known:
        return "; it came later: raise the model's opset, or export it again"
    near = difflib.get_close_matches(op_type, known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{meant}; give an operator of your own a domain of its own"
