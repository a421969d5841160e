"""Weights: scans of what rounding does to them, the rounding itself, and the nodes kept for constants that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx_ir
from onnx_ir import AttributeType

from halfserve.export.half_types import FP16, HalfType, WeightLedger, ledger_of
from halfserve.export.onnx_fp16.graph import (
    ELEMENTWISE,
    FLOAT,
    MOVERS,
    asks_for_infinity,
    bodies,
    constant_of,
    is_float,
    slots_of,
)
from halfserve.export.onnx_fp16.planning.plan import CastingPlan

Array: TypeAlias = np.ndarray[Any, Any]
_CHUNK_ELEMENTS = 1 << 19  # 2 MB of float32
# In a comparison, a number beyond float16's range is equivalent to the infinity to which it is rounded.
_COMPARING = frozenset({"Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min"})
_MASKING = frozenset({"Add", "Where", "Min", "Max", "Cast", "Mul"}) | MOVERS
_DISCRETE = frozenset({onnx_ir.DataType.BOOL, onnx_ir.DataType.INT32, onnx_ir.DataType.INT64, onnx_ir.DataType.UINT8})
_SOFTMAX = frozenset({"LogSoftmax", "Softmax"})
_LOGIC = frozenset({"And", "Not", "Or"})
_FLOAT32_MAX = float(np.finfo(np.float32).max)
# By a smaller factor, float16's most negative number no longer hides; by a larger one, it is infinite, and a hidden row NaN.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-6, 1.0


@dataclass(frozen=True, kw_only=True)
class WeightScan:
    """Statistics of a weight.

    Attributes:
        elements: The number of elements.
        ledger: Counts of what rounding does.
        nonzero: The number of elements that are not zero.
        largest: The largest finite magnitude; 0 where there is none.
    """

    elements: int
    ledger: WeightLedger
    nonzero: int
    largest: float

    @property
    def overflows(self) -> bool:
        """Whether a finite element is beyond the half type's range."""
        return self.ledger.overflow > 0

    @property
    def vanishes(self) -> bool:
        """Whether every element becomes zero, and some were not."""
        return 0 < self.nonzero == self.ledger.flushed


def scan(tensor: onnx_ir.TensorProtocol, half: HalfType = FP16) -> WeightScan:
    """Scan a float32 tensor, 2 MB at a time."""
    total, nonzero, largest = WeightLedger(), 0, 0.0
    flat = np.ravel(tensor.numpy())
    for start in range(0, flat.size, _CHUNK_ELEMENTS):
        chunk = flat[start : start + _CHUNK_ELEMENTS]
        magnitude = np.abs(chunk)
        positive = magnitude[magnitude > 0]  # NaN is not
        finite = positive[np.isfinite(positive)]
        nonzero += positive.size + int(np.isnan(magnitude).sum())
        largest = max(largest, float(finite.max(initial=0.0)))
        total += ledger_of(chunk, half)
    return WeightScan(elements=tensor.size, ledger=total, nonzero=nonzero, largest=largest)


def halved(tensor: onnx_ir.TensorProtocol, half: HalfType, *, saturate: bool) -> onnx_ir.TensorProtocol:
    """Return the float32 tensor in half precision; one that lies in a file is read and rounded at each access, and never held.

    With `saturate`, finite values beyond the type's range become its largest number, instead of infinity. They always do in a
    type of float32's range, where they are within a rounding of that number.
    """
    change = partial(half.narrowed, saturate=saturate or half.has_float32_range)
    return _changed(tensor, change, onnx_ir.DataType(half.elem_type))


def narrowed(tensor: onnx_ir.TensorProtocol) -> onnx_ir.TensorProtocol:
    """Return a float64 tensor in float32; one that lies in a file is read at each access, and never held.

    Finite numbers stay finite, and numbers other than zero stay so: a mask of -1.8e308, an epsilon of 1e-300.
    """
    return _changed(tensor, _single, FLOAT)


def _single(values: Array) -> Array:
    limit, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = np.asarray(values).astype(np.float32)
    result = np.where(np.isinf(result) & np.isfinite(values), np.copysign(limit, result), result)
    return np.where((result == 0) & (values != 0), np.copysign(least, result), result)


def _changed(
    tensor: onnx_ir.TensorProtocol, change: Callable[[Array], Array], dtype: onnx_ir.DataType
) -> onnx_ir.TensorProtocol:
    texts: dict[str, Any] = {
        "name": tensor.name,
        "doc_string": tensor.doc_string,
        "metadata_props": dict(tensor.metadata_props),
    }

    def changed() -> onnx_ir.TensorProtocol:
        return onnx_ir.Tensor(change(tensor.numpy()), dtype=dtype, **texts)

    if not isinstance(tensor, onnx_ir.ExternalTensor | onnx_ir.LazyTensor):
        return changed()
    return onnx_ir.LazyTensor(changed, dtype=dtype, shape=onnx_ir.Shape(tensor.shape.numpy()), cache=False, **texts)


