"""A run of a model in which every torch call and every aten operation is intercepted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfserve.export.dtype_check.source_lines import SourceLine, SourceLocator
from halfserve.export.half_module.module_tensors import torch_dtype
from halfserve.export.half_types import HalfType

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})


@cache
def wide_beside(half: HalfType) -> frozenset[torch.dtype]:
    """Return the dtypes to which promotion takes a tensor of this type."""
    return _FLOATS - {torch_dtype(half)}


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A call in the user's source, made of one or more aten operations."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The function's name: "zeros", "float", "linear"."""
        return str(getattr(self.function, "__name__", self.function)).strip("_")


@dataclass(frozen=True, kw_only=True, eq=False)
class Operation:
    """One call of an aten operator: after torch decomposed composite functions, before a kernel runs.

    Attributes:
        func: The operator's overload.
        args: Positional arguments.
        kwargs: Named arguments.
        module: Dotted name of the module that is running.
        writer: Dotted name of the innermost running module that is not torch's own.
        call: The user's call that it belongs to; None outside of torch's functions (`torch.from_numpy`).
        locate: Finds the user's line, while it runs.
        half: The half-precision type that the model is checked in.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str
    writer: str
    call: FunctionCall | None
    locate: Callable[[], SourceLine | None]
    half: HalfType

    @cached_property
    def name(self) -> str:
        """The operator's name without overload: "add", "masked_fill_"."""
        return str(self.func._schema.name.rpartition("::")[2])  # noqa: SLF001  (torch has no public way to an operator's schema)

    @cached_property
    def place(self) -> SourceLine | None:
        """The user's line."""
        return self.locate()

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return results_of((self.args, self.kwargs))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The torch dtype of `half`."""
        return torch_dtype(self.half)

    @cached_property
    def wide(self) -> frozenset[torch.dtype]:
        """See `wide_beside`."""
        return wide_beside(self.half)

    @property
    def halves(self) -> list[Tensor]:
        """The half-precision tensors among the arguments that have a dimension: only these take part in promotion."""
        return [tensor for tensor in self.tensors if tensor.dtype == self.dtype and tensor.dim()]

    @property
    def wides(self) -> list[Tensor]:
        """The tensors of other floating dtypes among the arguments, complex ones included."""
        return [tensor for tensor in self.tensors if tensor.dtype in self.wide]

    @property
    def in_place(self) -> bool:
        """Whether it writes into an argument."""
        return bool(self.func._schema.is_mutable)  # noqa: SLF001  (as above)

    def __str__(self) -> str:
        name = self.call.name if self.call else self.name
        return f"{name} at {self.place}" if self.place else name


class RunWatcher(Protocol):
    """Executes the calls and operations of a run, and inspects them."""

    def call(self, operation: Operation) -> Any:
        """Make a call of the user's source, and return its result."""

    def operate(self, operation: Operation) -> Any:
        """Run one operation of such a call, and return its result."""


@dataclass
class ModuleStack:
    """The modules that are running, the innermost last.

    Attributes:
        running: Their dotted names; the outermost is "".
        failed: The innermost module that an exception went through.
        torchs: Names of the modules whose class is torch's own.
    """

    running: list[str] = field(default_factory=list)
    failed: str = ""
    torchs: set[str] = field(default_factory=set)

    @property
    def current(self) -> str:
        """The innermost module's name."""
        return self.running[-1] if self.running else ""

    @property
    def writer(self) -> str:
        """The name of the innermost module that is not torch's own: its forward holds the user's line."""
        return next((name for name in reversed(self.running) if name not in self.torchs), "")

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Follow the calls of a module and of its submodules."""
        handles = []
        for name, part in module.named_modules():
            if type(part).__module__.partition(".")[0] == "torch":
                self.torchs.add(name)
            handles.append(part.register_forward_pre_hook(partial(self._enter, name), prepend=True))
            handles.append(part.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, _module: nn.Module, _args: Any) -> None:
        self.running.append(name)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self.running:
            left = self.running.pop()
            if sys.exc_info()[0] is not None:
                self.failed = self.failed or left


@dataclass
class WatchedRun:
    """One watched run of a model, with the modules and the user's call that are running."""

    watcher: RunWatcher
    locator: SourceLocator
    half: HalfType
    modules: ModuleStack = field(default_factory=ModuleStack)
    call: FunctionCall | None = None

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Intercept torch's functions and operations in the block, without gradients."""
        with self.modules.watching(module), torch.no_grad(), _FunctionMode(self), _DispatchMode(self):
            yield

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Operation:
        return Operation(
            func=func,
            args=args,
            kwargs=kwargs,
            module=self.modules.current,
            writer=self.modules.writer,
            call=self.call,
            locate=self.locator.here,
            half=self.half,
        )


@contextmanager
def own_compilations() -> Iterator[None]:
    """Drop compiled code afterwards (`torch.cond` compiles): code compiled under observation fails again outside of it."""
    try:
        yield
    finally:
        torch.compiler.reset()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leave the caller's autocast regions, which are no part of the model."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def results_of(result: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def short(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class _FunctionMode(TorchFunctionMode):
    def __init__(self, run: WatchedRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__get__", "__set__"):
            return func(*args, **kwargs)
        before, self.run.call = self.run.call, FunctionCall(function=func, args=args, kwargs=kwargs)
        try:
            return self.run.watcher.call(self.run.operation(func, args, kwargs))
        finally:
            self.run.call = before


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # (torch leaves its hooks unannotated)
    # Lets `torch.cond` and its like run: torch compiles their branches, in which nothing can be intercepted.
    supports_higher_order_operators = True

    def __init__(self, run: WatchedRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (see above)
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        return self.run.watcher.operate(self.run.operation(func, args, kwargs or {}))
