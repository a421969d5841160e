"""Follows every tensor that is wider than float16 through a float16 run, from its birth to where it does harm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from export.inheritance.torch_factories import FACTORIES, HELPERS
from export.leaks.birth import FIXES, Birth, Kind, Origin, Written
from export.leaks.operation import HALF, WIDE, Operation, results_of, short
from export.leaks.places import Place

# These write values into a tensor whose dtype is the caller's choice: rounding is what was asked for.
ASSIGNMENTS = frozenset({
    "copy_", "_to_copy", "index_put_", "_index_put_impl_", "index_put", "index_copy_", "masked_scatter_", "scatter_",
    "select_scatter", "slice_scatter", "fill_", "masked_fill_", "masked_fill", "set_",
})  # fmt: skip

# These promote as arithmetic does; the others look at dtypes themselves, and on CUDA more sternly than on the CPU.
STERN_ON_CUDA = (
    "_scaled_dot_product",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm",
    "_fused",
)

Key = tuple[str, Place | None, str]


@dataclass
class Provenance:
    """The wide tensors that are alive, with their origins.

    Attributes:
        births: One for each kind and line (or name).
    """

    births: dict[Key, Birth] = field(default_factory=dict)
    _origins: Any = field(default_factory=WeakTensorKeyDictionary)

    def declare(self, tensor: Tensor, kind: Kind, what: str, place: Place | None, module: str) -> Birth:
        """Say where a tensor comes from that no watched operation makes: an attribute, a weight that stays float32."""
        birth = self._birth(kind, what, place, module, FIXES[kind])
        self._origins[tensor] = Origin(birth)
        return birth

    def after(self, operation: Operation, result: Any) -> None:
        """Take an operation's results in."""
        for made in results_of(result):
            if made.dtype in WIDE:
                self._origins[made] = self._traced(operation, made)
            elif made.dtype == HALF:
                self._settle(operation, made)

    def wrote(self, operation: Operation, result: Any, numbers: list[float]) -> None:
        """Take note of numbers beyond float16's range in a result that is wide."""
        for made in results_of(result):
            if made in self._origins:
                birth = self._origins[made].birth
                birth.beyond += [Written(number, operation.place, operation.module) for number in numbers]

    def refused(self, operation: Operation, error: Exception) -> bool:
        """Blame a failed operation on the wide tensor in it, if it mixes dtypes."""
        if not operation.wides or not any(tensor.dtype == HALF for tensor in operation.tensors):
            return False
        birth = self._chosen(operation).birth
        birth.crash = birth.crash or f"{operation} fails: {first_line(error)}"
        return True

    def after_call(self, operation: Operation, result: Any) -> None:
        """Look at a whole function that takes a wide mask beside float16 on the CPU, where a fallback adds it in float32."""
        if operation.call is None or operation.call.name != "scaled_dot_product_attention":
            return
        masks = [tensor for tensor in operation.wides if tensor.dim()]
        if masks and operation.halves and any(made.dtype == HALF for made in results_of(result)):
            birth = self._known(operation, masks[0]).birth
            birth.refused_on_cuda = birth.refused_on_cuda or str(operation)

    def returned(self, tensor: Tensor, label: str) -> None:
        """Take note of an output that should be float16 and is not."""
        origin = self._origins.get(tensor)
        if origin is not None:
            origin.birth.outputs.append(label)
            origin.birth.met_before_output |= origin.met

    def _traced(self, operation: Operation, made: Tensor) -> Origin:
        if not operation.wides or operation.name == "lift_fresh":
            return Origin(self._born(operation, made))
        origin = self._chosen(operation)
        if not operation.halves or operation.name in ASSIGNMENTS:
            return origin
        origin.birth.met = origin.birth.met or str(operation)
        return Origin(origin.birth, met=True)

    def _settle(self, operation: Operation, made: Tensor) -> None:
        self._origins.pop(made, None)  # written in place
        if not operation.wides or not operation.halves or operation.name in ASSIGNMENTS:
            return
        birth = self._chosen(operation).birth
        if not any(tensor.dim() for tensor in operation.wides):
            birth.joined = birth.joined or str(operation)
        elif operation.name.startswith(STERN_ON_CUDA):
            birth.refused_on_cuda = birth.refused_on_cuda or str(operation)
        elif operation.in_place:
            birth.rounded_into = birth.rounded_into or str(operation)

    def _chosen(self, operation: Operation) -> Origin:
        # An upcast that stays up is the one to mend: mending what it meets would leave it up.
        origins = [self._known(operation, tensor) for tensor in operation.wides]
        ranked = sorted(origins, key=lambda origin: (origin.birth.kind == "kept", origin.birth.kind != "upcast"))
        return ranked[0]

    def _known(self, operation: Operation, tensor: Tensor) -> Origin:
        if tensor not in self._origins:
            what = f"a {described(tensor)} comes from outside of forward"
            self.declare(tensor, "outside", what, operation.place, operation.module)
        origin: Origin = self._origins[tensor]
        return origin

    def _born(self, operation: Operation, made: Tensor) -> Birth:
        kind, what, fix = _story(operation, made)
        return self._birth(kind, what, operation.place, operation.module, fix)

    def _birth(self, kind: Kind, what: str, place: Place | None, module: str, fix: str) -> Birth:
        key = (kind, place, "" if place is not None and kind != "attribute" else what)
        return self.births.setdefault(key, Birth(kind=kind, what=what, place=place, module=module, fix=fix))


def described(tensor: Tensor) -> str:
    """`float32[2, 8]`."""
    return f"{short(tensor.dtype)}{list(tensor.shape)}"


def first_line(error: Exception) -> str:
    """An exception's first line, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0].removesuffix(".") if text else type(error).__name__


def _story(operation: Operation, made: Tensor) -> tuple[Kind, str, str]:
    """What kind of birth an operation is, in words, and what mends it."""
    call = operation.call
    name = call.name if call else operation.name
    whole = [tensor for tensor in operation.tensors if not tensor.is_floating_point() and not tensor.is_complex()]
    if any(tensor.dtype == HALF for tensor in operation.tensors):
        kind, what = "upcast", f"{name} raises float16 to {described(made)}"
    elif operation.name == "lift_fresh" and (call is None or call.function not in FACTORIES or _from_array(call.args)):
        kind, what = "numpy", f"an array enters as {described(made)}"
    elif whole and operation.name != "lift_fresh":
        chosen = call is not None and (call.kwargs.get("dtype") in WIDE or name in ("float", "double", "to", "type", "type_as"))
        kind = "hard_coded_dtype" if chosen else "integer_promotion"
        what = f"{name} turns {short(whole[0].dtype)} into {described(made)}"
    elif call is not None and call.kwargs.get("dtype") in WIDE:
        kind, what = "hard_coded_dtype", f"{name} is told to make {described(made)}"
    elif call is not None and call.function not in FACTORIES:
        kind, what = "numbers", f"{name} makes {short(made.dtype)} of Python's numbers"
    else:
        return "factory", f"torch.{name} without dtype makes {described(made)}", HELPERS.get(name, FIXES["factory"])
    return cast("Kind", kind), what, FIXES[cast("Kind", kind)]


def _from_array(args: tuple[Any, ...]) -> bool:
    return bool(args) and hasattr(args[0], "dtype") and not isinstance(args[0], torch.Tensor)
