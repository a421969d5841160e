"""Compiled code shows nothing of what is in it, so a recorded step runs without."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

WARNING = (
    "the model is compiled, and compiled code cannot be looked into: recorded steps run it uncompiled. They are slower, "
    "their results differ from compiled ones by rounding, and dropout draws other numbers"
)


def uncompiled() -> AbstractContextManager[None]:
    """What lets everything that `torch.compile` returned run as it was written; what is compiled stays so for afterwards.

    Without it torch would run compiled functions uncompiled in a dispatch mode too, but refuse those with `fullgraph=True`.
    """
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` was called on a model or on a module in it."""
    return any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules())  # noqa: SLF001  (torch has no public way)
