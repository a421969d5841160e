"""The two modes that see everything a run does: the calls that the user's lines make, and the operations they come down to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from export.leaks.module_paths import ModulePaths
from export.leaks.operation import FunctionCall, Operation
from export.leaks.places import Whereabouts


class Watcher(Protocol):
    """What carries a run out, and looks."""

    def call(self, operation: Operation) -> Any:
        """Make the call that a user's line makes, and return its result."""

    def operate(self, operation: Operation) -> Any:
        """Run one operation of such a call, and return its result."""


@dataclass
class Run:
    """One watched run of a model.

    Attributes:
        watcher: What looks at it.
        whereabouts: Finds the user's lines.
        paths: The modules that are running.
        call: The user's call that is being carried out.
    """

    watcher: Watcher
    whereabouts: Whereabouts
    paths: ModulePaths = field(default_factory=ModulePaths)
    call: FunctionCall | None = None

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Watch what happens inside, without gradients."""
        with self.paths.watching(module), torch.no_grad(), _Functions(self), _Operations(self):
            yield

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Operation:
        """An operation with where it happens."""
        return Operation(
            func=func,
            args=args,
            kwargs=kwargs,
            module=self.paths.current,
            writer=self.paths.writer,
            call=self.call,
            locate=self.whereabouts.here,
        )


@contextmanager
def own_compilations() -> Iterator[None]:
    """Forget afterwards what has been compiled, as `torch.cond` compiles: what failed while it was watched would fail again."""
    try:
        yield
    finally:
        torch.compiler.reset()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leave the autocast regions that the caller may be in: they are no part of the model."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


class _Functions(TorchFunctionMode):
    def __init__(self, run: Run) -> None:
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


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # (torch leaves its hooks unannotated)
    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (see above)
        self.run = run

    # Control flow as an operator (`torch.cond`) is let through: its branches are compiled, and nothing in them can be watched.
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **(kwargs or {}))
        return self.run.watcher.operate(self.run.operation(func, args, kwargs or {}))
