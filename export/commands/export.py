"""`halfserve export`: from a checkpoint to a verified version in a model repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from amp_core.checkpoint import CheckpointError
from export.certificate.certificate import BudgetExceeded
from export.certificate.table import certificate_table
from export.errors import ExportError
from export.pipeline import Exported, export_checkpoint
from export.verification.budget import Budget

EXIT_CODES: dict[type[Exception], int] = {BudgetExceeded: 3, ExportError: 1, CheckpointError: 1}


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A file that `halfserve train` wrote.", show_default=False)],
    repository: Annotated[Path, typer.Option(help="The model repository's folder; made if missing.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="The model's name; by default from the model's module.")] = None,
    version: Annotated[int | None, typer.Option(help="The version; the next free one by default.")] = None,
    max_abs_error: Annotated[
        float | None, typer.Option(help="Largest error of an output, in its unit; by default 0.01 of its largest magnitude.")
    ] = None,
    min_agreement: Annotated[float, typer.Option(help="Least share of samples with the reference's argmax.")] = 0.995,
    max_batch_size: Annotated[int, typer.Option(help="Largest batch that the server may form.")] = 32,
    keep_fp32: Annotated[
        list[str] | None, typer.Option(help="Tensor or submodule to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    samples: Annotated[int, typer.Option(help="How many held-out samples to verify on, at most.")] = 1024,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Convert a checkpoint's model to fp16, verify it, and add it to a model repository.

    The fp16 model is compared with the float32 one on held-out samples; when it differs by more than the budget allows,
    nothing is written and the exit code is 3.

    Example: halfserve export runs/digits/checkpoint.pt --repository models
    """
    stderr = Console(stderr=True)
    budget = Budget(max_abs_error=max_abs_error, min_agreement=min_agreement)
    try:
        with stderr.status("starting") as status:
            done = export_checkpoint(
                checkpoint,
                repository,
                budget=budget,
                name=name,
                version=version,
                max_batch_size=max_batch_size,
                keep_fp32=keep_fp32 or (),
                samples=samples,
                progress=status.update,
            )
    except BudgetExceeded as error:
        stderr.print(certificate_table(error.certificate))
        raise
    _print(done, as_json=as_json)


def _print(done: Exported, *, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps({"path": str(done.path), "version": int(done.path.name), "certificate": done.certificate.to_json()})
        )
        return
    console = Console()
    console.print(certificate_table(done.certificate))
    console.print(f"written   {done.path}", highlight=False, soft_wrap=True)
