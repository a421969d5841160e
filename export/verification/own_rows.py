"""Whether each sample of a batch gets what it gets alone. A server joins what several clients ask, so it must."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from export.errors import ExportError
from export.verification.children import Feed, Value
from export.verification.torch_reference import run_torch

ROWS = 4
ALIKE = 0.1  # of an output's largest magnitude, and of all whole numbers: far more than another batch size's rounding


def require_own_rows(module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Compute some samples alone and together. Where nothing can be told (one sample, random outputs), nothing is said.

    Args:
        module: The float32 module; takes tensors.
        names: Of its inputs.
        tensors: The inputs, samples first.

    Raises:
        ExportError: They change each other's answers.
    """
    count = min([ROWS, *(len(tensor) for tensor in tensors if tensor.dim())])
    if count < 2:
        return
    feeds = [_feed(names, tensors, row, row + 1) for row in range(count)]
    *alone, again, together = run_torch(module, [*feeds, feeds[0], _feed(names, tensors, 0, count)])
    answers = [answer for answer in (*alone, again, together) if isinstance(answer, list)]
    if len(answers) < count + 2:
        return  # it is told with the export itself
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
    """Whether an output together is not what it is alone; not where samples do not come out as rows, which servers find out."""
    if not isinstance(whole, np.ndarray) or not all(isinstance(one, np.ndarray) and one.ndim for one in alone):
        return False
    parts = np.concatenate([one for one in alone if isinstance(one, np.ndarray)]) if alone else whole
    if parts.shape != whole.shape or not whole.size:
        return False
    if not np.issubdtype(whole.dtype, np.floating) and float(np.mean(parts != whole)) <= ALIKE:
        return False  # otherwise these may be roundings, as in the pixels of a picture
    a, b = parts.astype(np.float64), whole.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    return bool(a.size) and float(np.abs(a - b).max()) > ALIKE * max(float(np.abs(a).max()), float(np.abs(b).max()))
