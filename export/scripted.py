"""TorchScript modules, which nothing in this stage can look into."""

from __future__ import annotations

import torch
from torch import nn

from export.errors import ExportError


def require_python(module: nn.Module) -> None:
    """Check that a module, and each of its parts, runs as Python code.

    Raises:
        ExportError: One is a TorchScript module, scripted, traced or loaded; names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ExportError(
                f"{f'the part {name!r}' if name else 'the model'} is a TorchScript module, whose Python code is gone; pass the "
                "module that torch.jit.script or torch.jit.trace was given. If only the archive is left, build that module "
                "again and load its weights: module.load_state_dict(torch.jit.load(path).state_dict())"
            )
