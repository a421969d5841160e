"""Constants that float16 cannot hold, and the nodes that therefore stay in float32."""

from __future__ import annotations

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

from export.onnx_fp16.element_types.control_flow import slots_of
from export.onnx_fp16.graph_walk import FLOAT, FLOAT16, asks_for_infinity, bodies, constant_of, is_float
from export.onnx_fp16.half_tensors import WeightScan, scan
from export.onnx_fp16.planning.op_sets import ELEMENTWISE, MOVERS
from export.onnx_fp16.planning.plan import Plan

# Against these a number beyond float16's range is as good as infinity, to which it is rounded.
_COMPARING = frozenset({"Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min"})
_MASKING = frozenset({"Add", "Where", "Min", "Max", "Cast", "Mul"}) | MOVERS
_DISCRETE = frozenset({onnx_ir.DataType.BOOL, onnx_ir.DataType.INT32, onnx_ir.DataType.INT64, onnx_ir.DataType.UINT8})
_SOFTMAX = frozenset({"LogSoftmax", "Softmax"})
_LOGIC = frozenset({"And", "Not", "Or"})
_FLOAT32_MAX = float(np.finfo(np.float32).max)
# By less, float16's most negative number hides no longer; by more, it is infinite, and a row that is hidden whole is NaN.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-6, 1.0


def weight_of(plan: Plan, value: onnx_ir.Value) -> onnx_ir.TensorProtocol | None:
    """The float32 tensor that a value is, and that may be rounded in the file: a constant, or an old format's listed weight.

    Formats before IR 4 list every weight as an input because they have to, not because callers may replace it; there a weight
    is a weight unless `keep_io_types` names it. From IR 4 on an input with a default is an input.
    """
    if not is_float(value):
        return None
    tensor = constant_of(value)
    listed = value.is_initializer() and value.is_graph_input() and (plan.model.ir_version or 0) < 4
    if tensor is None and listed and not (plan.settings.keep_io_types is not True and plan.settings.keeps(value.name)):
        tensor = value.const_value
    return tensor if tensor is not None and tensor.dtype == FLOAT else None


