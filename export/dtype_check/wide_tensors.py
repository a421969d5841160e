"""Tensors wider than the half type in a half-precision run: where each comes from and what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from halfserve.export.dtype_check.findings import FindingLog
from halfserve.export.dtype_check.inherit_dtype import FACTORIES, HELPERS
from halfserve.export.dtype_check.source_lines import SourceLine
from halfserve.export.dtype_check.watched_run import Operation, results_of, short
from halfserve.export.half_types import HalfType

Kind = Literal["factory", "hard_coded_dtype", "integer_promotion", "numbers", "upcast", "attribute", "numpy", "outside", "kept"]
OriginKey = tuple[str, SourceLine | None, str]

FIXES: dict[Kind, str] = {
    "factory": "dtype=x.dtype",
    "hard_coded_dtype": "dtype=x.dtype",
    "integer_promotion": ".to(x.dtype)",
    "numbers": ".to(x.dtype)",
    "upcast": ".to(x.dtype)",
    "attribute": "register_buffer",
    "numpy": "new_tensor(x, ...)",
    "outside": "register_buffer",
    "kept": "forward",
}

# These write into a tensor whose dtype the caller chose: rounding is intended.
ASSIGNMENTS = frozenset({
    "copy_", "_to_copy", "index_put_", "_index_put_impl_", "index_put", "index_copy_", "masked_scatter_", "scatter_",
    "select_scatter", "slice_scatter", "fill_", "masked_fill_", "masked_fill", "set_",
})  # fmt: skip

# These check dtypes themselves instead of promoting, and CUDA's kernels check more than the CPU's.
STRICT_ON_CUDA = (
    "_scaled_dot_product", "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm", "_fused",
)  # fmt: skip


# Kinds that a line of the model asks for, or that the conversion makes.
HARMLESS = frozenset({"upcast", "kept"})


class WrittenNumber(NamedTuple):
    """A number beyond the half type's range that was written into a wide tensor, at a line, in a module's forward."""

    number: float
    place: SourceLine | None
    module: str


@dataclass(eq=False, kw_only=True)
class Origin:
    """Origin of a tensor wider than the half type, and the effects of that tensor.

    Attributes:
        kind: How the tensor was made.
        what: The origin in words: "torch.zeros makes float32[2, 8]".
        place: The user's line.
        module: Dotted name of the module that was running, or that owns the tensor.
        fix: The code to write instead.
        crash: The operation that refused to mix it with half precision, and torch's error.
        refused_on_cuda: The operation that mixes it with half precision on the CPU alone.
        met: The first operation in which it made a half-precision tensor wide.
        rounded_into: The first in-place operation that rounded it into a half-precision tensor.
        joined: The first operation where, having no dimensions, it took the half dtype.
        outputs: Labels of the outputs that are wide because of it.
        met_before_output: Whether an operation with a half-precision tensor lies between it and an output.
        computed: The dtype in which the model computes because of it, or in which it returns an output.
        beyond: Numbers written into it that the half type cannot hold: they will not fit once its dtype is fixed.
    """

    kind: Kind
    what: str
    place: SourceLine | None
    module: str
    fix: str
    crash: str = ""
    refused_on_cuda: str = ""
    met: str = ""
    rounded_into: str = ""
    joined: str = ""
    outputs: list[str] = field(default_factory=list)
    met_before_output: bool = False
    computed: torch.dtype = torch.float32
    beyond: list[WrittenNumber] = field(default_factory=list)

    def report(self, log: FindingLog, half: HalfType) -> None:
        """Log the worst effect; a tensor without effect is not mentioned."""
        harmless = self.kind in HARMLESS
        if not harmless and (self.crash or self.refused_on_cuda or self.outputs or self.rounded_into or self.met):
            for number, place, module in self.beyond:
                text = f"{number:g} does not fit {half.name} (largest {half.largest:g}), which this tensor becomes once fixed"
                log.add("constant", "error", place, module, text, "mask_value(x)" if number < 0 else "finfo(x).max")
        outputs, computed = ", ".join(dict.fromkeys(self.outputs)), short(self.computed)
        # No line asks for float64 here, and it is much slower than float32; the latter is harmless if it is rounded back.
        severity: Literal["error", "warning", "note"] = "warning" if self.computed == torch.float64 else "note"
        if self.crash:
            severity, text = "error", self.crash
        elif self.refused_on_cuda:
            severity = "error"
            text = f"{self.refused_on_cuda} takes it beside {half.name} on the CPU, but CUDA's kernels want one dtype"
        elif self.outputs and self.met_before_output:
            severity = "warning"
            text = f"it meets {half.name} in {self.met}, and everything from there to {outputs} is {computed}"
        elif self.outputs:
            severity = "note" if harmless else "warning"
            text = f"{outputs} is {computed} in a {half.name} model"
        elif self.rounded_into and not harmless:
            text = f"{self.rounded_into} computes in {computed} and rounds into a {half.name} tensor in place"
        elif self.met and not harmless:
            text = f"from {self.met} on this is computed in {computed}, until it is rounded back or dropped"
        elif self.joined and self.kind in ("factory", "hard_coded_dtype", "attribute"):
            text = (
                f"it has no dimensions, so that {self.joined} takes {half.name}'s dtype; with a dimension it would be float32"
            )
        else:
            return
        log.add(self.kind, severity, self.place, self.module, f"{self.what}; {text}", self.fix)


class Lineage(NamedTuple):
    """A wide tensor's origin, and whether a half-precision tensor took part since."""

    origin: Origin
    met: bool = False


