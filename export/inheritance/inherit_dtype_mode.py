"""A region in which a bare `torch.zeros(n)` takes its dtype and device from the computation around it.

For models whose source cannot use the helpers of `dtype_inheritance`: under `inherit_dtype` the factories themselves inherit.
What has a dtype of its own keeps it; whole numbers stay whole; what torch would make float32 only because nobody said otherwise
takes the inherited dtype, rounded once. That is the meaning of `torch.set_default_dtype`, but for one region of one thread,
with the device, with ranges that do not drift, and with an error where a number does not fit.

Only torch is imported: models import this module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from export.inheritance.inherited_factories import Inherited, became_default, make_inheriting, tensors_in
from export.inheritance.torch_factories import FACTORIES, FROM_INTEGERS

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

    A context manager, and a decorator of functions and methods with or without parentheses:

        @inherit_dtype
        def forward(self, x):
            h = torch.zeros(len(x), 8)  # x's dtype, on x's device

        with inherit_dtype(x): ...
        with inherit_dtype(torch.float16): ...

    It acts on what is given no dtype: `zeros`, `ones`, `full`, `empty`, `eye`, `rand`, `randn`, `arange`, `linspace`,
    `logspace`, `tensor`, `as_tensor`, `scalar_tensor`, `normal`, windows and FFT frequencies, and on arithmetic that turns
    whole numbers into floats (`torch.arange(4) / 4`). `arange` of ints and `tensor([1, 2])` stay whole. Works in eager mode,
    under `torch.export`, `torch.onnx.export(dynamo=True)` and `torch.compile`; regions nest, and belong to one thread.

    Args:
        source: A floating tensor, a floating dtype, or a module (the dtype of its first floating parameter or buffer). As a
            decorator without a source: the first floating tensor among the call's arguments, else the first floating
            parameter of a module among them (`self`), at each call anew. As a context manager without a source: the first
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
        """Torch's hook: every call of a torch function in the region comes by."""
        kwargs = kwargs or {}
        if self.inherited is None:
            self.inherited = _first_floating((args, kwargs))
        inherited = self.inherited
        if inherited is None:
            if func in FACTORIES and torch.compiler.is_dynamo_compiling():
                # Dynamo does not show `x.shape` to a mode: the same lines would inherit in eager mode and not here.
                raise TypeError("inherit_dtype: torch.compile needs to be told what to inherit; write inherit_dtype(x)")
            return func(*args, **kwargs)
        if func in FACTORIES:
            return make_inheriting(func, args, kwargs, inherited)
        result = func(*args, **kwargs)
        if func in FROM_INTEGERS and became_default(result, args, kwargs):
            return result.to(inherited.dtype)
        return result


def _show_factories_to_dynamo() -> None:
    # Calls without a tensor among their arguments pass by a mode where Dynamo does not know that one may want them: that of
    # torch 2.11 most factories, of 2.13 `normal`. They would give float32, unsaid.
    variables = sys.modules.get("torch._dynamo.variables.torch")
    if variables is not None:
        variables.get_overridable_functions().update(FACTORIES)


# What torch.compiler.assume_constant_result does, without its loading Dynamo: a call runs as it is while Dynamo traces.
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
