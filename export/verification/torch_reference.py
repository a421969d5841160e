"""A torch module as the reference, run in our own process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from amp_core.calling import has_fast_path, without_fast_path
from export.errors import ExportError
from export.verification.children import Feed, Value

SAME = 1e-3  # of an output's largest magnitude: rounding is far below that
FAST_PATH_NOTE = (
    "torch's own evaluation mode answers otherwise on these samples: its fast path for attention layers leaves out what "
    "src_key_padding_mask hides; compared is with what the layers compute in training, as the exported model does"
)


def run_torch(module: nn.Module, feeds: Sequence[Feed]) -> list[list[Value] | str]:
    """Run a torch module in evaluation mode; its result's tensors come in the order in which `torch.export` flattens them.

    Attention layers compute what they compute in training (see `amp_core.calling.without_fast_path`).

    Returns:
        For each batch its outputs, or the first line of the error it ends in.

    Raises:
        ExportError: The module is not a float32 one in evaluation mode: no reference.
    """
    if any(part.training for part in module.modules()):
        raise ExportError("the reference model is in training mode; call .eval() first")
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in module.parameters()):
        raise ExportError("the reference model holds half-precision weights; expected the float32 model that was converted")
    with without_fast_path():
        return [_run(module, feed) for feed in feeds]


def fast_path_note(module: nn.Module, feeds: Sequence[Feed], answers: Sequence[list[Value] | str]) -> tuple[str, ...]:
    """Says so where torch's evaluation mode answers otherwise than `run_torch`; judged by the first batch."""
    if not feeds or not has_fast_path(module) or isinstance(answers[0], str):
        return ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype, says torch
        fast = _run(module, feeds[0])
    if isinstance(fast, list) and all(map(_alike, fast, answers[0])):
        return ()
    return (FAST_PATH_NOTE,)


def _alike(fast: Value, slow: Value) -> bool:
    if not isinstance(fast, np.ndarray) or not isinstance(slow, np.ndarray) or fast.shape != slow.shape:
        return False
    scale = float(np.abs(slow).max(initial=0.0)) if np.issubdtype(slow.dtype, np.floating) else 0.0
    return bool(np.allclose(fast, slow, rtol=0.0, atol=SAME * scale, equal_nan=True))


def _run(module: nn.Module, feed: Feed) -> list[Value] | str:
    try:
        with torch.no_grad():
            result = module(*(torch.from_numpy(np.ascontiguousarray(array)) for array in feed.values()))
    except Exception as error:  # noqa: BLE001  (the module is the user's code)
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return [leaf.detach().cpu().numpy() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
