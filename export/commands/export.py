"""`halfserve export`: from a checkpoint to a verified version in a model repository."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from export.certificate.budget import Budget
from export.certificate.certificate import BudgetExceeded
from export.commands.conversion_output import as_plain, explain, print_conversion, verdict_files
from export.commands.output_files import page_beside, require_output
from export.commands.progress import progress_on
from export.errors import ExportError, UsageError
from export.file_conversion import Accumulators
from export.search.narrowing import MAX_RUNS, SearchLimits

EXIT_CODES: dict[type[Exception], int] = {BudgetExceeded: 3, UsageError: 2, ExportError: 1}

_version = partial(typer.Option, rich_help_panel="Version")
_verification = partial(typer.Option, rich_help_panel="Conversion and verification")
_report = partial(typer.Option, rich_help_panel="Report")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A file that `halfserve train` wrote.", show_default=False)],
    repository: Annotated[Path, typer.Option(help="The model repository's folder; made if missing.", show_default=False)],
    name: Annotated[str | None, _version(help="The model's name; by default from the model's module.")] = None,
    version: Annotated[int | None, _version(help="The version; the next free one by default.")] = None,
    max_abs_error: Annotated[
        float | None, _verification(help="Largest error of an output, in its unit; by default 0.01 of its largest magnitude.")
    ] = None,
    min_agreement: Annotated[float, _verification(help="Least share of samples with the reference's argmax.")] = 0.995,
    max_batch_size: Annotated[int, _version(help="Largest batch that the server may form.")] = 32,
    keep_fp32: Annotated[
        list[str] | None, _verification(help="Tensor or submodule to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    keep_io_types: Annotated[
        bool, _verification("--keep-io-types/--float16-io", help="Inputs and outputs stay float32, or become float16 too.")
    ] = False,
    dynamic: Annotated[
        list[str] | None,
        _version(
            help="Size, beside the batch's, that may vary, as INPUT.AXIS=NAME: tokens.1=length, or image.2=4*height for "
            "multiples of 4; may be repeated."
        ),
    ] = None,
    samples: Annotated[int, _verification(help="How many held-out samples to verify on, at most.")] = 1024,
    search: Annotated[
        bool, _verification(help="Find the fewest nodes to keep in float32 where the result is over budget.")
    ] = True,
    max_runs: Annotated[
        int, _verification(help="How many sets of such nodes the search may try; it keeps the smallest that passed.")
    ] = MAX_RUNS,
    max_minutes: Annotated[
        float | None, _verification(help="Minutes after which the search tries no further set; no limit by default.")
    ] = None,
    adversarial: Annotated[bool, _verification(help="Verify on samples at the edge of the held-out ones too.")] = True,
    accumulators: Annotated[
        Accumulators, _verification(help="In which type the target sums: float16 for runtimes such as TensorRT.")
    ] = "float32",
    fp32_twin: Annotated[bool, _version("--fp32-twin", help="Put the float32 model beside the float16 one too.")] = False,
    certificate: Annotated[Path | None, _report(help="Write the verdict to this JSON file too.")] = None,
    html: Annotated[bool, _report("--html", help="Write it as an HTML page beside --certificate too.")] = False,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Convert a checkpoint's model to fp16, verify it, and add it to a model repository.

    The fp16 model is compared with the float32 one on held-out samples; where it differs by more than the budget allows, the
    fewest nodes that have to stay float32 are searched for, and if that is not enough nothing is written and the exit code
    is 3. Ctrl-C ends the search, a second one the command: the smallest set that passed so far is written. What the training
    policy added to float32, and what the training record shows over float16's range, stays float32.

    Example: halfserve export runs/digits/checkpoint.pt --repository models
    """
    page = page_beside(certificate, html=html)
    require_output(certificate, "the certificate", others=(checkpoint,))
    require_output(page, "the page", others=(checkpoint, certificate))
    stderr = Console(stderr=True)
    budget = Budget(max_abs_error=max_abs_error, min_agreement=min_agreement)
    # These bring torch, which takes seconds: who asks for help, or is told of wrong usage, need not wait for it.
    from amp_core.checkpoint import CheckpointError  # noqa: PLC0415  (see above)
    from export.checkpoint_pipeline import export_checkpoint  # noqa: PLC0415  (see above)
    from export.commands.dynamic_sizes import dynamic_sizes  # noqa: PLC0415  (see above)
    from export.module_pipeline import Wishes  # noqa: PLC0415  (see above)

    wishes = Wishes(
        budget=budget,
        keep_fp32=keep_fp32 or (),
        keep_io_types=keep_io_types,
        dynamic=dynamic_sizes(dynamic or ()),
        search=search,
        limits=SearchLimits(max_runs=max_runs, max_minutes=max_minutes),
        adversarial=adversarial,
        accumulators=accumulators,
        beside=verdict_files(certificate, page),
    )
    try:
        with progress_on(stderr) as progress:
            done = export_checkpoint(
                checkpoint,
                repository,
                wishes=wishes,
                samples=samples,
                name=name,
                version=version,
                max_batch_size=max_batch_size,
                fp32_twin=fp32_twin,
                progress=progress,
            )
    except BudgetExceeded as error:
        explain(stderr, error)
        raise
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    if as_json:
        typer.echo(json.dumps({**as_plain(done), "version": int(done.path.name)}))
    else:
        print_conversion(done)
