"""`halfserve export`: a PyTorch model of any origin becomes a verified half-precision model in a repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfserve.export.certificate.budget import Budget, usual_budgets
from halfserve.export.certificate.certificate import signing_key
from halfserve.export.cli.output import as_plain, print_conversion, run_explained
from halfserve.export.cli.shared_options import (
    EXIT_CODES,
    AsJson,
    MinAgreement,
    VerdictFiles,
    VersionOptions,
    budget_limit,
    dynamic_sizes,
)
from halfserve.export.conversion_settings import ModuleSettings, conversion
from halfserve.export.sources.source_options import SourceOptions
from halfserve.option_groups import takes_option_groups

if TYPE_CHECKING:
    from halfserve.export.conversion_results import Certified

__all__ = ["EXIT_CODES", "export"]


@dataclass(frozen=True, kw_only=True)
class ExportBudget:
    """Limits of the errors, for models of every type."""

    max_abs_error: Annotated[
        float | None,
        budget_limit(
            help="Largest error of an output, in its unit; by default 0.01 of its largest magnitude, 0.04 in bfloat16."
        ),
    ] = None
    min_agreement: MinAgreement = Budget.min_agreement


@takes_option_groups
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint of halfserve train, a Hugging Face folder, ORG/NAME[@REVISION] of the Hugging Face Hub, "
            "MODULE:FACTORY of a function that returns the module, timm:NAME or torchvision:NAME, or a .pt2 of "
            "torch.export.save.",
            show_default=False,
        ),
    ],
    *,
    repository: Annotated[
        str,
        typer.Option(
            help="The model repository's folder, made if missing; or its URL in object storage, such as s3://bucket/models.",
            show_default=False,
        ),
    ],
    version: VersionOptions,
    budget: ExportBudget,
    settings: ModuleSettings,
    dynamic: Annotated[
        list[str] | None,
        conversion(
            help="Size, beside the batch's, that may vary, as INPUT.AXIS=NAME: tokens.1=length, or image.2=4*height for "
            "multiples of 4; may be repeated."
        ),
    ] = None,
    origin: SourceOptions,
    reports: VerdictFiles,
    as_json: AsJson = False,
) -> None:
    """Convert a PyTorch model to half precision, verify it, and add it to a model repository.

    The converted model is compared with the float32 one on samples; where it differs by more than the budget allows, the fewest
    nodes that have to stay float32 are searched for, and if that is not enough nothing is written and the exit code is 3.
    Ctrl-C ends the search, a second one the command: the smallest set that passed so far is written. Of a checkpoint, the
    samples are the held-out set, and what its training policy added to float32, or its record shows over float16's range, stays
    float32.

    Example: halfserve export runs/digits/checkpoint.pt --repository models

    Example: halfserve export sentence-transformers/all-MiniLM-L6-v2 --repository models

    Example: halfserve export timm:resnet50 --weights weights.pth --repository models

    Example: halfserve export my_package.model:build --weights model.safetensors --samples samples.npz --repository models
    """
    beside = reports.beside(Path(source), origin.weights, origin.samples)
    budgets = usual_budgets(**vars(budget))
    # torch takes seconds to import; --help and wrong usage answer before it.
    from halfserve.export.module_pipeline import export_verified  # noqa: PLC0415  (see above)
    from halfserve.export.sources.opening import open_source  # noqa: PLC0415  (see above)

    asked = dynamic_sizes(dynamic or ())
    key = signing_key(reports.certificate_key)

    def work(progress: Callable[[str], None]) -> Certified:
        progress("reading the model")
        opened = open_source(source, origin, progress)
        return export_verified(
            opened.module,
            opened.samples,
            version.target(repository, default_name=opened.name, task=opened.task),
            settings,
            budget=budgets,
            dynamic={**opened.dynamic, **asked},
            policy=opened.policy,
            record=opened.record,
            metadata=opened.metadata,
            origin=opened.origin,
            key=key,
            progress=progress,
            beside=beside,
        )

    done = run_explained(work)
    if as_json:
        typer.echo(json.dumps({**as_plain(done), "version": int(done.path.name)}))
    else:
        print_conversion(done)
