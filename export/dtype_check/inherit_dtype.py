"""A region in which a bare `torch.zeros(n)` takes its dtype and device from the computation around it.

For models whose source cannot use the helpers of `dtype_inheritance`: under `inherit_dtype` the factories themselves inherit.
Explicit dtypes stay; whole numbers stay whole; a tensor that would take torch's default dtype takes the inherited one, rounded
once. That is the meaning of `torch.set_default_dtype`, but for one region of one thread, with the device, with ranges that do
not drift, and with an error where a number does not fit.

Only torch is imported: models import this module.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfserve.export.dtype_check.dtype_inheritance import new_arange, new_linspace, numbers_in, require_representable

P = ParamSpec("P")
R = TypeVar("R")
Source = Tensor | torch.dtype | nn.Module


@overload
def inherit_dtype(  # type: ignore[overload-overlap]  # (a module can be called too; it is taken as a source)
    source: Source | None = None,
) -> InheritDtype: ...
@overload
def inherit_dtype(source: Callable[P, R]) -> Callable[P, R]: ...


def inherit_dtype(source: Any = None) -> Any:
    """Have tensors that torch's factories make take the dtype and device of the computation around them.

    A context manager, and a decorator of functions and methods with or without parentheses::

        @inherit_dtype
        def forward(self, x):
            h = torch.zeros(len(x), 8)  # x's dtype, on x's device

        with inherit_dtype(x): ...
        with inherit_dtype(torch.float16): ...

    It acts on calls without a dtype: `zeros`, `ones`, `full`, `empty`, `eye`, `rand`, `randn`, `arange`, `linspace`,
    `logspace`, `tensor`, `as_tensor`, `scalar_tensor`, `normal`, windows and FFT frequencies, and on arithmetic that turns
    whole numbers into floats (`torch.arange(4) / 4`). `arange` of ints and `tensor([1, 2])` stay whole. Works in eager mode,
    under `torch.export`, `torch.onnx.export(dynamo=True)` and `torch.compile`; regions nest, and belong to one thread.

    Args:
        source: A floating tensor, a floating dtype, or a module (the dtype of its first floating parameter or buffer). As a
            decorator without a source: the first floating tensor among the call's arguments, else the first floating
            parameter of a module among them (`self`), at each call. As a context manager without a source: the first
            floating tensor that a torch function meets inside; until then torch's default stands (name a source where
            `torch.compile` or a strict `torch.export` sees the region).

    Raises:
        TypeError: `source` has no floating dtype, or the function is a generator or coroutine, which leaves the region at
            every step.
        ValueError: Inside the region, when a finite number does not fit the inherited dtype (`torch.full((2,), -1e9)` in
            float16).
    """
    if source is None or isinstance(source, Source):
        return InheritDtype(source)
    if isinstance(source, type) or not callable(source):
        raise TypeError(f"inherit_dtype: expected a floating tensor, dtype, module or function, got {_named(source)}")
    return InheritDtype(None)(source)


class InheritDtype(TorchFunctionMode):
    """The region that `inherit_dtype` makes; see there."""

    def __init__(self, source: Source | None) -> None:
        super().__init__()
        _show_factories_to_dynamo()
        self.inherited = None if source is None else _inherited_from(source)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Run a function in this region; without a source, in one made for each call from its arguments."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"inherit_dtype: {function.__qualname__} is a generator or coroutine; use `with` around its steps")
        inherited = self.inherited

        @wraps(function)
        def inheriting(*args: P.args, **kwargs: P.kwargs) -> R:
            with _region(inherited or _first_floating((args, kwargs)) or _first_of_modules((args, kwargs))):
                return function(*args, **kwargs)

        return inheriting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle every torch function in the region; torch calls this hook."""
        kwargs = kwargs or {}
        if self.inherited is None:
            self.inherited = _first_floating((args, kwargs))
        inherited = self.inherited
        if inherited is None:
            if func in FACTORIES and torch.compiler.is_dynamo_compiling():
                # Dynamo does not show `x.shape` to a mode: the same lines would inherit in eager mode and not here.
                raise TypeError("inherit_dtype: torch.compile cannot find the tensor to inherit from; write inherit_dtype(x)")
            return func(*args, **kwargs)
        if func in FACTORIES:
            return make_inheriting(func, args, kwargs, inherited)
        result = func(*args, **kwargs)
        if func in FROM_INTEGERS and became_default(result, args, kwargs):
            return result.to(inherited.dtype)
        return result


