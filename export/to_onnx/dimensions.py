"""Input sizes that may vary: their names and limits."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfserve.export.export_errors import ExportError
from halfserve.export.to_onnx.forward_call import ForwardCall

BATCH = "batch"
UNBOUNDED = 2**31
_MULTIPLE = re.compile(r"(?:([1-9]\d*)\*)?(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """The sizes that may vary.

    Attributes:
        axes: The dimension names by axis, for each input in order.
        dims: The dimensions for `torch.export`, by name: a `Dim`, or a hint (`Dim.DYNAMIC`, `Dim.AUTO`).
        free: Names without limits of the caller: the model's own limits hold.
    """

    axes: tuple[dict[int, str], ...]
    dims: dict[str, Any]
    free: frozenset[str]

    def for_torch(self) -> tuple[dict[int, Any] | None, ...]:
        """Return the `dynamic_shapes` of `torch.export.export`, one entry per input."""
        return tuple({axis: self.dims[name] for axis, name in axes.items()} or None for axes in self.axes)

    def limited(self, name: str, least: int, most: int | None) -> Dimensions:
        """Return a copy with limits for one name."""
        known = self.dims[name]
        dim = torch.export.Dim(name, min=least, max=most)
        return self if (dim.min, dim.max) == (known.min, known.max) else replace(self, dims={**self.dims, name: dim})

    def left_out(self, call: ForwardCall) -> str:
        """Advice on fixed axes that have the same size as a dimension in the example, and may have been forgotten; else ""."""
        named = {name: size for name, size in self._sizes(call).items() if name != BATCH and size > 1}
        options = [
            f"--dynamic {input_name}.{axis}={name}"
            for input_name, tensor, axes in zip(call.names, call.tensors, self.axes, strict=True)
            for axis, size in enumerate(tensor.shape)
            for name in named
            if axis not in axes and size == named[name] and name not in axes.values()
        ]
        if not options:
            return ""
        return f"in the samples, more inputs have a size that is to vary, and theirs stays fixed; try {' '.join(options)} too"

    def _sizes(self, call: ForwardCall) -> dict[str, int]:
        """Return the size of each dimension in the example."""
        return {
            name: tensor.shape[axis]
            for tensor, axes in zip(call.tensors, self.axes, strict=True)
            for axis, name in axes.items()
        }

    def distinct(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return example tensors in which no two names have equal sizes, which `torch.export` would merge; enlarged where
        needed.
        """
        taken: set[int] = set()
        for name in self.dims:
            size = next(
                t.shape[axis] for t, axes in zip(tensors, self.axes, strict=True) for axis in axes if axes[axis] == name
            )
            step = step_of(self.dims[name])
            more = next(more for more in range(len(taken) + 1) if size + more * step not in taken)
            tensors = self.enlarged(tensors, name, more)
            taken.add(size + more * step)
        return tensors

    def enlarged(self, tensors: Sequence[Tensor], name: str, more: int) -> tuple[Tensor, ...]:
        """Return the tensors with `more` steps of elements, repeated from the front, along every axis of that name."""
        rows, grown = more * step_of(self.dims[name]), []
        for tensor, axes in zip(tensors, self.axes, strict=True):
            larger = tensor
            for axis in (axis for axis, called in axes.items() if called == name):
                larger = torch.cat([larger, larger.narrow(axis, 0, min(rows, larger.shape[axis]))], dim=axis)
            grown.append(larger)
        return tuple(grown)


def dimensions(call: ForwardCall, dynamic_shapes: Any) -> tuple[Dimensions, tuple[Tensor, ...]]:
    """Parse the caller's `dynamic_shapes`.

    Args:
        call: The example call.
        dynamic_shapes: None (the first dimension of every input is "batch"), a sequence with an entry per input, or a mapping
            from input names to entries. An entry is None, `{axis: size}` or a sequence with a size per axis; a size is a name,
            a multiple (`"4*height"`), a `torch.export.Dim` with limits, one of its hints, or None.

    Returns:
        The dimensions, and the example tensors, repeated once along dynamic axes of size 1, which `torch.export` takes for a
        constant.

    Raises:
        ExportError: An entry does not fit its input, or one name stands for two sizes.
    """
    entries = _entries(call, dynamic_shapes)
    dims: dict[str, Any] = {}
    free: set[str] = set()
    axes = []
    for input_name, tensor, entry in zip(call.names, call.tensors, entries, strict=True):
        named: dict[int, str] = {}
        for axis, size in _sizes(input_name, tensor, entry):
            name = _name(input_name, axis, size)
            named[axis] = name
            if isinstance(size, str):
                free.add(name)
                dims[name] = _named(name, step_in(size), dims.get(name))
            else:
                dims[name] = size
        axes.append(named)
    _require_one_size(call, axes)
    _require_multiples(call, axes, dims)
    free -= {name for name, dim in dims.items() if not _is_plain(dim)}
    return Dimensions(axes=tuple(axes), dims=dims, free=frozenset(free)), _at_least_two(call.tensors, axes, dims)


