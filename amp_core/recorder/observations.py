"""The magnitudes seen in the recorded steps, by operation; keeps no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from halfserve.amp_core.recorder.record import (
    LARGEST,
    SMALLEST_NORMAL,
    SMALLEST_SUBNORMAL,
    Direction,
    Magnitudes,
    RecordEntry,
    unscaled,
)

# Communication continues after its call has returned: its tensors must not be read. The others compute nothing.
_OTHER_NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional", "prim", "profiler"}
# Uninitialized memory, or a new shape for existing memory.
_COMPUTES_NOTHING = {
    "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "_unsafe_view", "empty", "empty_like",
    "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "resize_", "resize_as_",
}  # fmt: skip


@cache
def computes(op: Any) -> bool:
    """Return whether an operation computes values: views, changes of shape, fresh memory and communication do not."""
    if not isinstance(op, OpOverload):  # an operation that takes functions, such as flex_attention
        return True
    if op.is_view or torch.Tag.inplace_view in op.tags or op.namespace in _OTHER_NAMESPACES:
        return False
    return op.namespace != "aten" or op.overloadpacket.__name__ not in _COMPUTES_NOTHING


def dtypes_of(arguments: Iterable[Any]) -> tuple[torch.dtype, ...]:
    """Return the dtype of each tensor, in order; a list of tensors gives each of its dtypes once."""
    found: list[torch.dtype] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument.dtype)
        elif isinstance(argument, list | tuple):
            found += dict.fromkeys(tensor.dtype for tensor in _tensors(argument))
    return tuple(found)


def outputs_of(op: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the floating and complex outputs of an operation, each with its index.

    A list of tensors is one output. The outputs of an operation that returns nothing are the tensors that it writes to.
    """
    if isinstance(result, Tensor):
        outputs: Iterable[Any] = (result,)
    elif isinstance(result, list):
        outputs = (result,)
    elif result is None or result == ():
        outputs = _written(op, args)
    else:
        outputs = result if isinstance(result, tuple) else ()
    for number, output in enumerate(outputs):
        for tensor in _tensors((output,)):
            if tensor.is_floating_point() or tensor.is_complex():
                yield number, tensor


def _written(op: Any, args: tuple[Any, ...]) -> list[Any]:
    if not isinstance(op, OpOverload):
        return []
    schema = op._schema.arguments  # noqa: SLF001  (torch has no public way)
    return [value for argument, value in zip(schema, args, strict=False) if argument.is_write]


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


# Elements per piece, to bound the temporary memory: a few times 4 MB on the CPU, which fits its caches, and a few times 64 MB
# on an accelerator, where each piece costs some kernel launches.
PIECE, DEVICE_PIECE = 2**20, 2**24


