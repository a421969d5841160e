"""Which operations compute something, in what dtypes, and what they give out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

# Communication goes on after its call has returned: its tensors must not be read. The others compute nothing.
_OTHER_NAMESPACES = {"c10d", "_c10d_functional", "c10d_functional", "prim", "profiler"}
# Memory that nobody has written to yet, or a new shape for memory that somebody has.
_COMPUTES_NOTHING = {
    "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "_unsafe_view", "empty", "empty_like",
    "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "resize_", "resize_as_",
}  # fmt: skip


@cache
def computes(op: Any) -> bool:
    """Whether an operation computes numbers: views, changes of shape, fresh memory and communication do not."""
    if not isinstance(op, OpOverload):  # an operation that takes functions, such as flex_attention
        return True
    if op.is_view or torch.Tag.inplace_view in op.tags or op.namespace in _OTHER_NAMESPACES:
        return False
    return op.namespace != "aten" or op.overloadpacket.__name__ not in _COMPUTES_NOTHING


def dtypes_of(arguments: Iterable[Any]) -> tuple[torch.dtype, ...]:
    """The dtype of each tensor, in order; a list of tensors gives each of its dtypes once."""
    found: list[torch.dtype] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument.dtype)
        elif isinstance(argument, list | tuple):
            found += dict.fromkeys(tensor.dtype for tensor in _tensors(argument))
    return tuple(found)


def outputs_of(op: Any, args: tuple[Any, ...], result: Any) -> Iterator[tuple[int, Tensor]]:
    """Yield the floating and complex tensors that an operation gave out, each with the number of the output.

    A list of tensors is one output. An operation that returns nothing gives out what it wrote to.
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
