"""A torch module as the reference, run in our own process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.errors import ExportError
from export.verification.children import Feed, Value


def run_torch(module: nn.Module, feeds: Sequence[Feed]) -> list[list[Value] | str]:
    """Run a torch module in evaluation mode; its result's tensors come in the order in which `torch.export` flattens them.

    Returns:
        For each batch its outputs, or the first line of the error it ends in.

    Raises:
        ExportError: The module is not a float32 one in evaluation mode: no reference.
    """
    if any(part.training for part in module.modules()):
        raise ExportError("the reference model is in training mode; call .eval() first")
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in module.parameters()):
        raise ExportError("the reference model holds half-precision weights; expected the float32 model that was converted")
    return [_run(module, feed) for feed in feeds]


def _run(module: nn.Module, feed: Feed) -> list[Value] | str:
    try:
        with torch.no_grad():
            result = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in feed.values()))
    except Exception as error:  # noqa: BLE001  (the module is the user's code)
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return [leaf.detach().cpu().numpy() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