def absolute_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the magnitudes of a floating or complex tensor's elements in pieces, real and imaginary parts apart.

    The pieces are strided, with at least one element, float64 if the tensor is, else float32. There are none for tensors
    without values (meta and fake tensors, no elements) or with a layout that hides them.
    """
    values = _stored(tensor)
    if values is None or not values.numel():
        return
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    most = PIECE if values.is_cpu else DEVICE_PIECE
    if values.numel() <= most:
        yield _absolute(values)
        return
    for piece in _pieces(values, most):
        yield from absolute_parts(piece)


def _stored(tensor: Tensor) -> Tensor | None:
    kind: type[Any] = type(tensor)
    if tensor.is_meta or tensor.is_nested or issubclass(kind, FakeTensor) or is_traceable_wrapper_subclass_type(kind):
        return None
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()  # noqa: SLF001  (values() refuses a gradient that is not coalesced)
    if tensor.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return tensor.values()
    return None


def _pieces(values: Tensor, most: int) -> tuple[Tensor, ...]:
    """At least two views of a large tensor."""
    flat = values.view(-1) if values.is_contiguous() else values
    longest = max(range(flat.ndim), key=flat.size)  # flattening what is not contiguous would copy all of it
    return flat.chunk(-(-flat.numel() // most), longest)


def _absolute(values: Tensor) -> Tensor:
    if values.dtype in {torch.float32, torch.float64}:
        return values.abs()
    return values.float().abs_()


class HostMagnitudes:
    """Running magnitudes of CPU tensors: the extremes are read at once.

    Most counts follow from the extremes, so values that are all in float16's normal range cost one reduction.
    """

    def __init__(self) -> None:
        self._elements = self._non_finite = self._zeros = self._overflow = self._underflow = self._subnormal = 0
        self._largest, self._smallest = 0.0, math.inf

    def add(self, magnitudes: Tensor) -> None:
        """Add magnitudes: float32 or float64, at least one element."""
        self._elements += magnitudes.numel()
        low, high = _extremes(magnitudes)
        if not math.isfinite(high):
            finite = magnitudes[magnitudes <= torch.finfo(magnitudes.dtype).max]
            self._non_finite += magnitudes.numel() - finite.numel()
            if not finite.numel():
                return
            magnitudes = finite
            low, high = _extremes(magnitudes)
        self._add_finite(magnitudes, low, high)

    def _add_finite(self, magnitudes: Tensor, low: float, high: float) -> None:
        zeros = 0
        if low == 0:
            zeros = magnitudes.numel() - int(magnitudes.count_nonzero())
            self._zeros += zeros
            if high == 0:
                return
            low = torch.where(magnitudes == 0, math.inf, magnitudes).amin().item()
        self._smallest, self._largest = min(self._smallest, low), max(self._largest, high)
        if high > LARGEST:
            self._overflow += int((magnitudes > LARGEST).count_nonzero())
        if low < SMALLEST_NORMAL:
            below_normal = int((magnitudes < SMALLEST_NORMAL).count_nonzero()) - zeros
            below_all = int((magnitudes < SMALLEST_SUBNORMAL).count_nonzero()) - zeros if low < SMALLEST_SUBNORMAL else 0
            self._underflow += below_all
            self._subnormal += below_normal - below_all

    def result(self) -> Magnitudes:
        return Magnitudes(
            elements=self._elements,
            non_finite=self._non_finite,
            zeros=self._zeros,
            overflow=self._overflow,
            underflow=self._underflow,
            subnormal=self._subnormal,
            largest=self._largest or None,
            smallest=self._smallest if self._largest else None,
        )


class DeviceMagnitudes:
    """Running magnitudes of accelerator tensors, summed on the device; only `result` waits for it."""

    def __init__(self) -> None:
        self._elements = 0
        self._sums: tuple[Tensor, Tensor] | None = None

    def add(self, magnitudes: Tensor) -> None:
        """Add magnitudes: float32 or float64, at least one element, all on one device."""
        self._elements += magnitudes.numel()
        high = torch.where(magnitudes <= torch.finfo(magnitudes.dtype).max, magnitudes, 0)
        low = torch.where(high > 0, high, math.inf)
        classes = (~magnitudes.isfinite(), high > 0, high > LARGEST, low < SMALLEST_NORMAL, low < SMALLEST_SUBNORMAL)
        counts = torch.stack([which.sum() for which in classes])
        extremes = torch.stack([high.amax(), -low.amin()])
        if self._sums is not None:
            counts, extremes = self._sums[0] + counts, torch.maximum(self._sums[1], extremes)
        self._sums = (counts, extremes)

    def result(self) -> Magnitudes:
        if self._sums is None:
            return Magnitudes()
        non_finite, non_zero, overflow, below_normal, below_all = (int(count) for count in self._sums[0].tolist())
        largest, smallest = self._sums[1].tolist()
        return Magnitudes(
            elements=self._elements,
            non_finite=non_finite,
            zeros=self._elements - non_finite - non_zero,
            overflow=overflow,
            underflow=below_all,
            subnormal=below_normal - below_all,
            largest=largest if non_zero else None,
            smallest=-smallest if non_zero else None,
        )


def _extremes(magnitudes: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(magnitudes)
    return low.item(), high.item()


_Key = tuple[str, Any, Direction, int, tuple[torch.dtype, ...], torch.dtype, torch.device, float]


@dataclass
class _Seen:
    magnitudes: HostMagnitudes | DeviceMagnitudes
    calls: int = 0


class Observations:
    """Outputs of operations, by module, operation, direction, dtypes, device and loss scale."""

    def __init__(self) -> None:
        self._seen: dict[_Key, _Seen] = {}

    def add(
        self, where: tuple[str, Direction], op: Any, inputs: tuple[torch.dtype, ...], number: int, output: Tensor, scale: float
    ) -> None:
        """Note one output of one call."""
        key = (where[0], op, where[1], number, inputs, output.dtype, output.device, scale)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(HostMagnitudes() if output.is_cpu else DeviceMagnitudes())
        seen.calls += 1
        for part in absolute_parts(output):
            seen.magnitudes.add(part)

    def entries(self) -> Iterator[RecordEntry]:
        """Yield an entry for each key; waits for the devices."""
        for key, seen in tuple(self._seen.items()):
            yield _entry(key, seen)


def _entry(key: _Key, seen: _Seen) -> RecordEntry:
    module, op, direction, output, inputs, dtype, _, scale = key
    magnitudes, divisor = seen.magnitudes.result(), scale if direction == "backward" else 1.0
    return RecordEntry(
        module=module,
        op=str(op),
        direction=direction,
        output=output,
        inputs=tuple(_name(given) for given in inputs),
        dtype=_name(dtype),
        calls=seen.calls,
        magnitudes=magnitudes,
        unscaled_largest=unscaled(magnitudes.largest, divisor),
        unscaled_smallest=unscaled(magnitudes.smallest, divisor),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