def weight_of(plan: CastingPlan, value: onnx_ir.Value) -> onnx_ir.TensorProtocol | None:
    """Return the float32 tensor of a constant, which may be rounded in the file; None for any other value.

    Formats before IR 4 must list every weight as an input; there an input with a default is a weight unless `keep_io_types`
    names it. From IR 4 on it is an input.
    """
    if not is_float(value):
        return None
    tensor = constant_of(value)
    listed = value.is_initializer() and value.is_graph_input() and (plan.model.ir_version or 0) < 4
    if tensor is None and listed and not (plan.settings.keep_io_types is not True and plan.settings.keeps(value.name)):
        tensor = value.const_value
    return tensor if tensor is not None and tensor.dtype == FLOAT else None


class WeightRange:
    """Finds constants that do not fit the half type, follows them through movers, and keeps what computes with them."""

    def __init__(self, plan: CastingPlan) -> None:
        self._plan = plan
        self._half = plan.half
        self.scans: dict[onnx_ir.Value, WeightScan] = {}
        self._unfit: dict[onnx_ir.Value, str] = {}

    def apply(self) -> None:
        """Keep the nodes that compute with a constant that does not fit."""
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
            if value is None or not is_float(value) or self._plan.wanted(node, index) != self._plan.half_dtype:
                continue
            reason = self._reason(value)
            if reason is None or self._may_round(node, value):
                continue
            self._plan.keep(node, reason)
        if node in self._plan.kept and node.op_type in MOVERS and not node.domain:
            reason = next((text for value in node.inputs if value is not None and (text := self._reason(value))), None)
            if reason is not None:
                self._unfit.update(dict.fromkeys(node.outputs, reason))

    def _visit_fill(self, node: onnx_ir.Node) -> None:
        fill = node.attributes.get("value")
        if fill is None or fill.type != AttributeType.TENSOR or fill.as_tensor().dtype != FLOAT:
            return
        value = node.outputs[0]
        self.scans[value] = scan(fill.as_tensor(), self._half)
        reason = self._unfit_reason(_constant(value), self.scans[value])
        if reason is not None and not self._may_saturate(value):
            self._unfit[value] = reason
            self._plan.keep(node, reason)

    def _visit_padding(self, node: onnx_ir.Node) -> None:
        """Keep a Pad whose fill value does not fit; before opset 11 it is an attribute."""
        number, mode = node.attributes.get("value"), node.attributes.get("mode")
        filled = mode is None or mode.as_string() == "constant"
        if number is None or not filled or not is_float(node.outputs[0]):
            return
        reason = self._unfit_reason(
            f"the padding of {node.name!r}", scan(onnx_ir.tensor([number.as_float()], FLOAT), self._half)
        )
        if reason is not None:
            self._unfit[node.outputs[0]] = reason
            self._plan.keep(node, reason)

    def _reason(self, value: onnx_ir.Value) -> str | None:
        if value in self._unfit:
            return self._unfit[value]
        known = self.scan_of(value)
        return None if known is None else self._unfit_reason(_constant(value), known)

    def scan_of(self, value: onnx_ir.Value) -> WeightScan | None:
        """Return the statistics of a weight; None where the value is no weight."""
        if value not in self.scans:
            tensor = weight_of(self._plan, value)
            if tensor is None:
                return None
            self.scans[value] = scan(tensor, self._half)
        return self.scans[value]

    def _may_round(self, node: onnx_ir.Node, value: onnx_ir.Value) -> bool:
        known = self.scans.get(value)
        if known is None or not known.overflows or known.vanishes:
            return False
        if node.op_type in _COMPARING and not node.domain:
            return True
        if known.largest == _FLOAT32_MAX and _is_for_infinity(node):  # nan_to_num
            self._plan.saturated.add(value)
            return True
        return self._may_saturate(value)

    def _may_saturate(self, value: onnx_ir.Value) -> bool:
        """Return whether a constant only masks a Softmax's input, where float16's most negative number is equivalent.

        If the mask is scaled afterwards it is not: then all nodes up to the Softmax are kept.
        """
        known = self.scans[value]
        uses = None if known.vanishes or not known.overflows else _uses_of_mask(value)
        if uses is None:
            return False
        if all(_hides_as_well(node, index) for node, index in uses):
            self._plan.saturated.add(value)
            return True
        for node, _ in uses:
            self._plan.keep(node, self._unfit_reason(_constant(value), known) or "")
        return False

    def _unfit_reason(self, what: str, known: WeightScan) -> str | None:
        if self._half.has_float32_range:
            return None
        if known.overflows:
            return f"{what} reaches {known.largest:.3g}; {self._half.name} ends at {self._half.largest:g}"
        if known.vanishes:
            return f"{what} is at most {known.largest:.3g}; {self._half.name} rounds that to zero"
        return None


def _uses_of_mask(value: onnx_ir.Value) -> list[tuple[onnx_ir.Node, int]] | None:
    """Return the readers of a constant up to the Softmax, with input indices; None if one of them is no part of a mask."""
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
    """Return the constants of a value computed from booleans, integers and constants alone, as masks are; None for any other
    value.
    """
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
    """Return whether float16's most negative number hides as much as a lower one behind a node, too."""
    factors = _factors(node.inputs[1 - index]) if node.op_type == "Mul" else None
    sizes = [np.abs(factor.numpy()) for factor in factors or () if factor.dtype not in _DISCRETE]
    return all(((size == 0) | ((size >= _SMALLEST_FACTOR) & (size <= _LARGEST_FACTOR))).all() for size in sizes)


def _is_for_infinity(node: onnx_ir.Node) -> bool:
    """Return whether a Where replaces infinite numbers."""
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
