"""What to do where an output, or some of its columns, becomes 0: a command that keeps in float32 what computes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

from export.certificate.certificate import OutputVerdict
from export.verification.simulate import MOVERS

NODES_NAMED = 6


def remedy(
    candidate: onnx.GraphProto, reference: onnx.GraphProto | None, source: Path | None, verdicts: Sequence[OutputVerdict]
) -> str:
    """What to do about the outputs that vanish, with the options to use; empty where none does.

    Args:
        candidate: The graph of the fp16 model.
        reference: That of the float32 model, where it is ONNX.
        source: The float32 model's file, where there is one.
        verdicts: The verdicts on the user's samples.
    """
    gone = {verdict.name for verdict in verdicts if verdict.figures.vanished is not None and verdict.violations}
    if not gone:
        return ""
    half = any(v.name in gone and v.type.tensor_type.elem_type == TensorProto.FLOAT16 for v in candidate.output)
    types = " --keep-io-types" if half else ""
    if reference is None:
        options = "--keep-io-types or " if half else ""
        return f"keep in float32 what vanishes ({options}--keep-fp32 of halfserve export), or rescale it in the model"
    known = {node.name for node in reference.node}
    names = [name for name in dict.fromkeys(_computing(candidate, gone)) if name in known or "" in known]
    blocked = "".join(f" --block-node {shlex.quote(name)}" for name in names) if len(names) <= NODES_NAMED else ""
    file = "MODEL.onnx" if source is None else shlex.quote(str(source))
    return (
        f"keep in float32 what vanishes: halfserve convert {file} TARGET.onnx{types}{blocked}, "
        "where --search, on by default, finds what else that needs; or rescale it in the model"
    )


def _computing(graph: onnx.GraphProto, outputs: set[str]) -> Iterator[str]:
    """Names of the nodes that compute some outputs last, and of those between that only move values; no casts."""
    makers = {name: node for node in graph.node for name in node.output}
    waiting, seen = list(outputs), set(outputs)
    while waiting:
        node = makers.get(waiting.pop())
        if node is None:
            continue
        if node.op_type != "Cast":
            yield node.name
        if node.op_type in MOVERS:
            new = [name for name in node.input if name and name not in seen]
            seen.update(new)
            waiting += new
