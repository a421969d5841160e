"""Compiled code shows nothing of what is in it, so a recorded step runs without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops import utils as higher_order
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from amp_core.recorder.observer import Observer

WARNING = (
    "the model is compiled, and compiled code cannot be looked into: recorded steps run it uncompiled. They are slower, "
    "their results differ from compiled ones by rounding, and dropout draws other numbers"
)


def uncompiled() -> AbstractContextManager[None]:
    """What lets everything that `torch.compile` returned run as it was written; what is compiled stays so for afterwards.

    Without it torch would run compiled functions uncompiled in a dispatch mode too, but refuse those with `fullgraph=True`.
    """
    _keep_functions_captured()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


_lock = threading.Lock()
_is_done = False


def _keep_functions_captured() -> None:
    """Let torch still capture the functions that cond, scan and their like are given, once per process.

    It compiles them even where nothing else is compiled, to find what they use: as they are written, the gradients of weights
    that a function does not take as its argument would be lost, in a dispatch mode too. So such an operation is left alone.
    """
    global _is_done  # noqa: PLW0603  (torch's module is one per process)
    with _lock:
        if not _is_done and _CAPTURE in vars(higher_order):
            setattr(higher_order, _CAPTURE, _unobserved(getattr(higher_order, _CAPTURE)))
        _is_done = True


_CAPTURE = "_hop_compile_and_call"  # not in every version of torch that there is


def _unobserved(capture: Callable[..., Any]) -> Callable[..., Any]:
    def captured(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(mode, Observer) for mode in _get_current_dispatch_mode_stack()):
            return capture(*args, **kwargs)
        with _disable_current_modes(), torch.compiler.set_stance("default"):
            return capture(*args, **kwargs)

    return captured


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` was called on a model or on a module in it."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())  # noqa: SLF001  (torch has no public way)
