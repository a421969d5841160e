"""Chains of nodes whose numbers leave float16's range and come back: they stay float32 from one end to the other.

A square, an exponential, a tiny constant or a large factor opens a chain. The readers of its values belong to it, up to an
operator that brings the numbers back: a division, a logarithm, a square root that is divided by, a tanh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import onnx_ir

from halfserve.export.half_types import FP16_MAX, FP16_SMALLEST_NORMAL
from halfserve.export.onnx_fp16.conversion_report import Repair
from halfserve.export.onnx_fp16.graph import MOVERS, PERIODIC, all_nodes, constant_of, is_float, operators
from halfserve.export.onnx_fp16.repair.edits import RepairPass, is_kept, is_op, keep, number_of, other_input, readers

# Their results are their inputs, scaled or summed.
CARRIERS = MOVERS | operators(
    """
    Abs Add AveragePool Clip CumSum GlobalAveragePool LeakyRelu Max Mean Min Mul Neg Pow ReduceMax ReduceMean ReduceMin
    ReduceSum ReduceSumSquare Relu Sub Sum Where
    """
)
# After these the numbers are back in range.
CLOSERS = operators("Div Erf Log LogSoftmax Sigmoid Sign Softmax Tanh")
# The root of a sum of squares, and its reciprocal, are as fragile as the sum: the division by it closes the chain.
ROOTS = operators("Reciprocal Sqrt")
REDUCTIONS = operators("GlobalAveragePool ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceSum ReduceSumSquare")
MOST_PRODUCTS = 4  # limit on nested products of constants
PASSING = MOVERS | {"Cast", "CastLike"}  # operators that pass on their first input
LONGEST = 48  # nodes; no chain comes back later
SQUARES = "a sum of squares can outgrow float16 before its root is taken"
BOUNDED = "a sum of squares that only what follows brings back into float16's range"
POWERS = "a power that only what follows brings back into float16's range"
EPSILON = "float16 loses the epsilon {:.3g}"
ANGLE = "a large angle needs more digits for its sine or cosine"
SUMMED_SQUARES = "a norm in parts: bfloat16 has too few digits for a sum of squares"
EXPONENTIALS = "a softmax or logarithm of exponentials in parts: bfloat16 has too few digits for it"
SCALES = "scaled by {:.3g} and back"
# These compute the small number to which an epsilon is added.
GUARDED = operators("Abs Mul Neg Pow ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceSum ReduceSumSquare Sqrt Sub")
NORM = operators("Mul Pow ReduceMean Sub")
ANGLES = MOVERS | operators("Add Cast Div Einsum Exp MatMul Mul Neg Sub")
LARGE_FACTOR = 256.0
_Found: TypeAlias = tuple[str, Iterable[onnx_ir.Node]] | None
_Opener: TypeAlias = Callable[[onnx_ir.Node], _Found]


@dataclass
class Chain:
    """A chain of nodes, while it is followed.

    Attributes:
        nodes: The nodes, in the order in which they were found.
        closed: Whether a node brings the numbers back.
        reduced: Whether a node sums them up.
    """

    nodes: dict[onnx_ir.Node, None] = field(default_factory=dict)
    closed: bool = False
    reduced: bool = False


def _follow(opening: onnx_ir.Node) -> Chain | None:
    """Return the chain that a node opens; None where it is longer than LONGEST."""
    chain = Chain({opening: None}, reduced=is_op(opening, *REDUCTIONS))
    waiting = [(value, False) for value in opening.outputs if is_float(value)]
    while waiting:
        value, inverse = waiting.pop()
        for node in readers(value):
            if node in chain.nodes:
                continue
            chain.nodes[node] = None
            if len(chain.nodes) > LONGEST:
                return None
            chain.reduced |= is_op(node, *REDUCTIONS)
            if is_op(node, *CLOSERS) or (inverse and is_op(node, "Mul")):
                chain.closed = True
            elif _is_root(node):
                waiting += [(output, not is_op(node, "Sqrt")) for output in node.outputs]
            elif is_op(node, *CARRIERS):
                waiting += [(output, inverse) for output in node.outputs]
            else:
                del chain.nodes[node]  # for example a matrix product
    return chain


def _sources(node: onnx_ir.Node, types: frozenset[str], depth: int = 6) -> Iterator[onnx_ir.Node]:
    """Yield the nodes of these types from which a node's float inputs are computed."""
    if depth:
        for value in node.inputs:
            maker = value.producer() if value is not None and is_float(value) else None
            if maker is not None and maker.graph is node.graph and is_op(maker, *types):
                yield maker
                yield from _sources(maker, types, depth - 1)