def _show_factories_to_dynamo() -> None:
    # Dynamo skips a mode for calls without tensor arguments unless it lists the function as overridable. Torch 2.11 lists few
    # factories, 2.13 all but `normal`. A skipped call would silently give float32.
    variables = sys.modules.get("torch._dynamo.variables.torch")
    if variables is not None:
        variables.get_overridable_functions().update(FACTORIES)


# As torch.compiler.assume_constant_result, without loading Dynamo: the function runs untraced while Dynamo traces.
_show_factories_to_dynamo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (see above)


def _region(inherited: Inherited | None) -> InheritDtype:
    region = InheritDtype(None)
    region.inherited = inherited
    return region


def _first_floating(value: Any) -> Inherited | None:
    for tensor in tensors_in(value):
        if tensor.dtype.is_floating_point:
            return Inherited(tensor.dtype, tensor.device)
    return None


def _first_of_modules(arguments: tuple[Any, Any]) -> Inherited | None:
    args, kwargs = arguments
    for module in (*args, *kwargs.values()):
        if isinstance(module, nn.Module):
            found = _first_floating([*module.parameters(), *module.buffers()])
            if found is not None:
                return found
    return None


def _inherited_from(source: Source) -> Inherited:
    if isinstance(source, nn.Module):
        found = _first_floating([*source.parameters(), *source.buffers()])
    elif isinstance(source, torch.dtype):
        found = Inherited(source, None) if source.is_floating_point else None
    else:
        found = _first_floating(source)
    if found is None:
        raise TypeError(f"inherit_dtype: expected something with a floating dtype to inherit, got {_named(source)}")
    return found


def _named(source: Any) -> str:
    if isinstance(source, torch.dtype):
        return str(source)
    if isinstance(source, Tensor):
        return f"a tensor of {source.dtype}"
    return f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"


# These take torch's default dtype, whatever their arguments are.
ALWAYS_FLOAT: frozenset[Callable[..., Any]] = frozenset({
    torch.zeros, torch.ones, torch.empty, torch.empty_strided, torch.eye, torch.rand, torch.randn, torch.logspace,
    torch.bartlett_window, torch.blackman_window, torch.hamming_window, torch.hann_window, torch.kaiser_window,
    torch.fft.fftfreq, torch.fft.rfftfreq,
})  # fmt: skip

# The helper of `dtype_inheritance` to write instead, by the factory's name.
HELPERS = {
    **{name: f"new_{name}(x, ...)" for name in ("zeros", "ones", "empty", "full", "eye", "arange", "linspace", "tensor")},
    "range": "new_arange(x, ...)",
    **dict.fromkeys(("as_tensor", "asarray", "scalar_tensor"), "new_tensor(x, ...)"),
}

_OPERATIONS = (
    "abs", "add", "addcdiv", "addcmul", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bmm", "cos", "cosh",
    "deg2rad", "digamma", "div", "divide", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "expit", "hypot", "i0",
    "lgamma", "log", "log10", "log1p", "log2", "logaddexp", "logit", "logsumexp", "mul", "multiply", "outer", "pow",
    "rad2deg", "reciprocal", "rsqrt", "rsub", "sigmoid", "sin", "sinc", "sinh", "sqrt", "sub", "subtract", "tan", "tanh",
    "true_divide", "xlogy", "__add__", "__mul__", "__pow__", "__radd__", "__rdiv__", "__rmul__", "__rpow__", "__rsub__",
    "__rtruediv__", "__sub__", "__truediv__",
)  # fmt: skip

