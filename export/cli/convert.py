"""`halfserve convert`: an ONNX file becomes a verified half-precision model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfserve.export.captured_samples import MOST, given_samples
from halfserve.export.certificate.certificate import signing_key
from halfserve.export.cli.output import as_plain, print_conversion, run_explained
from halfserve.export.cli.shared_options import (
    EXIT_CODES,
    AsJson,
    BudgetOptions,
    VerdictFiles,
    VersionOptions,
    hint_for_synthetic_inputs,
    report,
    repository_version,
    sizes_of,
)
from halfserve.export.conversion_settings import PipelineSettings, verification
from halfserve.export.conversion_targets import ConversionTarget, FileTarget
from halfserve.export.export_errors import UsageError
from halfserve.export.file_conversion import convert_verified
from halfserve.export.verification.criteria import Verification
from halfserve.export.verification.samples import SampleSet
from halfserve.option_groups import takes_option_groups

if TYPE_CHECKING:
    from halfserve.export.onnx_files.model_file import ModelFile

__all__ = ["EXIT_CODES", "convert"]


@dataclass(frozen=True, kw_only=True)
class ConvertedSamples:
    """Whether the model is verified, and on which samples."""

    verify: Annotated[bool, verification(help="Compare the result with the source before it is written.")] = True
    samples: Annotated[
        Path | None,
        verification(
            help="An .npz with an array per input to verify on, or a folder of captured requests; by default made up."
        ),
    ] = None
    max_samples: Annotated[int, verification(min=1, help="How many captured samples to verify on, at most.")] = MOST
    dim: Annotated[
        list[str] | None, verification(help="Size of a variable dimension for made-up inputs, as NAME=SIZE; may be repeated.")
    ] = None

    def loader(self) -> Callable[[ModelFile], SampleSet]:
        """Return a function that loads the samples of a model, or makes them up where there is no file.

        Raises:
            UsageError: An entry of `dim` has another form than NAME=SIZE.
        """
        sizes = sizes_of(self.dim or ())

        def load(model: ModelFile) -> SampleSet:
            if self.samples is not None:
                return given_samples(self.samples, model, most=self.max_samples)
            from halfserve.export.verification.generated.synthetic import synthetic_samples  # noqa: PLC0415  (slow to import, and needed only here)

            return synthetic_samples(model, dims=sizes)

        return load


@dataclass(frozen=True, kw_only=True)
class ConversionReports(VerdictFiles):
    """The verdict's files, and how much of the placement is printed."""

    placement: Annotated[
        bool,
        report(
            "--placement", help="List the operators on each device of ONNX Runtime, and the groups of nodes that stay float32."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ConvertedVersion(VersionOptions):
    """A version in a model repository, where the model is not written to a file."""

    name: Annotated[str | None, repository_version(help="The model's name in the repository; by default from the source.")] = (
        None
    )
    max_batch_size: Annotated[
        int | None, repository_version(help="Largest batch that the server may form, 0 for none; 32 by default.")
    ] = None
    overwrite: Annotated[bool, repository_version("--overwrite", help="Replace a model that exists already.")] = False


@takes_option_groups
def convert(
    source: Annotated[Path, typer.Argument(help="The float32 ONNX model; its data files lie beside it.", show_default=False)],
    target: Annotated[
        Path | None, typer.Argument(help="The converted ONNX model to write; or give --repository.", show_default=False)
    ] = None,
    *,
    settings: PipelineSettings,
    sampling: ConvertedSamples,
    budget: BudgetOptions,
    reports: ConversionReports,
    repository: Annotated[
        str | None,
        repository_version(
            help="Add a version to this model repository, a folder or a URL such as s3://bucket/models, in place of a file."
        ),
    ] = None,
    version: ConvertedVersion,
    as_json: AsJson = False,
) -> None:
    """Convert a float32 ONNX model to half precision, verify it, and write it.

    The converted model is compared with the float32 one; where it differs by more than the budget allows, the fewest nodes that
    have to stay float32 are searched for, and if that is not enough nothing is written and the exit code is 3. Ctrl-C ends the
    search, a second one the command: the smallest set that passed so far is written. Models of any size are converted weight
    by weight. The file contains its certificate, which `halfserve verify TARGET` shows and a server checks.

    Example: halfserve convert model.onnx model.fp16.onnx --samples samples.npz

    Example: halfserve convert model.onnx --repository models --samples captured/model

    Example: halfserve convert model.onnx model.bf16.onnx --dtype bfloat16 --upgrade-opset

    Example: halfserve convert model.onnx --repository models --precisions float16,bfloat16 --fp32-twin
    """
    budgets = budget.budgets()
    place = _target(source, target, repository, version)
    needing = {
        "samples": sampling.samples,
        "certificate": reports.certificate,
        "html": reports.html,
        "certificate-key": reports.certificate_key,
        "repository": repository,
        "precisions": settings.precisions,
    }
    if not sampling.verify and any(needing.values()):
        option = next(option for option, value in needing.items() if value)
        raise UsageError(f"--{option} needs verification; leave --no-verify out")
    beside = reports.beside(source, target, sampling.samples)
    verification = Verification(samples=sampling.loader(), budget=budgets, key=signing_key(reports.certificate_key))
    work = partial(convert_verified, source, place, settings, verification if sampling.verify else None, beside=beside)
    with hint_for_synthetic_inputs(synthetic=sampling.samples is None):
        done = run_explained(work)
    if as_json:
        typer.echo(json.dumps(as_plain(done)))
    else:
        print_conversion(done, in_full=reports.placement)


def _target(source: Path, target: Path | None, repository: str | None, version: ConvertedVersion) -> ConversionTarget:
    if target is None and repository is not None:
        if version.overwrite:
            raise UsageError("a version in a repository is never replaced; leave --overwrite out")
        return version.target(repository, default_name=source.stem)
    if target is None or repository is not None:
        raise UsageError("give either the file to write or --repository, one of the two")
    if version != ConvertedVersion(overwrite=version.overwrite):
        raise UsageError(
            "--name, --version, --max-batch-size and --fp32-twin belong to --repository; leave the file to write out"
        )
    return FileTarget(path=target, overwrite=version.overwrite)