@dataclass
class WideTensorTracker:
    """The wide tensors that are alive, with their origins.

    Attributes:
        origins: The origins, one for each kind and line (or name).
    """

    origins: dict[OriginKey, Origin] = field(default_factory=dict)
    _lineages: Any = field(default_factory=WeakTensorKeyDictionary)

    def declare(self, tensor: Tensor, kind: Kind, what: str, place: SourceLine | None, module: str) -> Origin:
        """Give the origin of a tensor that no watched operation makes: an attribute, a weight that stays float32."""
        origin = self._origin(kind, what, place, module, FIXES[kind])
        self._lineages[tensor] = Lineage(origin)
        return origin

    def after(self, operation: Operation, result: Any) -> None:
        """Trace an operation's results to the wide tensors among its arguments."""
        for made in results_of(result):
            if made.dtype in operation.wide:
                self._lineages[made] = self._traced(operation, made)
            elif made.dtype == operation.dtype:
                self._settle(operation, made)

    def wrote(self, operation: Operation, result: Any, numbers: list[float]) -> None:
        """Record numbers beyond the half type's range that an operation wrote into a wide result."""
        for made in results_of(result):
            if made in self._lineages:
                written = [WrittenNumber(number, operation.place, operation.module) for number in numbers]
                self._lineages[made].origin.beyond += written

    def refused(self, operation: Operation, error: Exception) -> bool:
        """Attribute a failed operation to the wide tensor in it, if it mixes dtypes."""
        if not operation.wides or not any(tensor.dtype == operation.dtype for tensor in operation.tensors):
            return False
        origin = self._chosen(operation).origin
        origin.crash = origin.crash or f"{operation} fails: {first_line(error)}"
        return True

    def after_call(self, operation: Operation, result: Any) -> None:
        """Check attention with a wide mask beside halves: the CPU's fallback adds the mask in float32, CUDA refuses it."""
        if operation.call is None or operation.call.name != "scaled_dot_product_attention":
            return
        masks = [tensor for tensor in operation.wides if tensor.dim()]
        if masks and operation.halves and any(made.dtype == operation.dtype for made in results_of(result)):
            origin = self._known(operation, masks[0]).origin
            origin.refused_on_cuda = origin.refused_on_cuda or str(operation)

    def returned(self, tensor: Tensor, label: str, *, is_float64_in_float32_model: bool) -> None:
        """Record an output that should be half precision and is wide; a float64 output that a line asks for should not."""
        lineage = self._lineages.get(tensor)
        if lineage is not None and not (is_float64_in_float32_model and lineage.origin.kind in HARMLESS):
            lineage.origin.computed = tensor.dtype
            lineage.origin.outputs.append(label)
            lineage.origin.met_before_output |= lineage.met

    def _traced(self, operation: Operation, made: Tensor) -> Lineage:
        if not operation.wides or operation.name == "lift_fresh":
            kind, what, fix = _making(operation, made)
            return Lineage(self._origin(kind, what, operation.place, operation.module, fix))
        lineage = self._chosen(operation)
        if not operation.halves or operation.name in ASSIGNMENTS:
            return lineage
        if not lineage.origin.met:
            lineage.origin.met, lineage.origin.computed = str(operation), made.dtype
        return Lineage(lineage.origin, met=True)

    def _settle(self, operation: Operation, made: Tensor) -> None:
        self._lineages.pop(made, None)  # written in place
        if not operation.wides or not operation.halves or operation.name in ASSIGNMENTS:
            return
        origin = self._chosen(operation).origin
        if not any(tensor.dim() for tensor in operation.wides):
            origin.joined = origin.joined or str(operation)
        elif operation.name.startswith(STRICT_ON_CUDA):
            origin.refused_on_cuda = origin.refused_on_cuda or str(operation)
        elif operation.in_place and not origin.rounded_into:
            origin.rounded_into, origin.computed = str(operation), _widest(operation.wides)

    def _chosen(self, operation: Operation) -> Lineage:
        # An upcast that is not rounded back is the line to fix: fixing the other operand would leave it wide.
        lineages = [self._known(operation, tensor) for tensor in operation.wides]
        return min(lineages, key=lambda lineage: (lineage.origin.kind == "kept", lineage.origin.kind != "upcast"))

    def _known(self, operation: Operation, tensor: Tensor) -> Lineage:
        if tensor not in self._lineages:
            what = f"a {described(tensor)} comes from outside of forward"
            self.declare(tensor, "outside", what, operation.place, operation.module)
        lineage: Lineage = self._lineages[tensor]
        return lineage

    def _origin(self, kind: Kind, what: str, place: SourceLine | None, module: str, fix: str) -> Origin:
        key = (kind, place, "" if place is not None and kind != "attribute" else what)
        return self.origins.setdefault(key, Origin(kind=kind, what=what, place=place, module=module, fix=fix))


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def described(tensor: Tensor) -> str:
    """`float32[2, 8]`."""
    return f"{short(tensor.dtype)}{list(tensor.shape)}"


