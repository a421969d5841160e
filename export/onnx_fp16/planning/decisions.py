"""Decides which nodes stay in float32 and why, except for nodes whose weights do not fit.

ONNX allows float16 where ONNX Runtime's CPU provider cannot run it. The provider lacks float16 kernels for most operators, and
raises a node's float16 inputs to float32 by casts of its own. That does not help where there is no such input, or where a
kernel takes float16 but refuses it once it runs. Measured with ONNX Runtime 1.31.1, on ONNX's backend tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir

from halfserve.export.half_types import FP16
from halfserve.export.onnx_fp16.element_types import LAST_RAISED, first_opset_with_half
from halfserve.export.onnx_fp16.graph import (
    ELEMENTWISE,
    FLOAT,
    MOVERS,
    OPERATORS,
    all_nodes,
    bodies,
    is_container,
    is_float,
    operators,
)
from halfserve.export.onnx_fp16.named_nodes import keep_reason
from halfserve.export.onnx_fp16.planning.exact_arithmetic import keep_exact
from halfserve.export.onnx_fp16.planning.long_sums import keep_long_sums
from halfserve.export.onnx_fp16.planning.plan import KEEP_FP32, CastingPlan
from halfserve.export.onnx_fp16.planning.quantization import between_reason, nodes_between, quantized_gaps
from halfserve.export.onnx_fp16.planning.weights import weight_of
from halfserve.export.onnx_fp16.pool_windows import bound_to_kernel
from halfserve.export.placement.cuda_kernels import TypedOperator, cuda_kernels, lost_on_cuda

_TABLES = "ai.onnx.ml"
_REFUSED_WITH_REDUCTION = frozenset({"ScatterElements", "ScatterND"})
# They make floats without a float input, and have no float16 kernel.
_MAKERS = frozenset({"BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "RandomNormal", "RandomUniform"})
# These make floats too, but have a kernel for float16 inputs.
_MAKERS_LIKE = frozenset({"Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike"})
ISLAND_REASON = "moves numbers between float32 nodes"
BETWEEN_REASON = "between float32 nodes: casts would cost digits and time"


def keep_nodes(plan: CastingPlan) -> None:
    """Keep nodes in float32 for the user, a repair, exactness, quantization, an operator's signature or the runtime."""
    nodes = list(all_nodes(plan.model))
    for node in nodes:
        listed, marked = keep_reason(node, plan.settings), node.metadata_props.pop(KEEP_FP32, None)
        reason = listed or marked
        if reason is not None:
            plan.keep(node, reason)
    for node in nodes:
        if node not in plan.kept and not any(bodies(node)) and any(is_float(v) for v in (*node.inputs, *node.outputs)):
            _keep_unsupported(plan, node)
    keep_exact(plan)
    keep_long_sums(plan)
    for node in nodes_between(plan.model):
        plan.keep(node, between_reason(plan.half))
    for node, reason in quantized_gaps(plan.model, plan.half):
        plan.keep(node, reason)
    if plan.half.has_float32_range:
        keep_precise(plan)
    if plan.settings.needs_cuda_kernels:
        _keep_without_kernel(plan)


def _keep_unsupported(plan: CastingPlan, node: onnx_ir.Node) -> None:
    if node.op_type == "Cast" and not node.domain:
        return
    # On CPUs, ONNX Runtime computes float16 models as they are, and bfloat16 models only in float32.
    gap = _bound_to_float32(node) or (runtime_gap(node) if plan.half is FP16 else None)
    if gap is not None:
        plan.keep(node, gap)
    elif not plan.places[node].some:
        plan.keep(node, _no_half(plan, node))
    else:
        return
    plan.unsupported.add(node)


def _bound_to_float32(node: onnx_ir.Node) -> str | None:
    if node.domain == _TABLES:
        return f"the tables in the attributes of {node.op_type} are float32, and its input must have their type"
    return "BitCast reads the bits of float32" if node.op_type == "BitCast" and not node.domain else None


