"""The numbers of a tensor, whatever it is, in pieces that fit the memory beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

# Elements looked at at once, so that what is computed on the way takes little memory, however large the tensor is: a few times
# 4 MB on the CPU, where that fits its caches, and a few times 64 MB on an accelerator, where each piece costs some launches.
PIECE, DEVICE_PIECE = 2**20, 2**24


def absolute_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the magnitudes of a tensor's elements, real and imaginary parts apart.

    Args:
        tensor: Of any floating or complex dtype and any layout.

    Yields:
        Strided tensors with at least one element, float64 if the tensor is, else float32. Nothing where there are no numbers
        to look at (meta and fake tensors, no elements) or where the layout hides them.
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