def first_line(error: Exception) -> str:
    """Return an exception's first line, or its type where it has no text."""
    text = str(error).strip()
    return text.splitlines()[0].removesuffix(".") if text else type(error).__name__


def _making(operation: Operation, made: Tensor) -> tuple[Kind, str, str]:
    """Return how an operation made a wide tensor: its kind, the same in words, and the fix."""
    call = operation.call
    name = call.name if call else operation.name
    whole = [tensor for tensor in operation.tensors if not tensor.is_floating_point() and not tensor.is_complex()]
    if any(tensor.dtype == operation.dtype for tensor in operation.tensors):
        kind, what = "upcast", f"{name} raises {operation.half.name} to {described(made)}"
    elif operation.name == "lift_fresh" and (call is None or call.function not in FACTORIES or _from_array(call.args)):
        kind, what = "numpy", f"an array enters as {described(made)}"
    elif whole and operation.name != "lift_fresh":
        chosen = call is not None and (
            call.kwargs.get("dtype") in operation.wide or name in ("float", "double", "to", "type", "type_as")
        )
        kind = "hard_coded_dtype" if chosen else "integer_promotion"
        what = f"{name} turns {short(whole[0].dtype)} into {described(made)}"
    elif call is not None and call.kwargs.get("dtype") in operation.wide:
        kind, what = "hard_coded_dtype", f"{name} with dtype={short(made.dtype)} makes {described(made)}"
    elif call is not None and call.function not in FACTORIES:
        kind, what = "numbers", f"{name} makes {short(made.dtype)} of Python's numbers"
    else:
        return "factory", f"torch.{name} without dtype makes {described(made)}", HELPERS.get(name, FIXES["factory"])
    return cast("Kind", kind), what, FIXES[cast("Kind", kind)]


def _from_array(args: tuple[Any, ...]) -> bool:
    return bool(args) and hasattr(args[0], "dtype") and not isinstance(args[0], torch.Tensor)