def _no_half(plan: CastingPlan, node: onnx_ir.Node) -> str:
    half = plan.half
    if plan.signature(node) is None:
        return f"the types that {node.domain}:{node.op_type} takes are unknown"
    if node.domain:
        return f"{node.domain}:{node.op_type} takes no {half.name}"
    later = first_opset_with_half(node, plan.model.opset_imports, half)
    if later is not None:
        has = plan.model.opset_imports.get("", 1)
        offer = ": --upgrade-opset (upgrade_opset=True) raises it" if half.has_float32_range and later <= LAST_RAISED else ""
        settings = plan.settings
        used = bound_to_kernel(plan.places, repair=settings.repair) if offer and settings.needs_cuda_kernels else ()
        lost = lost_on_cuda(used, has, later)
        if lost:
            offer = f"; --upgrade-opset raises it for --target cpu alone, as CUDA has no kernel for {lost[0]} of opset {later}"
        return f"{node.op_type} takes {half.name} from opset {later} on; the model has {has}{offer}"
    return f"{node.op_type} takes no {half.name}"


def _keep_without_kernel(plan: CastingPlan) -> None:
    """Keep the nodes that ONNX Runtime's CUDA provider has no kernel for in the half type."""
    half = plan.half.elem_type
    for node, places in plan.places.items():
        if node in plan.kept or any(bodies(node)) or not places.some:
            continue
        operation = TypedOperator(
            domain=node.domain,
            op_type=node.op_type,
            opset=plan.model.opset_imports.get(node.domain, 1),
            inputs=_elem_types(node.inputs, places.inputs, half),
            outputs=_elem_types(node.outputs, places.outputs, half),
        )
        if not operation.has_kernel(cuda_kernels().cuda):
            lacking = f"no {plan.half.name} kernel for {node.op_type} of opset {operation.since}"
            plan.keep(node, f"ONNX Runtime's CUDA provider has {lacking}, and refuses models with such a node")
            plan.unsupported.add(node)


def _elem_types(values: Iterable[onnx_ir.Value | None], can: Iterable[bool], half: int) -> tuple[int, ...]:
    """Return the element types once all that can is of the half type; 0 for absent values."""
    known = (0 if value is None or value.dtype is None else int(value.dtype) for value in values)
    return tuple(half if is_half else dtype for dtype, is_half in zip(known, can, strict=True))


def runtime_gap(node: onnx_ir.Node) -> str | None:
    """Return the reason why ONNX Runtime's CPU provider cannot run this node in float16; None where it can."""
    if node.domain:
        return None
    reduction = node.attributes.get_string("reduction", "none") if node.op_type in _REFUSED_WITH_REDUCTION else "none"
    if reduction != "none":
        return f"{node.op_type} with reduction {reduction!r}: ONNX Runtime's CPU provider has no float16 kernel"
    if node.op_type in _MAKERS or (node.op_type in _MAKERS_LIKE and not is_float(node.inputs[0])):
        return f"{node.op_type}: ONNX Runtime's CPU provider has no float16 kernel"
    if node.op_type == "MeanVarianceNormalization":  # its function says Pow(float16, float) before opset 13: ONNX refuses it
        return "MeanVarianceNormalization: ONNX Runtime takes it apart in float16, and its squares overflow"
    if _crashes(node):
        return "Transpose before MatMul: ONNX Runtime 1.31 crashes when it fuses the two in float16"
    return None


def _crashes(node: onnx_ir.Node) -> bool:
    """Return whether ONNX Runtime's fusion of this Transpose with the MatMul behind it crashes the process.

    It fuses a Transpose that moves the first axis to the last or the one before into a MatMul by a matrix of weights. With a
    cast between the two, as float16 needs, it reads out of bounds. In float32 it is correct.
    """
    if node.op_type != "Transpose" or node.domain:
        return False
    perm = tuple(node.attributes.get_ints("perm", ()))
    rank = len(perm)
    moved = {(*range(1, rank - 1), 0, rank - 1), (*range(1, rank), 0)}
    return (
        rank > 2 and perm in moved and any(_multiplies(user, index) for user, index in _readers_behind_casts(node.outputs[0]))
    )


def _readers_behind_casts(value: onnx_ir.Value) -> Iterator[tuple[onnx_ir.Node, int]]:
    for user, index in value.uses():
        if user.op_type in ("Cast", "Identity") and not user.domain:
            yield from _readers_behind_casts(user.outputs[0])
        else:
            yield user, index


def _multiplies(node: onnx_ir.Node, index: int) -> bool:
    if node.op_type != "MatMul" or node.domain or index != 0:
        return False
    weight = node.inputs[1]
    return weight is not None and weight.shape is not None and len(weight.shape) == 2


