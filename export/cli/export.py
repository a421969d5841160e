"""`halfserve export`: a PyTorch model of any origin becomes a verified half-precision model in a repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfserve.export.certificate.budget import usual_budgets
from halfserve.export.certificate.certificate import signing_key
from halfserve.export.cli.options import (
    EXIT_CODES,
    MAX_BATCH_SIZE,
    AccumulatorType,
    Adversarial,
    AsJson,
    CertificateFile,
    CertificateKey,
    Dtype,
    Fp32Twin,
    HtmlPage,
    KeepIoTypes,
    MaxMinutes,
    MaxRuns,
    MinAgreement,
    ModelVersion,
    Precisions,
    Search,
    budget_limit,
    conversion,
    dynamic_sizes,
    page_beside,
    precisions_of,
    repository_version,
    verification,
)
from halfserve.export.cli.output import as_plain, print_conversion, run_explained, verdict_files
from halfserve.export.conversion_targets import RepositoryTarget
from halfserve.export.search.narrowing import MAX_RUNS, SearchLimits

if TYPE_CHECKING:
    from halfserve.export.file_conversion import Certified

__all__ = ["EXIT_CODES", "export"]


def export(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint of halfserve train, a Hugging Face folder, MODULE:FACTORY of a function that returns the "
            "module, timm:NAME or torchvision:NAME, or a .pt2 of torch.export.save.",
            show_default=False,
        ),
    ],
    repository: Annotated[
        str,
        typer.Option(
            help="The model repository's folder, made if missing; or its URL in object storage, such as s3://bucket/models.",
            show_default=False,
        ),
    ],
    name: Annotated[str | None, repository_version(help="The model's name; by default from the source.")] = None,
    version: ModelVersion = None,
    max_abs_error: Annotated[
        float | None,
        budget_limit(
            help="Largest error of an output, in its unit; by default 0.01 of its largest magnitude, 0.04 in bfloat16."
        ),
    ] = None,
    min_agreement: MinAgreement = 0.995,
    max_batch_size: Annotated[int, repository_version(help="Largest batch that the server may form.")] = MAX_BATCH_SIZE,
    keep_fp32: Annotated[
        list[str] | None, conversion(help="Tensor or submodule to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    dtype: Dtype = "float16",
    keep_io_types: KeepIoTypes = True,
    dynamic: Annotated[
        list[str] | None,
        conversion(
            help="Size, beside the batch's, that may vary, as INPUT.AXIS=NAME: tokens.1=length, or image.2=4*height for "
            "multiples of 4; may be repeated."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Weights for a function's or library's model: .safetensors, .pt, .pth, sharded, or a folder of them."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="The task of a Hugging Face folder, such as embeddings; by default as its architecture says."),
    ] = None,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Open a pickled module, which may run any code.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the Python code that a Hugging Face folder brings.")
    ] = False,
    samples: Annotated[
        Path | None,
        verification(
            help="Samples to verify on: an .npz with an array for each parameter of forward, an .npy, a text file with a "
            "sentence in each line, or a folder of pictures or .wav files."
        ),
    ] = None,
    max_samples: Annotated[int, verification(min=1, help="How many samples to verify on, at most.")] = 1024,
    search: Search = True,
    max_runs: MaxRuns = MAX_RUNS,
    max_minutes: MaxMinutes = None,
    adversarial: Adversarial = True,
    accumulators: AccumulatorType = "float32",
    precisions: Precisions = "",
    fp32_twin: Fp32Twin = False,
    certificate: CertificateFile = None,
    html: HtmlPage = False,
    certificate_key: CertificateKey = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Convert a PyTorch model to half precision, verify it, and add it to a model repository.

    The converted model is compared with the float32 one on samples; where it differs by more than the budget allows, the fewest
    nodes that have to stay float32 are searched for, and if that is not enough nothing is written and the exit code is 3.
    Ctrl-C ends the search, a second one the command: the smallest set that passed so far is written. Of a checkpoint, the
    samples are the held-out set, and what its training policy added to float32, or its record shows over float16's range, stays
    float32.

    Example: halfserve export runs/digits/checkpoint.pt --repository models

    Example: halfserve export all-MiniLM-L6-v2 --task embeddings --repository models

    Example: halfserve export timm:resnet50 --weights weights.pth --repository models

    Example: halfserve export my_package.model:build --weights model.safetensors --samples samples.npz --repository models
    """
    page = page_beside(certificate, html=html, others=(Path(source), weights, samples))
    budget = usual_budgets(max_abs_error=max_abs_error, min_agreement=min_agreement)
    # torch takes seconds to import; --help and wrong usage answer before it.
    from halfserve.export.module_pipeline import ExportOptions, export_verified  # noqa: PLC0415  (see above)
    from halfserve.export.sources.opening import open_source  # noqa: PLC0415  (see above)
    from halfserve.export.sources.source import SourceOptions  # noqa: PLC0415  (see above)

    asked = dynamic_sizes(dynamic or ())
    about = SourceOptions(
        weights=weights,
        samples=samples,
        max_samples=max_samples,
        task=task,
        trust_pickle=trust_pickle,
        trust_remote_code=trust_remote_code,
    )

    def work(progress: Callable[[str], None]) -> Certified:
        progress("reading the model")
        opened = open_source(source, about)
        target = RepositoryTarget(
            repository=repository,
            name=opened.name if name is None else name,
            version=version,
            max_batch_size=max_batch_size,
            fp32_twin=fp32_twin,
            default_name=name is None,
            task=opened.task,
        )
        return export_verified(
            opened.module,
            opened.samples,
            target,
            replace(options, dynamic={**opened.dynamic, **asked}),
            policy=opened.policy,
            record=opened.record,
            metadata=opened.metadata,
            progress=progress,
        )

    options = ExportOptions(
        budget=budget,
        dtype=dtype,
        keep_fp32=keep_fp32 or (),
        keep_io_types=keep_io_types,
        search=search,
        limits=SearchLimits(max_runs=max_runs, max_minutes=max_minutes),
        adversarial=adversarial,
        accumulators=accumulators,
        beside=verdict_files(certificate, page),
        key=signing_key(certificate_key),
        precisions=precisions_of(precisions),
    )
    done = run_explained(work)
    if as_json:
        typer.echo(json.dumps({**as_plain(done), "version": int(done.path.name)}))
    else:
        print_conversion(done)
