"""Logits on which the textbook formulas fail in float16, and how far each way of computing is from float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from examples.stable_softmax import naive, stable

FLOAT16_EPS = torch.finfo(torch.float16).eps
FLOAT16_SMALLEST = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of logits, or a batch of rows for the cross-entropy.

    Attributes:
        title: What is hard about them.
        function: `softmax`, `log_softmax` or `cross_entropy`.
        logits: float16, shape (n, classes).
        allowed: False takes all entries out.
    """

    title: str
    function: str
    logits: Tensor
    allowed: bool = True


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest errors of a case's results, in units of float16's resolution; NaN or infinite if a result is.

    Attributes:
        case: What was computed.
        naive: The textbook formula in float16.
        stable_in_float16: `stable.py`, computing in float16.
        stable: `stable.py`, computing in float32, as it does by default.
        torch: `torch.nn.functional` on float16 tensors.
    """

    case: Case
    naive: float
    stable_in_float16: float
    stable: float
    torch: float


def cases() -> list[Case]:
    """From harmless to hopeless, always the same."""
    batch = 8 * torch.randn(256, 1000, generator=torch.Generator().manual_seed(0))
    return [
        Case(title="ordinary logits", function="softmax", logits=_row(1, 2, 3)),
        Case(title="a logit of 11", function="softmax", logits=_row(11, 1, 0)),
        Case(title="a logit of 12", function="softmax", logits=_row(12, 1, 0)),
        Case(title="all below -20", function="softmax", logits=_row(-20, -21, -22)),
        Case(title="100,000 equal logits", function="softmax", logits=torch.full((1, 100_000), 3.0).half()),
        Case(title="both ends of float16", function="softmax", logits=_row(-65504, 65504)),
        Case(title="no entry allowed", function="softmax", logits=_row(1, 2, 3), allowed=False),
        Case(title="a class 18 behind", function="log_softmax", logits=_row(0, -18)),
        Case(title="1000 classes", function="log_softmax", logits=batch[:1].half()),
        Case(title="256 x 1000 classes", function="cross_entropy", logits=batch.half()),
    ]


def measure(case: Case) -> Errors:
    """Compute a case in every way."""
    logits, mask = case.logits, torch.tensor(case.allowed)
    masked = logits.masked_fill(~mask, -math.inf)
    is_loss = case.function == "cross_entropy"
    targets = (torch.arange(len(logits)) % logits.shape[1],) if is_loss else ()
    ours: Callable[..., Tensor] = getattr(stable, case.function)
    torchs: Callable[..., Tensor] = getattr(functional, case.function) if is_loss else getattr(torch, case.function)
    # No library defines what a row without any allowed entry gives; here it is 0.
    exact = torchs(logits.double(), *(targets or (1,))) if case.allowed else torch.zeros_like(logits, dtype=torch.float64)
    return Errors(
        case=case,
        naive=error_in_units(getattr(naive, case.function)(masked, *targets), exact),
        stable_in_float16=error_in_units(ours(logits, *targets, mask=mask, compute=torch.float16), exact),
        stable=error_in_units(ours(logits, *targets, mask=mask), exact),
        torch=error_in_units(torchs(masked, *(targets or (1,))), exact),
    )


def measure_all() -> Iterator[Errors]:
    """All cases, one after the other."""
    return map(measure, cases())


def error_in_units(result: Tensor, exact: Tensor) -> float:
    """The largest error of a result in units of float16's resolution: of eps = 2^-10 of the exact value, or of 2^-24 near 0.

    A result that is rounded right has an error of at most half a unit.

    Args:
        result: Any floating dtype.
        exact: float64, of the same shape.
    """
    # Beyond float16's range, infinity is the exact value rounded right.
    rounded = exact.half().double()
    wanted = torch.where(rounded.isinf(), rounded, exact)
    errors = (result.double() - wanted).abs() / (exact.abs() * FLOAT16_EPS).clamp_min(FLOAT16_SMALLEST)
    return torch.where(result.double() == wanted, 0.0, errors).max().item()


def _row(*logits: float) -> Tensor:
    return torch.tensor([logits], dtype=torch.float16)
