"""`halfserve verify`: is this half-precision ONNX model still the float32 one it was made from?"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from halfserve.export.certificate.budget import usual_budget
from halfserve.export.certificate.certificate import BudgetExceeded, Certificate
from halfserve.export.certificate.html import certificate_page
from halfserve.export.certificate.table import certificate_table
from halfserve.export.cli.options import (
    EXIT_CODES,
    MaxAbsError,
    MaxScaledError,
    MinAgreement,
    budget_limit,
    hint_for_synthetic_inputs,
    precisions_of,
    report,
    require_output,
    sizes_of,
)
from halfserve.export.half_types import HALF_TYPES
from halfserve.export.onnx_files.model_file import open_model
from halfserve.export.onnx_files.model_writer import write_atomically
from halfserve.export.verification.generated_samples import synthetic_samples
from halfserve.export.verification.samples import SampleSet, load_labels, load_samples
from halfserve.export.verification.verify import verify as verify_models

__all__ = ["EXIT_CODES", "verify"]

_samples = partial(typer.Option, rich_help_panel="Inputs")
_target = partial(typer.Option, rich_help_panel="Where it will run")


def verify(
    reference: Annotated[Path, typer.Argument(help="The float32 ONNX model.", show_default=False)],
    candidate: Annotated[Path, typer.Argument(help="The float16 or bfloat16 ONNX model made from it.", show_default=False)],
    samples: Annotated[
        Path | None, _samples(help="An .npz with an array per input, samples first; by default inputs are made up.")
    ] = None,
    labels: Annotated[Path | None, _samples(help="An .npy with the true class of every sample, for the accuracy.")] = None,
    dim: Annotated[
        list[str] | None,
        _samples(
            help="Size of a variable dimension, as NAME=SIZE or INPUT.AXIS=SIZE: of made-up inputs, or the longest that given "
            "samples are repeated to; may be repeated."
        ),
    ] = None,
    max_abs_error: MaxAbsError = None,
    max_scaled_error: MaxScaledError = None,
    min_agreement: MinAgreement = 0.995,
    max_non_finite: Annotated[int, budget_limit(help="How many NaN or infinite values the reference need not have.")] = 0,
    min_headroom: Annotated[
        float, budget_limit(help="How many times larger than the samples inputs must be able to grow; 1 asks for nothing.")
    ] = 1.0,
    adversarial: Annotated[
        bool, _samples(help="Try zeros, extremes, masked rows and the like too, made of the samples.")
    ] = True,
    accumulators: Annotated[
        Literal["float32", "float16"],
        _target(help="In what the target sums: ONNX Runtime in float32, strongly typed TensorRT perhaps in float16."),
    ] = "float32",
    batch_size: Annotated[int, _samples(min=1, help="How many samples run at once.")] = 32,
    provider: Annotated[
        Literal["auto", "cpu", "cuda"],
        _target(help="Where to run beside the simulation: auto takes a GPU where there is one."),
    ] = "auto",
    precisions: Annotated[
        str,
        _target(
            help="Precisions to judge the file in, such as float16,bfloat16; by default its own. In another one its "
            "half-precision nodes and weights are rounded to that.",
            show_default=False,
        ),
    ] = "",
    html: Annotated[Path | None, report(help="Write the verdict as an HTML page with plots.")] = None,
    certificate: Annotated[Path | None, report(help="Write the verdict as JSON.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare a half-precision ONNX model with the float32 one it was made from.

    Both run in child processes, the converted one at every optimisation level of ONNX Runtime and simulated as hardware
    computes it in its type.
    The exit code is 0 within the budget, 3 over it in a precision, 1 where they cannot be compared; --html and --certificate
    are written either way.

    Example: halfserve verify model.onnx model.fp16.onnx --samples samples.npz --html verdict.html

    Example: halfserve verify model.onnx model.fp16.onnx --precisions float16,bfloat16
    """
    stderr = Console(stderr=True)
    given = (reference, candidate, samples, labels)
    require_output(certificate, "the certificate", others=given)
    require_output(html, "the page", others=(*given, certificate))
    sizes = sizes_of(dim or ())
    judged_in = precisions_of(precisions)
    wide, half = open_model(reference), open_model(candidate)
    budgets = {
        name: usual_budget(
            name,
            max_abs_error=max_abs_error,
            max_scaled_error=max_scaled_error,
            min_agreement=min_agreement,
            max_non_finite=max_non_finite,
            min_headroom=min_headroom,
        )
        for name in HALF_TYPES
    }
    judged_on = synthetic_samples(wide, dims=sizes) if samples is None else SampleSet(inputs=load_samples(samples, wide))
    try:
        with hint_for_synthetic_inputs(synthetic=samples is None), stderr.status("verifying"):
            verdict = verify_models(
                wide,
                half,
                judged_on.inputs,
                budget={name: judged_on.budget(budget) for name, budget in budgets.items()},
                precisions=judged_in,
                labels=None if labels is None else load_labels(labels),
                batch_size=batch_size,
                name=candidate.stem,
                adversarial=adversarial,
                longest=None if samples is None else sizes,
                accumulators=accumulators,
                cuda=None if provider == "auto" else provider == "cuda",
                notes=judged_on.notes,
            )
    except BudgetExceeded as error:
        _show(error.certificate, html, certificate, as_json=as_json)
        raise
    _show(verdict, html, certificate, as_json=as_json)
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
        Console().print(certificate_table(verdict))
