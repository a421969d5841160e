"""`halfserve convert`: an ONNX file becomes a verified half-precision model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
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
    MaxAbsError,
    MaxMinutes,
    MaxRuns,
    MaxScaledError,
    MinAgreement,
    ModelVersion,
    Precisions,
    Search,
    conversion,
    hint_for_synthetic_inputs,
    page_beside,
    precisions_of,
    report,
    repository_version,
    sizes_of,
    verification,
)
from halfserve.export.cli.output import as_plain, print_conversion, run_explained, verdict_files
from halfserve.export.conversion_targets import ConversionTarget, FileTarget, RepositoryTarget
from halfserve.export.errors import UsageError
from halfserve.export.file_conversion import ConversionOptions, Verification, convert_verified
from halfserve.export.onnx_files.model_writer import ExternalData
from halfserve.export.search.narrowing import MAX_RUNS, SearchLimits
from halfserve.export.verification.samples import SampleSet, load_samples

if TYPE_CHECKING:
    from halfserve.export.onnx_files.model_file import ModelFile

__all__ = ["EXIT_CODES", "convert"]


def convert(
    source: Annotated[Path, typer.Argument(help="The float32 ONNX model; its data files lie beside it.", show_default=False)],
    target: Annotated[
        Path | None, typer.Argument(help="The converted ONNX model to write; or give --repository.", show_default=False)
    ] = None,
    dtype: Dtype = "float16",
    keep_io_types: KeepIoTypes = True,
    block_op: Annotated[
        list[str] | None, conversion(help="Operator to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    block_node: Annotated[
        list[str] | None, conversion(help="Node to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    repair: Annotated[bool, conversion(help="Rewrite what the type could not hold, as large BatchNorm statistics.")] = True,
    upgrade_opset: Annotated[
        bool,
        conversion(
            "--upgrade-opset",
            help="Raise an older model's opset: LayerNormalization is one operator from 17, and Conv takes bfloat16 from 22.",
        ),
    ] = False,
    external_data: Annotated[
        ExternalData, conversion(help="Weights in files of their own: as in the source or over 2 GiB, always, or never.")
    ] = "auto",
    verify: Annotated[bool, verification(help="Compare the result with the source before it is written.")] = True,
    samples: Annotated[
        Path | None, verification(help="An .npz with an array per input to verify on; by default inputs are made up.")
    ] = None,
    dim: Annotated[
        list[str] | None, verification(help="Size of a variable dimension for made-up inputs, as NAME=SIZE; may be repeated.")
    ] = None,
    max_abs_error: MaxAbsError = None,
    max_scaled_error: MaxScaledError = None,
    min_agreement: MinAgreement = 0.995,
    adversarial: Adversarial = True,
    accumulators: AccumulatorType = "float32",
    precisions: Precisions = "",
    search: Search = True,
    max_runs: MaxRuns = MAX_RUNS,
    max_minutes: MaxMinutes = None,
    certificate: CertificateFile = None,
    html: HtmlPage = False,
    certificate_key: CertificateKey = None,
    placement: Annotated[
        bool, report("--placement", help="Show in full where ONNX Runtime puts the nodes, and float32 islands.")
    ] = False,
    repository: Annotated[
        str | None,
        repository_version(
            help="Add a version to this model repository, a folder or a URL such as s3://bucket/models, in place of a file."
        ),
    ] = None,
    name: Annotated[str | None, repository_version(help="The model's name there; by default the source's.")] = None,
    version: ModelVersion = None,
    max_batch_size: Annotated[
        int | None, repository_version(help="Largest batch that the server may form, 0 for none; 32 by default.")
    ] = None,
    fp32_twin: Fp32Twin = False,
    overwrite: Annotated[bool, repository_version("--overwrite", help="Replace a model that is there already.")] = False,
    *,
    as_json: AsJson = False,
) -> None:
    """Convert a float32 ONNX model to half precision, verify it, and write it.

    The converted model is compared with the float32 one; where it differs by more than the budget allows, the fewest nodes that
    have to stay float32 are searched for, and if that is not enough nothing is written and the exit code is 3. Ctrl-C ends the
    search, a second one the command: the smallest set that passed so far is written. Models of any size are converted weight
    by weight.

    Example: halfserve convert model.onnx model.fp16.onnx --samples samples.npz

    Example: halfserve convert model.onnx model.bf16.onnx --dtype bfloat16 --upgrade-opset

    Example: halfserve convert model.onnx --repository models --precisions float16,bfloat16 --fp32-twin
    """
    budget = usual_budgets(max_abs_error=max_abs_error, max_scaled_error=max_scaled_error, min_agreement=min_agreement)
    place = _target(source, target, repository, name, version, max_batch_size, fp32_twin=fp32_twin, overwrite=overwrite)
    needing = [
        option
        for option, value in (
            ("samples", samples),
            ("certificate", certificate),
            ("repository", repository),
            ("precisions", precisions),
        )
        if value
    ]
    if not verify and needing:
        raise UsageError(f"--{needing[0]} needs verification; leave --no-verify out")
    if certificate_key is not None and repository is None and certificate is None:
        raise UsageError("--certificate-key signs the certificate; give --certificate or --repository too")
    judged_in = precisions_of(precisions)
    page = page_beside(certificate, html=html, others=(source, target, samples))
    inputs = _inputs(samples, sizes_of(dim or ()))
    work = partial(
        convert_verified,
        source,
        place,
        options=ConversionOptions(
            keep_io_types=keep_io_types,
            op_block_list=block_op or (),
            node_block_list=block_node or (),
            repair=repair,
            upgrade_opset=upgrade_opset,
            dtype=dtype,
            external_data=external_data,
        ),
        verification=Verification(
            samples=inputs,
            budget=budget,
            adversarial=adversarial,
            accumulators=accumulators,
            search=search,
            limits=SearchLimits(max_runs=max_runs, max_minutes=max_minutes),
            key=signing_key(certificate_key),
            precisions=judged_in,
        )
        if verify
        else None,
        beside=verdict_files(certificate, page),
    )
    with hint_for_synthetic_inputs(synthetic=samples is None):
        done = run_explained(work)
    if as_json:
        typer.echo(json.dumps(as_plain(done)))
    else:
        print_conversion(done, in_full=placement)


def _target(
    source: Path,
    target: Path | None,
    repository: str | None,
    name: str | None,
    version: int | None,
    max_batch_size: int | None,
    *,
    fp32_twin: bool,
    overwrite: bool,
) -> ConversionTarget:
    if (target is None) == (repository is None):
        raise UsageError("give either the file to write or --repository, one of the two")
    if target is not None:
        if name is not None or version is not None or max_batch_size is not None or fp32_twin:
            raise UsageError(
                "--name, --version, --max-batch-size and --fp32-twin belong to --repository; leave the file to write out"
            )
        return FileTarget(path=target, overwrite=overwrite)
    if overwrite:
        raise UsageError("a version in a repository is never replaced; leave --overwrite out")
    return RepositoryTarget(
        repository=repository or "",
        name=source.stem if name is None else name,
        version=version,
        max_batch_size=MAX_BATCH_SIZE if max_batch_size is None else max_batch_size,
        fp32_twin=fp32_twin,
        default_name=name is None,
    )


def _inputs(samples: Path | None, sizes: dict[str, int]) -> Callable[[ModelFile], SampleSet]:
    def synthetic(model: ModelFile) -> SampleSet:
        from halfserve.export.verification.generated_samples import synthetic_samples  # noqa: PLC0415  (slow to import, and needed only here)

        return synthetic_samples(model, dims=sizes)

    return synthetic if samples is None else lambda model: SampleSet(inputs=load_samples(samples, model))