# Arithmetic that turns whole numbers into torch's default dtype: a quotient, a product with a float, a sine. Under
# Dynamo an expression with a sign calls Python's operator.
FROM_INTEGERS: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name) for owner in (torch, torch.Tensor, torch.special) for name in _OPERATIONS if hasattr(owner, name)
) | {operator.add, operator.mul, operator.pow, operator.sub, operator.truediv}


class Inherited(NamedTuple):
    """The dtype and device that a region passes on; `device` None leaves the choice to torch."""

    dtype: torch.dtype
    device: Any


def make_inheriting(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    """Call a factory with the inherited dtype and device wherever the caller chose none.

    Raises:
        ValueError: A finite number does not fit the inherited dtype.
    """
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    if kwargs.get("device") is None and inherited.device is not None and not _has_device(func, args, kwargs):
        kwargs = {**kwargs, "device": inherited.device}
    if kwargs.get("dtype") is not None:
        return func(*args, **kwargs)
    if func in ALWAYS_FLOAT:
        return func(*args, **{**kwargs, "dtype": inherited.dtype})
    return _BY_ARGUMENTS[func](func, args, kwargs, inherited)


def _has_device(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("generator") is not None or kwargs.get("pin_memory"):
        return True  # a generator or page-locked memory sets the device
    # These keep the device of their data.
    return func in (torch.as_tensor, torch.asarray) and not _is_bare(args[0] if args else kwargs.get("data", kwargs.get("obj")))


def _ranged(_func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    start, end, step = _bounds(args, kwargs)
    if any(isinstance(bound, Tensor) for bound in (start, end, step)):
        return _rounded(torch.arange, args, kwargs, inherited)
    if not any(isinstance(bound, float | torch.SymFloat) for bound in (start, end, step)):
        return torch.arange(*args, **kwargs)
    return new_arange(Inherited(inherited.dtype, kwargs.get("device")), start, end, step)


def _bounds(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    given = {**dict(zip(("start", "end", "step"), args, strict=False)), **kwargs}
    if len(args) == 1 and "end" not in kwargs:
        given = {**kwargs, "end": args[0]}
    return given.get("start", 0), given["end"], given.get("step", 1)


def _spaced(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    given = {**dict(zip(("start", "end", "steps"), args, strict=False)), **kwargs}
    if any(isinstance(given.get(name), Tensor) for name in ("start", "end")) or "steps" not in given:
        return _rounded(func, args, kwargs, inherited)
    return new_linspace(Inherited(inherited.dtype, kwargs.get("device")), given["start"], given["end"], given["steps"])


def _filled(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    value = args[1] if len(args) > 1 else kwargs.get("fill_value")
    if not isinstance(value, float | torch.SymFloat):
        return func(*args, **kwargs)
    if isinstance(value, float):
        require_representable(inherited, value, "inherit_dtype: full")
    return func(*args, **{**kwargs, "dtype": inherited.dtype})


def _from_data(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    data = args[0] if args else kwargs.get("data", kwargs.get("obj", kwargs.get("s")))
    if not _is_bare(data) or not (func is torch.scalar_tensor or _is_float(data)):
        return func(*args, **kwargs)
    for number in numbers_in(data):
        require_representable(inherited, number, f"inherit_dtype: {func.__name__}")
    return func(*args, **{**kwargs, "dtype": inherited.dtype})


def _drawn(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        kwargs.pop("device", None)  # a mean or a spread that is a tensor brings its own dtype and device
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": inherited.dtype})


def _rounded(func: Any, args: Any, kwargs: dict[str, Any], inherited: Inherited) -> Any:
    result = func(*args, **kwargs)
    return result.to(inherited.dtype) if became_default(result, args, kwargs) else result


# Float or not, as their arguments are.
_BY_ARGUMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
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

FACTORIES = ALWAYS_FLOAT | frozenset(_BY_ARGUMENTS)


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
    """Return whether a result is of torch's default dtype because nothing that went in was floating."""
    if not isinstance(result, Tensor) or result.dtype != torch.get_default_dtype():
        return False
    return not any(tensor.is_floating_point() for tensor in tensors_in((args, kwargs)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