def settle_containers(plan: CastingPlan) -> None:
    """Keep the nodes whose sequences and optionals must stay float32, as no Cast converts them."""
    graph = plan.model.graph
    for value in (*graph.inputs, *graph.outputs):
        if is_float(value) and is_container(value) and plan.settings.keeps(value.name):
            plan.keep_group(value)
    nodes = [node for node in all_nodes(plan.model) if _containers(node)]
    for node in nodes:
        if node in plan.kept or not _all_can_be_half(plan, node):
            for value in _containers(node):
                plan.keep_group(value)
    for node in nodes:
        groups = {plan.ties.group_of(value) for value in _containers(node)}
        if groups & plan.single_groups and not (node.op_type in OPERATORS and not node.domain):
            plan.keep(node, "its sequence or optional stays float32 for another's sake: those cannot be cast")


def _containers(node: onnx_ir.Node) -> list[onnx_ir.Value]:
    values = (*node.inputs, *node.outputs)
    return [value for value in values if value is not None and is_float(value) and is_container(value)]


def _all_can_be_half(plan: CastingPlan, node: onnx_ir.Node) -> bool:
    if node.op_type in OPERATORS and not node.domain:
        return True
    places = plan.places[node]
    pairs = (*zip(node.inputs, places.inputs, strict=True), *zip(node.outputs, places.outputs, strict=True))
    return all(can for value, can in pairs if is_float(value))


def close_islands(plan: CastingPlan) -> None:
    """Keep movers between float32 nodes in float32: casts would cost time and digits.

    bfloat16 has so few digits that elementwise nodes between float32 nodes stay too. All sources and readers of such a node
    are float32, and at least one of these nodes is kept.
    """
    passing = MOVERS | (ELEMENTWISE - {"Cast"}) if plan.half.has_float32_range else MOVERS
    movers = {node for node in all_nodes(plan.model) if _is_mover(node, passing) and node not in plan.kept}
    inner = {node for node in movers if not _reads_table(plan, node)}
    pending = list(inner)
    while pending:
        node = pending.pop()
        if node in inner and not (_sources_are_single(plan, node, inner) and _readers_are_single(plan, node, inner)):
            inner.discard(node)
            pending += [near for near in _neighbours(node) if near in inner]
    reached = [node for node in inner if any(near in plan.kept for near in _neighbours(node) if _computes(near))]
    seen: set[onnx_ir.Node] = set()
    while reached:
        node = reached.pop()
        if node not in seen:
            seen.add(node)
            reached += [near for near in _neighbours(node) if near in inner]
    for node in all_nodes(plan.model):
        if node in seen:
            plan.keep(node, ISLAND_REASON if node.op_type in MOVERS else BETWEEN_REASON)


def _is_mover(node: onnx_ir.Node, movers: frozenset[str]) -> bool:
    return node.op_type in movers and not node.domain and any(is_float(value) for value in node.inputs)


def _reads_table(plan: CastingPlan, node: onnx_ir.Node) -> bool:
    """Return whether a node gathers rows of a weight. A float32 table takes twice the memory; a cast of the rows is cheap."""
    table = node.inputs[0]
    return node.op_type == "Gather" and table is not None and weight_of(plan, table) is not None


def _computes(node: onnx_ir.Node) -> bool:
    return node.op_type not in ("Cast", "Constant")


def _sources_are_single(plan: CastingPlan, node: onnx_ir.Node, inner: set[onnx_ir.Node]) -> bool:
    for value in node.inputs:
        if value is None or not is_float(value) or weight_of(plan, value) is not None:
            continue
        maker = value.producer()
        if maker is None or (maker not in inner and not _gives_single(plan, maker, value)):
            if maker is None and not plan.gives_half(value):
                continue
            return False
    return True


def _gives_single(plan: CastingPlan, maker: onnx_ir.Node, value: onnx_ir.Value) -> bool:
    if maker.op_type == "Cast" and not maker.domain:
        return True
    return not plan.gives_half(value)


def _readers_are_single(plan: CastingPlan, node: onnx_ir.Node, inner: set[onnx_ir.Node]) -> bool:
    for value in node.outputs:
        if any(user not in inner and plan.wanted(user, index) is not FLOAT for user, index in value.uses()):
            return False
        if value.is_graph_output() and not _output_is_single(plan, value):
            return False
    return True


