"""What a GPU computes in float16, on a CPU: a model that rounds after every node.

ONNX Runtime has no float16 arithmetic on most CPUs. It casts a chain of nodes to float32 and drops the casts in between, at
every optimisation level, "disable all" included: `1 * 300 * 300 / 300` answers 300 there, and infinity on a GPU, whose every
node rounds. Casts that the model itself holds are never dropped, so they are written into it here: each node's float16 inputs
are raised to float32, and its results are rounded back.

Inside a node a sum is float32, as in ONNX Runtime's CUDA kernels: cuBLAS and cuDNN are called with float32 as compute type,
and softmax and the norms accumulate in float32. Three reductions, CumSum, Sum and Einsum round inside there; they are taken
apart (see `export.verification.cuda_reductions`, `.running_sums` and `.two_by_two`). For runtimes that sum in float16, see
`export.verification.accumulators`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import onnx
from onnx import TensorProto, helper, inliner, shape_inference

from export.errors import ExportError
from export.files.format_opset import format_opset
from export.onnx_fp16.planning.node_places import TYPE_ATTRIBUTES
from export.verification.cuda_reductions import taken_apart
from export.verification.element_types import ElementTypes
from export.verification.running_sums import constants_in, is_running_sum, running_sum
from export.verification.two_by_two import two_by_two

# These move or convert values: they cannot round, so the runtime may do as it likes.
_MOVERS = """
    Cast CastLike Compress ConcatFromSequence Concat Constant ConstantOfShape DepthToSpace Expand Flatten Gather GatherElements
    GatherND Identity NonZero Optional OptionalGetElement OptionalHasElement Pad Reshape ReverseSequence Shape Size Slice
    SpaceToDepth Split SplitToSequence SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength
    Squeeze Tile Transpose Unsqueeze
"""
MOVERS = frozenset(_MOVERS.split())
BEFORE_ROUNDING = "/before_rounding"


def round_every_node(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of an fp16 model whose nodes compute in float32 and round each result to float16; its inputs and outputs stay.

    Functions are inlined; bodies of If, Loop and Scan round too. float32, float64, bfloat16 and integer nodes stay as they are.
    The types of values come from shape inference, or else from the model's own value_info; of a node that neither knows (one
    of another domain), they are guessed (`export.verification.element_types`). The copy imports ONNX's own operators always.

    Raises:
        ExportError: The model's functions cannot be inlined or its graph is not consistent, so it cannot be simulated.
    """
    try:
        inlined = inliner.inline_local_functions(model)
        typed = shape_inference.infer_shapes(inlined)
    except (shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise ExportError(f"cannot tell the types of the model's values: {str(error).splitlines()[0]}") from error
    opsets = {entry.domain: entry.version for entry in typed.opset_import}
    _rewrite(typed.graph, ElementTypes(opsets), {}, count())
    if not opsets.keys() & {"", "ai.onnx"}:
        typed.opset_import.append(helper.make_opsetid("", format_opset(typed.ir_version)))  # the casts are of these operators
    return typed


def simulated_node(node: onnx.NodeProto) -> bool:
    """Whether a node of a rounded model computes in float32 in place of a float16 one."""
    return any(name.endswith(BEFORE_ROUNDING) for name in node.output)


def _rewrite(graph: onnx.GraphProto, outer: ElementTypes, known: Mapping[str, int], numbers: Iterator[int]) -> None:
    types, constants = outer.within(graph), {**known, **constants_in(graph)}
    rounder = _Rounder(types, next(numbers))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        bodies = bodies_of(node)
        types.guess(node)
        for body in bodies:
            _rewrite(body, types, constants, numbers)
        if bodies or _only_moves(node) or not any(types.is_half(name) for name in node.input):
            nodes.append(node)
        elif is_running_sum(node, constants):
            nodes += running_sum(node, constants)
        else:
            for part in _parts(node, types.opset, numbers):
                types.guess(part)
                nodes += rounder.around(part)
    del graph.node[:]
    graph.node.extend(nodes)
    del graph.value_info[:]


def _parts(node: onnx.NodeProto, opset: int, numbers: Iterator[int]) -> list[onnx.NodeProto]:
    """What a node's kernel consists of, where it rounds inside; the node itself for any other."""
    return [part for piece in two_by_two(node, numbers) for part in taken_apart(piece, opset, numbers)]


class _Rounder:
    """Puts casts around the nodes of one graph; the scope's number keeps names apart between a graph and its bodies."""

    def __init__(self, types: ElementTypes, scope: int) -> None:
        self._types = types
        self._scope = scope
        self._raised: set[str] = set()

    def around(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The node in float32 between its casts; an input that an earlier node had raised is not raised again."""
        wide = onnx.NodeProto()
        wide.CopyFrom(node)
        for index, name in enumerate(node.input):
            if self._types.is_half(name):
                wide.input[index] = f"{name}/as_float32_{self._scope}"
                if name not in self._raised:
                    self._raised.add(name)
                    yield helper.make_node("Cast", [name], [wide.input[index]], to=TensorProto.FLOAT)
        rounded = [(index, name) for index, name in enumerate(node.output) if name and self._types.is_half(name)]
        for index, name in rounded:
            wide.output[index] = f"{name}{BEFORE_ROUNDING}"
        for attribute in wide.attribute if rounded else ():
            if attribute.name in TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
                attribute.i = TensorProto.FLOAT
        yield wide
        for index, name in rounded:
            yield helper.make_node("Cast", [wide.output[index]], [name], to=TensorProto.FLOAT16)


def _only_moves(node: onnx.NodeProto) -> bool:
    """Whether a node cannot round. A Pad of an opset before 11 can: the number it fills with is a float32 attribute."""
    holds_number = node.op_type == "Pad" and any(attribute.name == "value" for attribute in node.attribute)
    return node.op_type in MOVERS and not holds_number


def bodies_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that a node holds: branches of an If, the body of a Loop."""
    bodies: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            bodies.append(attribute.g)
        bodies += attribute.graphs
    return bodies
