"""Softmax, log-softmax and cross-entropy that hold in float16, beside the textbook ones that do not.

    python -m halfserve.examples.stable_softmax
    python -m halfserve.examples.stable_softmax --json

float16 ends at 65504 and has nothing below 6e-8, so that `exp` overflows above 11.09 and vanishes below -17.3: a textbook
softmax gives NaN for a logit of 12, and the logarithm of a textbook softmax gives minus infinity for a class that is 18 behind.
The functions in `stable.py` subtract the row's largest logit first and compute in float32; the demonstration prints how far
each way is from float64, in units of float16's own resolution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from halfserve.examples.stable_softmax import stable

FLOAT16_EPS = torch.finfo(torch.float16).eps
FLOAT16_SMALLEST = 2.0**-24


def textbook_softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / sum(exp(x)) in the dtype of the logits; in float16 NaN if one logit is above 11.09, or all are below -17.3."""
    powers = logits.exp()
    return powers / powers.sum(dim, keepdim=True)


def textbook_log_softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """log(softmax(x)); in float16 minus infinity also where the probability is below 6e-8."""
    return textbook_softmax(logits, dim).log()


def textbook_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of -log p[target]; logits of shape (n, classes), targets int64 of shape (n,)."""
    return -textbook_log_softmax(logits).gather(1, targets[:, None]).mean()


TEXTBOOK: dict[str, Callable[..., Tensor]] = {
    "softmax": textbook_softmax,
    "log_softmax": textbook_log_softmax,
    "cross_entropy": textbook_cross_entropy,
}


@dataclass(frozen=True, kw_only=True)
class SoftmaxCase:
    """One row of logits, or a batch of rows for the cross-entropy."""

    title: str  # what is hard about them
    function: str  # `softmax`, `log_softmax` or `cross_entropy`
    logits: Tensor  # float16, shape (n, classes)
    allowed: bool = True  # False takes all entries out


@dataclass(frozen=True, kw_only=True)
class SoftmaxErrors:
    """The largest errors of a case's results, in units of float16's resolution; NaN or infinite if a result is."""

    case: SoftmaxCase  # what was computed
    naive: float  # the textbook formula in float16
    stable_in_float16: float  # `stable.py`, computing in float16
    stable: float  # `stable.py`, computing in float32, as it does by default
    torch: float  # `torch.nn.functional` on float16 tensors


def cases() -> list[SoftmaxCase]:
    """From ordinary logits to those on which the textbook fails, always the same."""
    batch = 8 * torch.randn(256, 1000, generator=torch.Generator().manual_seed(0))
    return [
        SoftmaxCase(title="ordinary logits", function="softmax", logits=_row(1, 2, 3)),
        SoftmaxCase(title="a logit of 11", function="softmax", logits=_row(11, 1, 0)),
        SoftmaxCase(title="a logit of 12", function="softmax", logits=_row(12, 1, 0)),
        SoftmaxCase(title="all below -20", function="softmax", logits=_row(-20, -21, -22)),
        SoftmaxCase(title="100,000 equal logits", function="softmax", logits=torch.full((1, 100_000), 3.0).half()),
        SoftmaxCase(title="both ends of float16", function="softmax", logits=_row(-65504, 65504)),
        SoftmaxCase(title="no entry allowed", function="softmax", logits=_row(1, 2, 3), allowed=False),
        SoftmaxCase(title="a class 18 behind", function="log_softmax", logits=_row(0, -18)),
        SoftmaxCase(title="1000 classes", function="log_softmax", logits=batch[:1].half()),
        SoftmaxCase(title="256 x 1000 classes", function="cross_entropy", logits=batch.half()),
    ]


def measure(case: SoftmaxCase) -> SoftmaxErrors:
    """Compute a case in all four ways."""
    logits, mask = case.logits, torch.tensor(case.allowed)
    masked = logits.masked_fill(~mask, -math.inf)
    is_loss = case.function == "cross_entropy"
    targets = (torch.arange(len(logits)) % logits.shape[1],) if is_loss else ()
    ours: Callable[..., Tensor] = getattr(stable, case.function)
    torchs: Callable[..., Tensor] = getattr(functional, case.function) if is_loss else getattr(torch, case.function)
    # No library defines what a row without any allowed entry gives; here it is 0.
    exact = torchs(logits.double(), *(targets or (1,))) if case.allowed else torch.zeros_like(logits, dtype=torch.float64)
    return SoftmaxErrors(
        case=case,
        naive=error_in_units(TEXTBOOK[case.function](masked, *targets), exact),
        stable_in_float16=error_in_units(ours(logits, *targets, mask=mask, compute=torch.float16), exact),
        stable=error_in_units(ours(logits, *targets, mask=mask), exact),
        torch=error_in_units(torchs(masked, *(targets or (1,))), exact),
    )


def error_in_units(result: Tensor, exact: Tensor) -> float:
    """Return the largest error of a result in units of float16's resolution: of eps = 2^-10 of the exact value, or of 2^-24
    near 0.

    A correctly rounded result has an error of at most half a unit. `exact` is float64, of the result's shape.
    """
    # Beyond float16's range, infinity is the correctly rounded value.
    rounded = exact.half().double()
    wanted = torch.where(rounded.isinf(), rounded, exact)
    errors = (result.double() - wanted).abs() / (exact.abs() * FLOAT16_EPS).clamp_min(FLOAT16_SMALLEST)
    return torch.where(result.double() == wanted, 0.0, errors).max().item()


def _row(*logits: float) -> Tensor:
    return torch.tensor([logits], dtype=torch.float16)


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
COLUMNS = {"naive": "textbook", "stable_in_float16": "stable/fp16", "stable": "stable/fp32", "torch": "torch"}


@app.command()
def run(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print how far softmax, log-softmax and cross-entropy of float16 logits are from float64, computed in four ways.

    Example: python -m halfserve.examples.stable_softmax
    """
    rows = [measure(case) for case in cases()]
    if as_json:
        typer.echo(json.dumps({"unit": "float16 resolution", "cases": [_json(row) for row in rows]}))
        return
    table = Table("function", "logits", *COLUMNS.values(), box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.case.function, row.case.title, *(_shown(getattr(row, name)) for name in COLUMNS))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print("\nLargest error in units of float16's resolution, 2^-10 of the value: correctly rounded it is at most 0.5.")


def _shown(error: float) -> str:
    if math.isnan(error):
        return "NaN"
    return "infinite" if math.isinf(error) else f"{error:,.2f}"


def _json(row: SoftmaxErrors) -> dict[str, object]:
    # JSON has no NaN and no infinity; null says that the result had no finite error.
    errors = {name: getattr(row, name) if math.isfinite(getattr(row, name)) else None for name in COLUMNS}
    return {"function": row.case.function, "logits": row.case.title, **errors}


if __name__ == "__main__":
    app(prog_name="python -m halfserve.examples.stable_softmax")
