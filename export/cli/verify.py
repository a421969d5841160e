"""`halfserve verify`: is this half-precision ONNX model still the float32 one it was made from?

With the model alone, it shows the verdict that the model carries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from halfserve.export.captured_samples import MOST, given_samples
from halfserve.export.certificate.budget import Budget
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.embed import certificate_of
from halfserve.export.certificate.html import certificate_page
from halfserve.export.certificate.table import certificate_table
from halfserve.export.cli.shared_options import (
    EXIT_CODES,
    BudgetOptions,
    HtmlPage,
    budget_limit,
    hint_for_synthetic_inputs,
    report,
    require_output,
    sizes_of,
)
from halfserve.export.conversion_settings import precisions_of
from halfserve.export.export_errors import UsageError
from halfserve.export.half_types import Accumulators, HalfName
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.onnx_files.model_writer import write_atomically
from halfserve.export.verification.generated.synthetic import synthetic_samples
from halfserve.export.verification.samples import load_labels
from halfserve.export.verification.verify import verify as verify_models
from halfserve.option_groups import takes_option_groups

__all__ = ["EXIT_CODES", "verify"]

_samples = partial(typer.Option, rich_help_panel="Inputs")
_target = partial(typer.Option, rich_help_panel="Where it will run")


@dataclass(frozen=True, kw_only=True)
class ComparedSamples:
    """Inputs to compare the models on."""

    samples: Annotated[
        Path | None,
        _samples(help="An .npz with an array per input, samples first, or a folder of captured requests; by default made up."),
    ] = None
    max_samples: Annotated[int, _samples(min=1, help="How many captured samples to compare on, at most.")] = MOST
    labels: Annotated[Path | None, _samples(help="An .npy with the true class of every sample, for the accuracy.")] = None
    dim: Annotated[
        list[str] | None,
        _samples(
            help="Size of a variable dimension, as NAME=SIZE or INPUT.AXIS=SIZE: of made-up inputs, or the longest that given "
            "samples are repeated to; may be repeated."
        ),
    ] = None
    adversarial: Annotated[bool, _samples(help="Try zeros, extremes, masked rows and the like too, made of the samples.")] = (
        True
    )
    batch_size: Annotated[int, _samples(min=1, help="How many samples run at once.")] = 32


@dataclass(frozen=True, kw_only=True)
class VerifiedBudget(BudgetOptions):
    """Limits of the errors and of what the inputs may do, for models of every type."""

    max_non_finite: Annotated[
        int, budget_limit(help="Number of values that may be NaN or infinite where the reference's are not.")
    ] = 0
    min_headroom: Annotated[
        float, budget_limit(help="Factor by which inputs larger than the samples must pass too; 1 requires nothing.")
    ] = 1.0

    def budgets(self) -> dict[HalfName, Budget]:
        """Return the budget of each type; see `BudgetOptions.budgets`."""
        return {
            name: replace(budget, max_non_finite=self.max_non_finite, min_headroom=self.min_headroom)
            for name, budget in super().budgets().items()
        }


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Runtimes and precisions that the model must be right in."""

    accumulators: Annotated[
        Accumulators,
        _target(
            help="Type in which the target adds up products: float32 in ONNX Runtime, perhaps float16 in strongly "
            "typed TensorRT."
        ),
    ] = "float32"
    provider: Annotated[
        Literal["auto", "cpu", "cuda"],
        _target(help="Where to run beside the simulation: auto takes a GPU where there is one; cpu leaves CUDA out."),
    ] = "auto"
    precisions: Annotated[
        str,
        _target(
            help="Precisions to judge the file in, such as float16,bfloat16; by default its own. For another "
            "precision, the file's half-precision nodes and weights are rounded to that precision.",
            show_default=False,
        ),
    ] = ""


@takes_option_groups
def verify(
    reference: Annotated[
        Path, typer.Argument(help="The float32 ONNX model; or a converted model, to show its own verdict.", show_default=False)
    ],
    candidate: Annotated[
        Path | None, typer.Argument(help="The float16 or bfloat16 ONNX model made from it.", show_default=False)
    ] = None,
    *,
    given: ComparedSamples,
    budget: VerifiedBudget,
    target: TargetOptions,
    html: HtmlPage = None,
    certificate: Annotated[Path | None, report(help="Write the verdict to this JSON file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare a half-precision ONNX model with the float32 one it was made from.

    Both run in child processes, the converted one at every optimisation level of ONNX Runtime and simulated as hardware
    computes it in its type.
    With one model, the certificate that it contains, or that lies beside it, is checked against the file and shown.
    The exit code is 0 within the budget, 3 over it in a precision, 1 where they cannot be compared; --html and --certificate
    are written either way.

    Example: halfserve verify model.onnx model.fp16.onnx --samples samples.npz --html verdict.html

    Example: halfserve verify model.onnx model.fp16.onnx --precisions float16,bfloat16

    Example: halfserve verify model.fp16.onnx
    """
    stderr = Console(stderr=True)
    others = (reference, candidate, given.samples, given.labels)
    require_output(certificate, "the certificate", others=others)
    require_output(html, "the page", others=(*others, certificate))
    if candidate is None:
        if (given, budget, target) != (ComparedSamples(), VerifiedBudget(), TargetOptions()):
            raise UsageError("samples, limits and targets are for a comparison; give the float32 model and the converted one")
        own = certificate_of(reference)
        _show(own, html, certificate, as_json=as_json)
        _require_passed(own)
        return
    sizes = sizes_of(given.dim or ())
    judged_in = precisions_of(target.precisions)
    wide, half = open_model(reference), open_model(candidate)
    budgets = budget.budgets()
    path = given.samples
    if path is None:
        judged_on = synthetic_samples(wide, dims=sizes)
    else:
        judged_on = given_samples(path, wide, most=given.max_samples, batch_size=given.batch_size)
    try:
        with hint_for_synthetic_inputs(synthetic=path is None), stderr.status("verifying"):
            verdict = verify_models(
                wide,
                half,
                judged_on.inputs,
                budget={name: judged_on.budget(limits) for name, limits in budgets.items()},
                precisions=judged_in,
                labels=None if given.labels is None else load_labels(given.labels),
                batch_size=given.batch_size,
                name=candidate.stem,
                adversarial=given.adversarial,
                longest=None if path is None else sizes,
                accumulators=target.accumulators,
                target_device="cpu" if target.provider == "cpu" else "any",
                cuda=None if target.provider == "auto" else target.provider == "cuda",
                notes=judged_on.notes,
                traffic=judged_on.traffic,
            )
    except BudgetExceeded as error:
        _show(error.certificate, html, certificate, as_json=as_json)
        if as_json:
            raise
        raise BudgetExceeded("over budget", error.certificate, cause=error.certificate.advice) from error  # the table says what
    _show(verdict, html, certificate, as_json=as_json)
    _require_passed(verdict)


def _require_passed(verdict: Certificate) -> None:
    if not verdict.passed:
        raise BudgetExceeded(verdict.worst_violation, verdict)
    for name, further in verdict.not_proved.items():
        raise BudgetExceeded(f"computed in {name}: {further.worst_violation}", verdict)


def _show(verdict: Certificate, html: Path | None, certificate: Path | None, *, as_json: bool) -> None:
    if certificate is not None:
        write_atomically(certificate, verdict.to_bytes())
    if html is not None:
        write_atomically(html, certificate_page(verdict).encode())
    if as_json:
        typer.echo(json.dumps(verdict.to_json()))
    else:
        Console().print(certificate_table(verdict), crop=False)
