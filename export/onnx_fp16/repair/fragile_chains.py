"""Chains of nodes whose numbers leave float16's range and come back: they stay float32 from one end to the other.

A square, an exponential, a tiny constant or a large factor opens a chain. What reads a value of the chain belongs to it, until
an operator brings the numbers back: a division, a logarithm, a square root that somebody then divides by, a tanh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir

from export.onnx_fp16.graph_walk import constant_of, is_float
from export.onnx_fp16.planning.op_sets import MOVERS, operators
from export.onnx_fp16.repair.edits import is_op, number_of, other_input, readers
from export.weight_ledger import FP16_MAX

# These hand what they got on, scaled or summed.
CARRIERS = MOVERS | operators(
    """
    Abs Add AveragePool Clip CumSum GlobalAveragePool LeakyRelu Max Mean Min Mul Neg Pow ReduceMax ReduceMean ReduceMin
    ReduceSum ReduceSumSquare Relu Sub Sum Where
    """
)
# After these the numbers are back in range.
CLOSERS = operators("Div Erf Log LogSoftmax Sigmoid Sign Softmax Tanh")
# The root of a sum of squares, and its reciprocal, are as fragile as the sum: what divides by it closes the chain.
ROOTS = operators("Reciprocal Sqrt")
REDUCTIONS = operators("GlobalAveragePool ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceSum ReduceSumSquare")
LONGEST = 48  # nodes; what has not come back by then never will


@dataclass
class Chain:
    """A chain as it grows.

    Attributes:
        nodes: In the order in which they were met.
        closed: Something brings its numbers back.
        reduced: Something sums them up.
    """

    nodes: dict[onnx_ir.Node, None] = field(default_factory=dict)
    closed: bool = False
    reduced: bool = False


def follow(opening: onnx_ir.Node) -> Chain | None:
    """The chain that a node opens; None where it never ends, or leads into what is no part of it."""
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
            elif is_root(node):
                waiting += [(output, not is_op(node, "Sqrt")) for output in node.outputs]
            elif is_op(node, *CARRIERS):
                waiting += [(output, inverse) for output in node.outputs]
            else:
                del chain.nodes[node]  # a matrix product, say: it takes what it gets
    return chain


def sources(node: onnx_ir.Node, types: frozenset[str], depth: int = 6) -> Iterator[onnx_ir.Node]:
    """The nodes of these types that a node's floats come from, through each other."""
    if depth:
        for value in node.inputs:
            maker = value.producer() if value is not None and is_float(value) else None
            if maker is not None and maker.graph is node.graph and is_op(maker, *types):
                yield maker
                yield from sources(maker, types, depth - 1)


def affine_tail(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """The multiplication and the addition by constants that may follow the division of a norm."""
    value = node.outputs[0]
    for op_type in ("Mul", "Add"):
        found = [reader for reader in readers(value) if is_op(reader, op_type)]
        if len(found) != 1 or constant_of(other_input(found[0], value)) is None:
            return
        yield found[0]
        value = found[0].outputs[0]


def is_root(node: onnx_ir.Node) -> bool:
    """Whether a node takes a root or an inverse; a power of -0.5 is both."""
    exponent = power_of(node)
    return is_op(node, *ROOTS) or (exponent is not None and exponent < 0)


def outgrows(node: onnx_ir.Node) -> bool:
    """Whether the power that a node raises to can be beyond float16: not where a Clip in front keeps it from that."""
    exponent, bound = power_of(node), _bound_of(node.inputs[0])
    return bound is None or bound ** (2 if exponent is None else exponent) > FP16_MAX


def _bound_of(value: onnx_ir.Value | None) -> float | None:
    """The largest magnitude that a Clip lets through; None behind any other node."""
    clip = value.producer() if value is not None else None
    if clip is None or not is_op(clip, "Clip") or len(clip.inputs) < 3:
        return None
    known = [abs(bound) for bound in map(number_of, clip.inputs[1:3]) if bound is not None]
    return max(known) if len(known) == 2 else None


def squares(node: onnx_ir.Node) -> bool:
    """Whether a node raises to a constant power of 2 or more, or multiplies a number with itself."""
    if is_op(node, "Mul"):
        return node.inputs[0] is node.inputs[1]
    exponent = power_of(node)
    return exponent is not None and exponent >= 2


def power_of(node: onnx_ir.Node) -> float | None:
    """The constant number that a node raises to; None for any other node."""
    exponent = constant_of(node.inputs[1]) if is_op(node, "Pow") else None
    return float(exponent.numpy().reshape(())) if exponent is not None and exponent.size == 1 else None


def factor_of(node: onnx_ir.Node) -> float | None:
    """By what a node multiplies: its one constant number, or one over it where it divides; None for any other node."""
    if not is_op(node, "Mul", "Div"):
        return None
    if is_op(node, "Div"):
        number = number_of(node.inputs[1])
        return 1 / number if number else None
    return next((number for number in map(number_of, node.inputs) if number), None)