def _output_is_single(plan: CastingPlan, value: onnx_ir.Value) -> bool:
    graph = value.graph
    if not isinstance(graph, onnx_ir.Graph):
        return False
    places = (index for index, output in enumerate(graph.outputs) if output is value)
    return all(plan.wanted_as_output(graph, index) == FLOAT for index in places)


def _neighbours(node: onnx_ir.Node) -> list[onnx_ir.Node]:
    makers = [value.producer() for value in node.inputs if value is not None and is_float(value)]
    readers = [user for value in node.outputs for user in value.consumers()]
    return [near for near in (*makers, *readers) if near is not None]


# Nodes that stay float32 because bfloat16 has 8 significant bits; see `keep_precise`.
NORM_REASON = "a norm: bfloat16 has too few digits for means and variances"
SOFTMAX_REASON = "a softmax: an exponential multiplies the error of a bfloat16 logit"
SUM_REASON = "a long sum: bfloat16 has too few digits for it"
GRID_REASON = "computes where to sample: bfloat16 holds whole numbers up to 256 only"

NORMS = operators(
    """
    BatchNormalization GroupNorm GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization
    MeanVarianceNormalization RMSNormalization SimplifiedLayerNormalization SkipGroupNorm SkipLayerNormalization
    SkipSimplifiedLayerNormalization
    """
)
SOFTMAXES = operators("LogSoftmax Softmax")
SUMS = operators(
    """
    CumSum GlobalAveragePool GlobalLpPool ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum
    ReduceSumSquare
    """
)
_REASONS = {
    **dict.fromkeys(NORMS, NORM_REASON),
    **dict.fromkeys(SOFTMAXES, SOFTMAX_REASON),
    **dict.fromkeys(SUMS, SUM_REASON),
}
# ONNX Runtime's CUDA kernels for these compute in float32; for those with Skip since microsoft/onnxruntime#28682.
_FLOAT_INSIDE = operators(
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization "
    "Softmax"
)
# Indices of the inputs that hold coordinates, by operator.
_COORDINATES = {"AffineGrid": 0, "DeformConv": 2, "GridSample": 1, "MaxRoiPool": 1, "NonMaxSuppression": 0, "RoiAlign": 1}
_DOMAINS = ("", "com.microsoft")


def keep_precise(plan: CastingPlan) -> None:
    """Keep the nodes of a bfloat16 model whose results need more digits: norms, softmax, long sums and coordinates.

    Rounding to bfloat16 moves a number by up to 2**-8 of itself, to float16 by 2**-11. Products lose little by that, as
    hardware sums them in float32. But a count of 257, the exponential of a rounded logit of 30, or the position 1001 of 1024
    pixels is visibly wrong. PyTorch's autocast keeps the same operations in float32.

    For CUDA alone, layer norms and Softmax become bfloat16 between bfloat16 nodes: their kernels compute in float32, their
    input and result are rounded anyway, and of the operator itself only scale and bias lose digits. A residual addition is
    then fused with the norm behind it. Four layers of attention: 2 casts instead of 26, an error of 0.9% instead of 0.65%.
    """
    for node in all_nodes(plan.model):
        if node.domain not in _DOMAINS:
            continue
        reason = _REASONS.get(node.op_type)
        floats = any(is_float(value) for value in (*node.inputs, *node.outputs))
        if reason is not None and floats and not _is_precise_on_cuda(plan, node):
            plan.keep(node, reason)
        for maker in _coordinate_makers(node):
            plan.keep(maker, GRID_REASON)


def _is_precise_on_cuda(plan: CastingPlan, node: onnx_ir.Node) -> bool:
    data = node.inputs[0]
    maker = data.producer() if data is not None else None
    return (
        plan.settings.target_device == "cuda"
        and node.op_type in _FLOAT_INSIDE
        and maker is not None
        and maker not in plan.kept
        and not any(value.is_graph_output() for value in node.outputs)
    )


def _coordinate_makers(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    """Yield a node that samples at coordinates, and the nodes that compute these elementwise; none for any other node."""
    place = _COORDINATES.get(node.op_type)
    if place is None or node.domain or place >= len(node.inputs):
        return
    yield node
    waiting, seen = [node.inputs[place]], {node}
    while waiting:
        value = waiting.pop()
        maker = value.producer() if value is not None and is_float(value) else None
        if maker is None or maker in seen or maker.domain or maker.op_type not in ELEMENTWISE | MOVERS | {"AffineGrid"}:
            continue
        seen.add(maker)
        yield maker
        waiting += maker.inputs
