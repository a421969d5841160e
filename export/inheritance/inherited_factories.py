"""What a call of one of torch's factories becomes where dtype and device are inherited.

Only torch is imported: models import what imports this.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from export.inheritance.dtype_inheritance import new_arange, new_linspace, numbers_in, require_representable
from export.inheritance.torch_factories import ALWAYS_FLOAT


class Inherited(NamedTuple):
    """What a region passes on; `device` None leaves the choice to torch."""

    dtype: torch.dtype
    device: torch.device | None


def make_inheriting(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    """Call a factory with the inherited dtype and device wherever the caller chose none.

    Raises:
        ValueError: A finite number does not fit the inherited dtype.
    """
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    if kwargs.get("device") is None and inherited.device is not None and not _placed(func, args, kwargs):
        kwargs = {**kwargs, "device": inherited.device}
    if kwargs.get("dtype") is not None:
        return func(*args, **kwargs)
    if func in ALWAYS_FLOAT:
        return func(*args, **{**kwargs, "dtype": inherited.dtype})
    return _BY_ARGUMENTS[func](func, args, kwargs, inherited)


def _placed(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("generator") is not None or kwargs.get("pin_memory"):
        return True  # a generator's device, or page-locked memory, is the choice
    # These keep the device of what they are given.
    return func in (torch.as_tensor, torch.asarray) and not _is_bare(args[0] if args else kwargs.get("data", kwargs.get("obj")))


def _ranged(_func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    start, end, step = _bounds(args, kwargs)
    if any(isinstance(bound, Tensor) for bound in (start, end, step)):
        return _rounded(torch.arange, args, kwargs, inherited)
    if not any(isinstance(bound, float | torch.SymFloat) for bound in (start, end, step)):
        return torch.arange(*args, **kwargs)
    return new_arange(_Place(inherited.dtype, kwargs.get("device")), start, end, step)


def _bounds(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    given = {**dict(zip(("start", "end", "step"), args, strict=False)), **kwargs}
    if len(args) == 1 and "end" not in kwargs:
        given = {**kwargs, "end": args[0]}
    return given.get("start", 0), given["end"], given.get("step", 1)


def _spaced(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    given = {**dict(zip(("start", "end", "steps"), args, strict=False)), **kwargs}
    if any(isinstance(given.get(name), Tensor) for name in ("start", "end")) or "steps" not in given:
        return _rounded(func, args, kwargs, inherited)
    return new_linspace(_Place(inherited.dtype, kwargs.get("device")), given["start"], given["end"], given["steps"])


def _filled(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    value = args[1] if len(args) > 1 else kwargs.get("fill_value")
    if not isinstance(value, float | torch.SymFloat):
        return func(*args, **kwargs)
    if isinstance(value, float):
        require_representable(_Place(inherited.dtype, None), value, "inherit_dtype: full")
    return func(*args, **{**kwargs, "dtype": inherited.dtype})


def _from_data(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj", kwargs.get("s")))
    if not _is_bare(data) or not (func is torch.scalar_tensor or _is_float(data)):
        return func(*args, **kwargs)
    for number in numbers_in(data):
        require_representable(_Place(inherited.dtype, None), number, f"inherit_dtype: {func.__name__}")
    return func(*args, **{**kwargs, "dtype": inherited.dtype})


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        kwargs.pop("device", None)  # a mean or a spread that is a tensor brings its own dtype and device
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": inherited.dtype})


def _rounded(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    result = func(*args, **kwargs)
    return result.to(inherited.dtype) if became_default(result, args, kwargs) else result


_BY_ARGUMENTS: dict[Any, Any] = {
    torch.arange: _ranged,
    torch.range: _rounded,
    torch.linspace: _spaced,
    torch.full: _filled,
    torch.normal: _drawn,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch.scalar_tensor: _from_data,
}


class _Place(NamedTuple):
    dtype: torch.dtype
    device: Any


def _is_bare(data: Any) -> bool:
    # Arrays and tensors, and numpy's scalars (np.float64 is a float by inheritance), have a dtype of their own.
    if isinstance(data, list | tuple):
        return all(_is_bare(item) for item in data)
    return type(data) in (bool, int, float) or isinstance(data, torch.SymInt | torch.SymFloat | torch.SymBool)


def _is_float(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return not data or any(_is_float(item) for item in data)
    return isinstance(data, float | torch.SymFloat)


def became_default(result: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a result is of torch's default dtype because nothing that went in was floating."""
    if not isinstance(result, Tensor) or result.dtype != torch.get_default_dtype():
        return False
    return not any(tensor.is_floating_point() for tensor in tensors_in((args, kwargs)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