class WeightRange:
    """Finds constants that do not fit, follows them through what only moves them, and keeps what computes with them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.scans: dict[onnx_ir.Value, WeightScan] = {}
        self._unfit: dict[onnx_ir.Value, str] = {}

    def apply(self) -> None:
        """Keep the nodes of the whole model that compute with a constant that does not fit."""
        self._visit(self._plan.model.graph)

    def _visit(self, graph: onnx_ir.Graph) -> None:
        for node in graph:
            for slot in slots_of(node):
                for value in slot.entering:
                    self._pass_on(value, slot.inside, slot.results)
            for body in bodies(node):
                self._visit(body)
            for slot in slots_of(node):
                for value in slot.leaving:
                    self._pass_on(value, slot.inside, slot.results)
            self._visit_node(node)

    def _pass_on(self, value: onnx_ir.Value, inside: list[onnx_ir.Value], results: list[onnx_ir.Value]) -> None:
        reason = self._reason(value)
        if reason is not None:
            for side in (*inside, *results):
                self._unfit[side] = reason
                self._plan.keep_group(side)

    def _visit_node(self, node: onnx_ir.Node) -> None:
        if node.op_type == "ConstantOfShape" and not node.domain:
            self._visit_fill(node)
        if node.op_type == "Pad" and not node.domain:
            self._visit_padding(node)
        for index, value in enumerate(node.inputs):
            if value is None or not is_float(value) or self._plan.wanted(node, index) is not FLOAT16:
                continue
            reason = self._reason(value)
            if reason is None or self._may_round(node, value):
                continue
            self._plan.keep(node, reason)
        if node in self._plan.kept and node.op_type in MOVERS and not node.domain:
            reason = next((text for text in map(self._known, node.inputs) if text), None)
            if reason is not None:
                self._unfit.update(dict.fromkeys(node.outputs, reason))

    def _visit_fill(self, node: onnx_ir.Node) -> None:
        fill = node.attributes.get("value")
        if fill is None or fill.type != AttributeType.TENSOR or fill.as_tensor().dtype != FLOAT:
            return
        value = node.outputs[0]
        self.scans[value] = scan(fill.as_tensor())
        reason = _unfit_reason(_constant(value), self.scans[value])
        if reason is not None and not self._may_saturate(value):
            self._unfit[value] = reason
            self._plan.keep(node, reason)

    def _visit_padding(self, node: onnx_ir.Node) -> None:
        """Before opset 11 the number that a Pad fills with is an attribute; a float16 Pad would round it."""
        number, mode = node.attributes.get("value"), node.attributes.get("mode")
        filled = mode is None or mode.as_string() == "constant"
        if number is None or not filled or not is_float(node.outputs[0]):
            return
        reason = _unfit_reason(f"the padding of {node.name!r}", scan(onnx_ir.tensor([number.as_float()], FLOAT)))
        if reason is not None:
            self._unfit[node.outputs[0]] = reason
            self._plan.keep(node, reason)

    def _known(self, value: onnx_ir.Value | None) -> str | None:
        return None if value is None else self._reason(value)

    def _reason(self, value: onnx_ir.Value) -> str | None:
        if value in self._unfit:
            return self._unfit[value]
        known = self.scan_of(value)
        return None if known is None else _unfit_reason(_constant(value), known)

    def scan_of(self, value: onnx_ir.Value) -> WeightScan | None:
        """What is known of a weight; None where the value is no weight."""
        if value not in self.scans:
            tensor = weight_of(self._plan, value)
            if tensor is None:
                return None
            self.scans[value] = scan(tensor)
        return self.scans[value]

    def _may_round(self, node: onnx_ir.Node, value: onnx_ir.Value) -> bool:
        known = self.scans.get(value)
        if known is None or not known.overflows or known.vanishes:
            return False
        if node.op_type in _COMPARING and not node.domain:
            return True
        if known.largest == _FLOAT32_MAX and _is_for_infinity(node):  # the largest number of a type, as `nan_to_num` says it
            self._plan.saturated.add(value)
            return True
        return self._may_saturate(value)

    def _may_saturate(self, value: onnx_ir.Value) -> bool:
        """Whether a constant only masks what a Softmax takes; then float16's most negative number does as well as any.

        Unless it is scaled after: then all that masks with the constant is kept, the Softmax included.
        """
        known = self.scans[value]
        uses = None if known.vanishes or not known.overflows else _uses_of_mask(value)
        if uses is None:
            return False
        if all(_hides_as_well(node, index) for node, index in uses):
            self._plan.saturated.add(value)
            return True
        for node, _ in uses:
            self._plan.keep(node, _unfit_reason(_constant(value), known) or "")
        return False


def _uses_of_mask(value: onnx_ir.Value) -> list[tuple[onnx_ir.Node, int]] | None:
    """What reads a constant up to the Softmax, nodes and inputs, if there is nothing but what masks are made with."""
    waiting, seen, found = [value], set[onnx_ir.Value](), list[tuple[onnx_ir.Node, int]]()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.is_graph_output() or not current.uses():
            return None
        for node, index in current.uses():
            if node.domain or (node.op_type == "Attention" and index != 3):
                return None
            if asks_for_infinity(node):
                continue
            found.append((node, index))
            if node.op_type in _SOFTMAX or node.op_type == "Attention":
                continue
            if node.op_type not in _MASKING or (node.op_type == "Mul" and _factors(node.inputs[1 - index]) is None):
                return None
            waiting += node.outputs
    return found


def _factors(value: onnx_ir.Value | None) -> list[onnx_ir.TensorProtocol] | None:
    """The constants of a value that comes from booleans, integers and constants alone, as masks do; else it masks nothing."""
    waiting, seen, found = [value], set[onnx_ir.Value | None](), list[onnx_ir.TensorProtocol]()
    while waiting:
        current = waiting.pop()
        if current is None or current in seen or current.dtype in _DISCRETE:
            continue
        seen.add(current)
        constant = constant_of(current)
        if constant is not None:
            found.append(constant)
            continue
        maker = current.producer()
        if maker is None or maker.domain or maker.op_type not in ELEMENTWISE | MOVERS:
            return None
        waiting += maker.inputs
    return found


def _hides_as_well(node: onnx_ir.Node, index: int) -> bool:
    """Whether float16's most negative number is as good as a lower one after a node, too."""
    factors = _factors(node.inputs[1 - index]) if node.op_type == "Mul" else None
    sizes = [np.abs(factor.numpy()) for factor in factors or () if factor.dtype not in _DISCRETE]
    return all(((size == 0) | ((size >= _SMALLEST_FACTOR) & (size <= _LARGEST_FACTOR))).all() for size in sizes)


def _is_for_infinity(node: onnx_ir.Node) -> bool:
    """Whether a Where puts something else where numbers are infinite."""
    if node.op_type != "Where" or node.domain:
        return False
    waiting, seen = [node.inputs[0]], set[onnx_ir.Value]()
    while waiting:
        current = waiting.pop()
        maker = current.producer() if current is not None else None
        if current is None or current in seen or maker is None or maker.domain:
            continue
        seen.add(current)
        if maker.op_type == "IsInf":
            return True
        if maker.op_type in _LOGIC:
            waiting += maker.inputs
    return False


def _constant(value: onnx_ir.Value) -> str:
    return f"constant {value.name!r}"


def _unfit_reason(what: str, known: WeightScan) -> str | None:
    if known.overflows:
        return f"{what} reaches {known.largest:.3g}; float16 ends at 65504"
    if known.vanishes:
        return f"{what} is at most {known.largest:.3g}; float16 rounds that to zero"
    return None