def _affine_tail(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """Yield the multiplication and the addition by constants that may follow the division of a norm."""
    value = node.outputs[0]
    for op_type in ("Mul", "Add"):
        found = [reader for reader in readers(value) if is_op(reader, op_type)]
        if len(found) != 1 or constant_of(other_input(found[0], value)) is None:
            return
        yield found[0]
        value = found[0].outputs[0]


def _is_root(node: onnx_ir.Node) -> bool:
    """Return whether a node takes a root or an inverse; a power of -0.5 is both."""
    exponent = power_of(node)
    return is_op(node, *ROOTS) or (exponent is not None and exponent < 0)


def _outgrows(node: onnx_ir.Node) -> bool:
    """Return whether the result of a power can be beyond float16: not where a Clip in front bounds its input."""
    exponent, bound = power_of(node), _bound_of(node.inputs[0])
    return bound is None or bound ** (2 if exponent is None else exponent) > FP16_MAX


def _bound_of(value: onnx_ir.Value | None) -> float | None:
    """Return the largest magnitude that a Clip lets through; None behind any other node."""
    clip = value.producer() if value is not None else None
    if clip is None or not is_op(clip, "Clip") or len(clip.inputs) < 3:
        return None
    known = [abs(bound) for bound in map(number_of, clip.inputs[1:3]) if bound is not None]
    return max(known) if len(known) == 2 else None


def squares(node: onnx_ir.Node) -> bool:
    """Return whether a node raises to a constant power of 2 or more, or multiplies a number with itself."""
    if is_op(node, "Mul"):
        return node.inputs[0] is node.inputs[1]
    exponent = power_of(node)
    return exponent is not None and exponent >= 2


def is_square(node: onnx_ir.Node) -> bool:
    """Return whether a node multiplies a number with itself, or raises it to the power of 2."""
    return node.inputs[0] is node.inputs[1] if is_op(node, "Mul") else power_of(node) == 2


def power_of(node: onnx_ir.Node) -> float | None:
    """Return the constant number that a node raises to; None for any other node."""
    exponent = constant_of(node.inputs[1]) if is_op(node, "Pow") else None
    return float(exponent.numpy().reshape(())) if exponent is not None and exponent.size == 1 else None


def factor_of(node: onnx_ir.Node) -> float | None:
    """Return the constant number by which a node multiplies, or one over the number by which it divides; None for any other
    node.
    """
    if not is_op(node, "Mul", "Div"):
        return None
    if is_op(node, "Div"):
        number = number_of(node.inputs[1])
        return 1 / number if number else None
    return next((number for number in map(number_of, node.inputs) if number), None)


def _keep(opened_by: _Opener, model: onnx_ir.Model) -> list[Repair]:
    repairs: list[Repair] = []
    for node in all_nodes(model):
        found = opened_by(node)
        if found is not None:
            reason, nodes = found
            repairs += keep(nodes, reason, KEEP_FRAGILE.name)
    return repairs


def _unmarked(opened_by: _Opener, model: onnx_ir.Model) -> Iterator[onnx_ir.Node]:
    return (node for node in all_nodes(model) if opened_by(node) is not None and not is_kept(node))


def _parts_at(node: onnx_ir.Node) -> _Found:
    """Return the norm, softmax or angle in parts that a node opens, if any; bfloat16 holds the range of all other chains.

    A square that is not summed, an epsilon of 1e-12 and a factor of 1e6 lose no more digits than any other number.
    """
    if is_op(node, *PERIODIC):
        return _of_angle(node)
    if is_op(node, "Exp"):
        found = _of_exponential(node)
        return None if found is None else (EXPONENTIALS, found[1])
    if squares(node) or is_op(node, "ReduceSumSquare", "ReduceL2"):
        found = _of_squares(node)
        return None if found is None or found[0] is POWERS else (SUMMED_SQUARES, found[1])
    return None


def _opened_by(node: onnx_ir.Node) -> _Found:
    """Return the chain that a node opens, if any, with the reason to keep it in float32."""
    if squares(node) or is_op(node, "ReduceSumSquare", "ReduceL2"):
        return _of_squares(node) if _outgrows(node) else None
    if is_op(node, "Exp"):
        return _of_exponential(node)
    if is_op(node, *PERIODIC):
        return _of_angle(node)
    epsilon = _epsilon_of(node)
    if epsilon is not None:
        return _of_epsilon(node, *epsilon)
    factor = factor_of(node)
    return _of_scales(node, factor) if factor is not None and abs(factor) >= LARGE_FACTOR else None


def _of_squares(node: onnx_ir.Node) -> _Found:
    chain = _follow(node)
    roots = chain is not None and any(map(_is_root, chain.nodes))
    if chain is None or not (chain.closed or (chain.reduced and roots)):
        return None
    if not chain.reduced:
        return POWERS, chain.nodes
    differences = [source for one in chain.nodes if is_op(one, "Sub") for source in _sources(one, NORM)]
    rooted = roots or any(is_op(one, "ReduceL2") for one in chain.nodes)
    return SQUARES if rooted else BOUNDED, [*_sources(node, NORM), *differences, *chain.nodes, *_tails(chain)]


def _tails(chain: Chain) -> list[onnx_ir.Node]:
    """Return the scale and shift of a norm's result: runtimes fuse the whole norm, and refuse one of two types."""
    return [tail for one in chain.nodes if is_op(one, "Div", "Mul") for tail in _affine_tail(one)]


def _of_exponential(node: onnx_ir.Node) -> _Found:
    """exp(12) is infinite: harmful in a sum, before a logarithm, and on both sides of a division (inf / inf)."""
    chain = _follow(node)
    if chain is None or not chain.closed:
        return None
    made = {output for one in chain.nodes if not is_op(one, *CLOSERS) for output in one.outputs}
    ratio = any(is_op(one, "Div") and made.issuperset(one.inputs) for one in chain.nodes)
    summed = any(is_op(reader, "ReduceSum") for reader in readers(node.outputs[0]))
    logarithm = any(is_op(one, "Log") for one in chain.nodes)
    return (POWERS, chain.nodes) if ratio or summed or logarithm else None


def _of_angle(node: onnx_ir.Node) -> _Found:
    """Return the sine of a value computed from the model's inputs and constants alone: positions, or a diffusion
    model's time.
    """
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
    """Return the small constant of a node that guards with one, and the nodes between the constant and the node."""
    if not is_op(node, "Add", "Sub", "Max", "Clip", "Where"):
        return None
    values = {"Clip": node.inputs[1:2], "Where": node.inputs[1:]}.get(node.op_type, node.inputs)
    for found in map(_constant_path, values):
        if found is not None and 0 < found[0] < FP16_SMALLEST_NORMAL:
            return found
    return None


def _of_epsilon(node: onnx_ir.Node, epsilon: float, path: Iterable[onnx_ir.Node]) -> _Found:
    chain = _follow(node)
    guards = chain is not None and any(is_op(one, "Div", "Log", "Pow", *ROOTS) for one in chain.nodes)
    if chain is None or not guards:
        return None
    return EPSILON.format(epsilon), [*path, *_sources(node, GUARDED), *chain.nodes, *_tails(chain)]


def _of_scales(node: onnx_ir.Node, factor: float) -> _Found:
    """Return a large factor, and what follows up to the small factor that reverts it."""
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


def _constant_path(value: onnx_ir.Value | None, products: int = MOST_PRODUCTS) -> tuple[float, tuple[onnx_ir.Node, ...]] | None:
    """Return the largest magnitude in a float constant, and the nodes through which it passes; None for a value that varies.

    An epsilon behind an Identity, a Cast or an Expand is constant, and so is a product of constants, `products` deep.
    """
    path: list[onnx_ir.Node] = []
    while value is not None:
        tensor = constant_of(value)
        maker = value.producer()
        if maker is not None and is_op(maker, "ConstantOfShape"):
            attribute = maker.attributes.get("value")
            tensor = attribute.as_tensor() if attribute is not None else None
            path.append(maker)
        if tensor is not None:
            if not tensor.dtype.is_floating_point() or not tensor.size:
                return None
            return float(np.abs(tensor.numpy().astype(np.float64)).max()), tuple(path)
        if maker is None or not is_op(maker, *PASSING) or is_op(maker, "Concat"):
            product = _product(maker, products) if maker is not None and products else None
            return None if product is None else (product[0], (*path, *product[1]))
        path.append(maker)
        value = maker.inputs[0]
    return None


def _product(node: onnx_ir.Node, products: int) -> tuple[float, tuple[onnx_ir.Node, ...]] | None:
    if not is_op(node, "Mul"):
        return None
    sides = [_constant_path(value, products - 1) for value in node.inputs]
    known = [side for side in sides if side is not None]
    if len(known) != len(sides):
        return None
    return float(np.prod([size for size, _ in known])), (node, *(one for _, path in known for one in path))


KEEP_FRAGILE = RepairPass(name="keep-fragile", call=partial(_keep, _opened_by), left=partial(_unmarked, _opened_by))
KEEP_PARTS = RepairPass(name="keep-fragile", call=partial(_keep, _parts_at), left=partial(_unmarked, _parts_at))
