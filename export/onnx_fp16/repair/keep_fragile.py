"""Marks what cannot be repaired and would break in float16: the converter keeps it in float32, from one end to the other."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes
from export.onnx_fp16.op_sets import operators
from export.onnx_fp16.reasons import KEEP
from export.onnx_fp16.repair.edits import array_of, is_op, readers
from export.onnx_fp16.repair.fragile_chains import REDUCTIONS, ROOTS, Chain, affine_tail, factor_of, follow, sources, squares
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_SMALLEST_NORMAL

SQUARES = "a sum of squares can outgrow float16 before its root is taken"
POWERS = "a power that only what follows brings back into float16's range"
EPSILON = "float16 loses the epsilon {:.3g}"
SCALES = "scaled by {:.3g} and back"
# Before an epsilon: what computes a small number that is then guarded.
GUARDED = operators("Abs Mul Neg Pow ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare Sqrt Sub")
NORM = operators("Mul Pow ReduceMean Sub")
LARGE_FACTOR = 256.0


class KeepFragile:
    """Finds chains that leave float16's range and come back, and marks them whole."""

    name = "keep-fragile"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Mark nodes; the graph stays as it is."""
        repairs = []
        for node in all_nodes(model):
            found = _opened_by(node)
            if found is None:
                continue
            reason, nodes = found
            fresh = [one for one in dict.fromkeys(nodes) if KEEP not in one.metadata_props]
            for one in fresh:
                one.metadata_props[KEEP] = reason
            if fresh:
                names = tuple(one.name or "" for one in fresh)
                repairs.append(Repair(pass_name=self.name, nodes=names, text=f"kept in float32: {reason}"))
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """Every node that opens a chain is marked."""
        for node in all_nodes(model):
            if _opened_by(node) is not None and KEEP not in node.metadata_props:
                raise ValueError(f"{node.name} is not marked")


def _opened_by(node: onnx_ir.Node) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    """The chain that a node opens, if it does, with the reason to keep it."""
    if squares(node) or is_op(node, "ReduceSumSquare", "ReduceL2"):
        return _of_squares(node)
    if is_op(node, "Exp"):
        summed = [reader for reader in readers(node.outputs[0]) if is_op(reader, "ReduceSum")]
        chain = follow(node) if summed else None
        return (POWERS, chain.nodes) if chain is not None and chain.closed else None
    epsilon = _epsilon_of(node)
    if epsilon is not None:
        return _of_epsilon(node, epsilon)
    factor = factor_of(node)
    return _of_scales(node, factor) if factor is not None and abs(factor) >= LARGE_FACTOR else None


def _of_squares(node: onnx_ir.Node) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    chain = follow(node)
    roots = chain is not None and any(is_op(one, *ROOTS) for one in chain.nodes)
    if chain is None or not (chain.closed or (chain.reduced and roots)):
        return None
    if not chain.reduced:
        return POWERS, chain.nodes
    differences = [source for one in chain.nodes if is_op(one, "Sub") for source in sources(one, NORM)]
    return SQUARES, [*sources(node, NORM), *differences, *chain.nodes, *_tails(chain)]


def _tails(chain: Chain) -> list[onnx_ir.Node]:
    """What scales and shifts a norm's result: runtimes fuse the whole norm, and refuse one of two types."""
    return [tail for one in chain.nodes if is_op(one, "Div", "Mul") for tail in affine_tail(one)]


def _epsilon_of(node: onnx_ir.Node) -> float | None:
    if not is_op(node, "Add", "Sub", "Max", "Clip"):
        return None
    values = node.inputs[1:2] if is_op(node, "Clip") else node.inputs
    for array in map(array_of, values):
        if array is not None and array.size:
            largest = float(np.abs(array).max())
            if 0 < largest < FP16_SMALLEST_NORMAL:
                return largest
    return None


def _of_epsilon(node: onnx_ir.Node, epsilon: float) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    chain = follow(node)
    guards = chain is not None and any(is_op(one, "Div", "Log", "Pow", *ROOTS) for one in chain.nodes)
    if chain is None or not guards:
        return None
    return EPSILON.format(epsilon), [*sources(node, GUARDED), *chain.nodes, *_tails(chain)]


def _of_scales(node: onnx_ir.Node, factor: float) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    """A large factor, and what follows it up to the small one that takes it back."""
    path, value = [node], node.outputs[0]
    while len(path) < 12:
        after = readers(value)
        if len(after) != 1 or value.is_graph_output():
            return None
        path.append(after[0])
        back = factor_of(after[0])
        if back is not None and abs(back) * abs(factor) <= LARGE_FACTOR:
            return SCALES.format(factor), path
        if len(after[0].outputs) != 1 or after[0].op_type in REDUCTIONS:
            return None
        value = after[0].outputs[0]
    return None