def step_of(dim: Any) -> int:
    """Return the step of a size: 4 for `4 * torch.export.Dim(...)`."""
    rule = getattr(dim, "fn", None)
    return 1 if rule is None else int(rule(2)) - int(rule(1))


def step_in(size: str) -> int:
    """4 for "4*height"; 1 for a bare name."""
    found = _MULTIPLE.fullmatch(size)
    return int(found[1]) if found is not None and found[1] else 1


def base_name(size: str) -> str:
    """Return the name `height` in "4*height"."""
    found = _MULTIPLE.fullmatch(size)
    return found[2] if found is not None else size


def _named(name: str, step: int, known: Any) -> Any:
    """Return the dimension of a name, which another axis may have defined, bare or as a multiple."""
    if known is not None and (step == 1 or step == step_of(known)):
        return known
    if known is not None and step_of(known) > 1:
        raise ExportError(f"dimension {name!r} is a multiple of {step_of(known)} in one place and of {step} in another")
    return step * torch.export.Dim(f"_{name}", min=1) if step > 1 else torch.export.Dim(name, min=1)


def _entries(call: ForwardCall, dynamic_shapes: Any) -> Sequence[Any]:
    if dynamic_shapes is None:
        return [{0: BATCH} if tensor.dim() else None for tensor in call.tensors]
    if isinstance(dynamic_shapes, Mapping):
        unknown = next((name for name in dynamic_shapes if name not in call.names), None)
        if unknown is not None:
            raise ExportError(f"dynamic_shapes names {unknown!r}; the inputs are {', '.join(call.names)}")
        return [dynamic_shapes.get(name) for name in call.names]
    if not isinstance(dynamic_shapes, Sequence) or len(dynamic_shapes) not in (0, len(call.names)):
        raise ExportError(
            f"dynamic_shapes must have an entry for each of the {len(call.names)} inputs ({', '.join(call.names)}), or be () "
            "to fix every size"
        )
    return dynamic_shapes or [None] * len(call.names)


def _sizes(input_name: str, tensor: Tensor, entry: Any) -> list[tuple[int, Any]]:
    pairs = list(entry.items()) if isinstance(entry, Mapping) else list(enumerate(entry or ()))
    found = []
    for axis, size in pairs:
        if not isinstance(axis, int) or not -tensor.dim() <= axis < tensor.dim():
            raise ExportError(f"dynamic_shapes of {input_name!r} has axis {axis!r}; its shape is {tuple(tensor.shape)}")
        if size is not None and not isinstance(size, int) and size is not torch.export.Dim.STATIC:
            found.append((axis % tensor.dim(), size))
    return found


def _name(input_name: str, axis: int, size: Any) -> str:
    if isinstance(size, str):
        if not base_name(size).isidentifier():
            raise ExportError(f"{size!r} is no name for a dimension; expected letters, digits and _, such as {BATCH!r}")
        return base_name(size)
    if isinstance(size, torch.export.Dim):
        return size.__name__
    if size in (torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO):
        return f"{input_name.replace('.', '_')}_dim_{axis}"
    raise ExportError(f"dynamic_shapes of {input_name!r} has {size!r} at axis {axis}; expected a name or a torch.export.Dim")


def _is_plain(dim: Any) -> bool:
    return isinstance(dim, torch.export.Dim) and dim.min <= 1 and dim.max >= UNBOUNDED


def _require_one_size(call: ForwardCall, axes: Sequence[dict[int, str]]) -> None:
    first: dict[str, tuple[str, int]] = {}
    for input_name, tensor, named in zip(call.names, call.tensors, axes, strict=True):
        for axis, name in named.items():
            size = tensor.shape[axis]
            other, known = first.setdefault(name, (input_name, size))
            if size != known or size < 1:
                raise ExportError(
                    f"dimension {name!r} must be one size in every input, at least 1; it is {known} in {other!r} and {size} in "
                    f"{input_name!r} (sizes that vary by themselves need names of their own)"
                )


def _require_multiples(call: ForwardCall, axes: Sequence[dict[int, str]], dims: Mapping[str, Any]) -> None:
    for input_name, tensor, named in zip(call.names, call.tensors, axes, strict=True):
        for axis, name in named.items():
            dim, size = dims[name], tensor.shape[axis]
            if step_of(dim) > 1 and (size - dim.fn(0)) % step_of(dim):
                raise ExportError(
                    f"dimension {name!r} must be {dim.__name__}, with a whole number; it is {size} in {input_name!r}"
                )


def _at_least_two(tensors: Sequence[Tensor], axes: Sequence[dict[int, str]], dims: Mapping[str, Any]) -> tuple[Tensor, ...]:
    grown = []
    for tensor, named in zip(tensors, axes, strict=True):
        larger = tensor
        for axis, name in named.items():
            least = dims[name].fn(1) if step_of(dims[name]) > 1 else 1
            if larger.shape[axis] == least:
                larger = torch.cat([larger, larger.narrow(axis, 0, step_of(dims[name]))], dim=axis)
        grown.append(larger)
    return tuple(grown)
