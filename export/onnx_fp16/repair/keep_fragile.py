"""Marks what cannot be repaired and would break in float16: the converter keeps it in float32, from one end to the other."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir

from export.onnx_fp16.graph_walk import all_nodes, constant_of, is_float
from export.onnx_fp16.planning.op_sets import MOVERS, PERIODIC, operators
from export.onnx_fp16.planning.reasons import KEEP
from export.onnx_fp16.repair.edits import is_op, keep, readers
from export.onnx_fp16.repair.fragile_chains import (
    CLOSERS,
    REDUCTIONS,
    ROOTS,
    Chain,
    affine_tail,
    factor_of,
    follow,
    is_root,
    outgrows,
    sources,
    squares,
)
from export.onnx_fp16.repair.small_constants import constant_path
from export.onnx_fp16.report import Repair
from export.weight_ledger import FP16_SMALLEST_NORMAL

SQUARES = "a sum of squares can outgrow float16 before its root is taken"
BOUNDED = "a sum of squares that only what follows brings back into float16's range"
POWERS = "a power that only what follows brings back into float16's range"
EPSILON = "float16 loses the epsilon {:.3g}"
ANGLE = "an angle up to its sine or cosine"
SCALES = "scaled by {:.3g} and back"
# Before an epsilon: what computes a small number that is then guarded.
GUARDED = operators("Abs Mul Neg Pow ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare Sqrt Sub")
NORM = operators("Mul Pow ReduceMean Sub")
ANGLES = MOVERS | operators("Add Cast Div Einsum Exp MatMul Mul Neg Sub")
LARGE_FACTOR = 256.0


class KeepFragile:
    """Finds chains that leave float16's range and come back, and marks them whole."""

    name = "keep-fragile"

    def requires(self, model: onnx_ir.Model) -> None:
        """Nothing."""

    def call(self, model: onnx_ir.Model) -> list[Repair]:
        """Mark nodes; the graph stays as it is."""
        repairs: list[Repair] = []
        for node in all_nodes(model):
            found = _opened_by(node)
            if found is not None:
                reason, nodes = found
                repairs += keep(nodes, reason, self.name)
        return repairs

    def ensures(self, model: onnx_ir.Model) -> None:
        """Every node that opens a chain is marked."""
        for node in all_nodes(model):
            if _opened_by(node) is not None and KEEP not in node.metadata_props:
                raise ValueError(f"{node.name} is not marked")


def _opened_by(node: onnx_ir.Node) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    """The chain that a node opens, if it does, with the reason to keep it."""
    if squares(node) or is_op(node, "ReduceSumSquare", "ReduceL2"):
        return _of_squares(node) if outgrows(node) else None
    if is_op(node, "Exp"):
        return _of_exponential(node)
    if is_op(node, *PERIODIC):
        return _of_angle(node)
    epsilon = _epsilon_of(node)
    if epsilon is not None:
        return _of_epsilon(node, *epsilon)
    factor = factor_of(node)
    return _of_scales(node, factor) if factor is not None and abs(factor) >= LARGE_FACTOR else None


def _of_squares(node: onnx_ir.Node) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    chain = follow(node)
    roots = chain is not None and any(map(is_root, chain.nodes))
    if chain is None or not (chain.closed or (chain.reduced and roots)):
        return None
    if not chain.reduced:
        return POWERS, chain.nodes
    differences = [source for one in chain.nodes if is_op(one, "Sub") for source in sources(one, NORM)]
    rooted = roots or any(is_op(one, "ReduceL2") for one in chain.nodes)
    return SQUARES if rooted else BOUNDED, [*sources(node, NORM), *differences, *chain.nodes, *_tails(chain)]


def _tails(chain: Chain) -> list[onnx_ir.Node]:
    """What scales and shifts a norm's result: runtimes fuse the whole norm, and refuse one of two types."""
    return [tail for one in chain.nodes if is_op(one, "Div", "Mul") for tail in affine_tail(one)]


def _of_exponential(node: onnx_ir.Node) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    """exp(12) is infinite: that does harm in a sum, before a logarithm, and on both sides of a division (inf / inf)."""
    chain = follow(node)
    if chain is None or not chain.closed:
        return None
    made = {output for one in chain.nodes if not is_op(one, *CLOSERS) for output in one.outputs}
    ratio = any(is_op(one, "Div") and made.issuperset(one.inputs) for one in chain.nodes)
    summed = any(is_op(reader, "ReduceSum") for reader in readers(node.outputs[0]))
    logarithm = any(is_op(one, "Log") for one in chain.nodes)
    return (POWERS, chain.nodes) if ratio or summed or logarithm else None


def _of_angle(node: onnx_ir.Node) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    """The sine of what is computed from the model's inputs and constants alone: positions, or a diffusion model's time."""
    path, waiting = {node: None}, list(node.inputs)
    while waiting:
        value = waiting.pop()
        if value is None or value.producer() is None or constant_of(value) is not None:
            continue
        maker = value.producer()
        if maker is None or not is_op(maker, *ANGLES):
            return None
        if maker not in path:
            path[maker] = None
            waiting += [one for one in maker.inputs if is_float(one)]
    return (ANGLE, path) if len(path) > 1 else None


def _epsilon_of(node: onnx_ir.Node) -> tuple[float, tuple[onnx_ir.Node, ...]] | None:
    """The small constant that a node guards with, and the nodes that hand it on."""
    if not is_op(node, "Add", "Sub", "Max", "Clip", "Where"):
        return None
    values = {"Clip": node.inputs[1:2], "Where": node.inputs[1:]}.get(node.op_type, node.inputs)
    for found in map(constant_path, values):
        if found is not None and 0 < found[0] < FP16_SMALLEST_NORMAL:
            return found
    return None


def _of_epsilon(node: onnx_ir.Node, epsilon: float, path: Iterable[onnx_ir.Node]) -> tuple[str, Iterable[onnx_ir.Node]] | None:
    chain = follow(node)
    guards = chain is not None and any(is_op(one, "Div", "Log", "Pow", *ROOTS) for one in chain.nodes)
    if chain is None or not guards:
        return None
    return EPSILON.format(epsilon), [*path, *sources(node, GUARDED), *chain.nodes, *_tails(chain)]


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
