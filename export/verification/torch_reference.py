"""A torch module as the reference, run in this process, and the check that it is batch invariant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfserve.amp_core.calling import has_fast_path, without_fast_path
from halfserve.export.export_errors import ExportError
from halfserve.export.verification.samples import Feed, Value

SAME = 1e-3  # difference relative to an output's largest magnitude; rounding is far below
FAST_PATH_NOTE = (
    "torch's own evaluation mode answers otherwise on these samples: its fast path for attention layers leaves out what "
    "src_key_padding_mask hides; compared is with what the layers compute in training, as the exported model does"
)
ROWS_COMPARED = 4
DIFFERENT = 0.1  # relative to an output's largest magnitude, or share of integers; far above the rounding of another batch size


def run_torch(module: nn.Module, feeds: Sequence[Feed]) -> list[list[Value] | str]:
    """Run a torch module on batches, without the fast path of attention layers (see `amp_core.calling.without_fast_path`).

    Returns:
        For each batch the result's tensors in the order in which `torch.export` flattens them, or the first line of an error.

    Raises:
        ExportError: The module is in training mode or holds half-precision weights.
    """
    if any(part.training for part in module.modules()):
        raise ExportError("the reference model is in training mode; call .eval() first")
    if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in module.parameters()):
        raise ExportError("the reference model holds half-precision weights; expected the float32 model that was converted")
    with without_fast_path():
        return [_run(module, feed) for feed in feeds]


def fast_path_note(module: nn.Module, feeds: Sequence[Feed], answers: Sequence[list[Value] | str]) -> tuple[str, ...]:
    """Return a note where torch's evaluation mode answers otherwise than `run_torch` on the first batch."""
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


def require_batch_invariance(module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Check that samples get the same answers alone and in a batch, since a server joins the requests of several clients.

    A single sample or random outputs show nothing and pass. Samples lie along the first dimension of the tensors.

    Raises:
        ExportError: An output of a sample depends on the other samples.
    """
    count = min([ROWS_COMPARED, *(len(tensor) for tensor in tensors if tensor.dim())])
    if count < 2:
        return
    feeds = [_feed(names, tensors, row, row + 1) for row in range(count)]
    *alone, again, together = run_torch(module, [*feeds, feeds[0], _feed(names, tensors, 0, count)])
    answers = [answer for answer in (*alone, again, together) if isinstance(answer, list)]
    if len(answers) < count + 2:
        return  # the export itself reports the error
    for place, whole in enumerate(answers[-1]):
        ones = [answer[place] for answer in answers[:-1]]
        if _is_other(ones[:count], whole) and not _is_other(ones[:1], ones[count]):
            raise ExportError(
                f"output {place} of a sample depends on the other samples of its batch, as by a mean over the first dimension, "
                "and a server joins what different clients ask; compute each sample by itself, or export with "
                "--max-batch-size 1, which joins none"
            )


def _feed(names: Sequence[str], tensors: Sequence[Tensor], start: int, end: int) -> Feed:
    rows = (tensor[start:end] if tensor.dim() else tensor for tensor in tensors)
    return {name: tensor.numpy(force=True) for name, tensor in zip(names, rows, strict=True)}


def _is_other(alone: Sequence[Value], whole: Value) -> bool:
    """Return whether an output differs between alone and together; False where samples are not rows, which servers detect."""
    if not isinstance(whole, np.ndarray) or not all(isinstance(one, np.ndarray) and one.ndim for one in alone):
        return False
    parts = np.concatenate([one for one in alone if isinstance(one, np.ndarray)]) if alone else whole
    if parts.shape != whole.shape or not whole.size:
        return False
    if not np.issubdtype(whole.dtype, np.floating) and float(np.mean(parts != whole)) <= DIFFERENT:
        return False  # may be rounding, as in pixels
    a, b = parts.astype(np.float64), whole.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    return bool(a.size) and float(np.abs(a - b).max()) > DIFFERENT * max(float(np.abs(a).max()), float(np.abs(b).max()))
