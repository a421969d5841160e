"""`halfserve convert`: from a float32 ONNX file to a verified float16 one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from export.certificate.budget import Budget
from export.certificate.certificate import BudgetExceeded
from export.commands.conversion_output import as_plain, explain, print_conversion, verdict_files
from export.commands.made_up import NOTE, sizes_of, way_out
from export.commands.output_files import page_beside, require_output
from export.commands.progress import progress_on
from export.conversion_targets import FileTarget, RepositoryTarget, Target
from export.errors import ExportError, UsageError
from export.file_conversion import Accumulators, Options, Verification, convert_verified
from export.onnx_files.model_writer import ExternalData
from export.sample_files import load_samples
from export.search.narrowing import MAX_RUNS, SearchLimits

if TYPE_CHECKING:
    from export.onnx_files.model_file import ModelFile
    from export.verification.samples import Array

MAX_BATCH_SIZE = 32
EXIT_CODES: dict[type[Exception], int] = {BudgetExceeded: 3, UsageError: 2, ExportError: 1}

_conversion = partial(typer.Option, rich_help_panel="Conversion")
_verification = partial(typer.Option, rich_help_panel="Verification")
_report = partial(typer.Option, rich_help_panel="Report")
_repository = partial(typer.Option, rich_help_panel="Model repository")


def convert(
    source: Annotated[Path, typer.Argument(help="The float32 ONNX model; its data files lie beside it.", show_default=False)],
    target: Annotated[
        Path | None, typer.Argument(help="The float16 ONNX model to write; or give --repository.", show_default=False)
    ] = None,
    keep_io_types: Annotated[
        bool, _conversion("--keep-io-types/--float16-io", help="Inputs and outputs stay float32, or become float16 too.")
    ] = True,
    block_op: Annotated[
        list[str] | None, _conversion(help="Operator to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    block_node: Annotated[
        list[str] | None, _conversion(help="Node to keep in float32, as a shell pattern; may be repeated.")
    ] = None,
    repair: Annotated[
        bool, _conversion(help="Rewrite what float16 could not hold, such as large BatchNorm statistics.")
    ] = True,
    upgrade_opset: Annotated[
        bool,
        _conversion(
            "--upgrade-opset", help="Raise a model from before opset 17 to it: a LayerNormalization is one operator there."
        ),
    ] = False,
    external_data: Annotated[
        ExternalData, _conversion(help="Weights in files of their own: as in the source or over 2 GiB, always, or never.")
    ] = "auto",
    verify: Annotated[bool, _verification(help="Compare the result with the source before it is written.")] = True,
    samples: Annotated[
        Path | None, _verification(help="An .npz with an array per input to verify on; by default inputs are made up.")
    ] = None,
    dim: Annotated[
        list[str] | None, _verification(help="Size of a variable dimension for made-up inputs, as NAME=SIZE; may be repeated.")
    ] = None,
    max_abs_error: Annotated[
        float | None, _verification(help="Largest error of an output, in its unit; replaces --max-scaled-error.")
    ] = None,
    max_scaled_error: Annotated[
        float, _verification(help="Largest error of an output, as a share of its largest magnitude.")
    ] = 0.01,
    min_agreement: Annotated[float, _verification(help="Least share of samples with the reference's argmax.")] = 0.995,
    adversarial: Annotated[
        bool, _verification(help="Try inputs at the edge of the samples too: zeros, large ones, masked rows.")
    ] = True,
    accumulators: Annotated[
        Accumulators, _verification(help="In which type the runtime sums: float32 as ONNX Runtime, or float16 as TensorRT.")
    ] = "float32",
    search: Annotated[
        bool, _verification(help="Find the fewest nodes to keep in float32 where the result is over budget.")
    ] = True,
    max_runs: Annotated[
        int, _verification(help="How many sets of such nodes the search may try; it keeps the smallest that passed.")
    ] = MAX_RUNS,
    max_minutes: Annotated[
        float | None, _verification(help="Minutes after which the search tries no further set; no limit by default.")
    ] = None,
    certificate: Annotated[Path | None, _report(help="Write the verdict to this JSON file too.")] = None,
    html: Annotated[bool, _report("--html", help="Write it as an HTML page beside --certificate too.")] = False,
    placement: Annotated[
        bool, _report("--placement", help="Show in full where ONNX Runtime puts the nodes, and float32 islands.")
    ] = False,
    repository: Annotated[
        Path | None, _repository(help="Add a version to this model repository instead of writing a file.")
    ] = None,
    name: Annotated[str | None, _repository(help="The model's name there; by default the source's.")] = None,
    version: Annotated[int | None, _repository(help="The version there; the next free one by default.")] = None,
    max_batch_size: Annotated[
        int | None, _repository(help="Largest batch that the server may form, 0 for none; 32 by default.")
    ] = None,
    fp32_twin: Annotated[
        bool, _repository("--fp32-twin", help="Put the float32 model there too, for a server that can fall back on it.")
    ] = False,
    overwrite: Annotated[bool, _repository("--overwrite", help="Replace a model that is there already.")] = False,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Convert a float32 ONNX model to float16, verify it, and write it.

    The float16 model is compared with the float32 one; where it differs by more than the budget allows, the fewest nodes that
    have to stay float32 are searched for, and if that is not enough nothing is written and the exit code is 3. Ctrl-C ends the
    search, a second one the command: the smallest set that passed so far is written. Models of any size are converted weight
    by weight.

    Example: halfserve convert model.onnx model.fp16.onnx --samples samples.npz

    Example: halfserve convert model.onnx --repository models --fp32-twin
    """
    stderr = Console(stderr=True)
    budget = Budget(max_abs_error=max_abs_error, max_scaled_error=max_scaled_error, min_agreement=min_agreement)
    options = Options(
        keep_io_types=keep_io_types,
        op_block_list=block_op or (),
        node_block_list=block_node or (),
        repair=repair,
        upgrade_opset=upgrade_opset,
        external_data=external_data,
    )
    place = _target(source, target, repository, name, version, max_batch_size, fp32_twin=fp32_twin, overwrite=overwrite)
    _require_verify(verify=verify, samples=samples, certificate=certificate, repository=repository)
    page = page_beside(certificate, html=html)
    require_output(certificate, "the certificate", others=(source, target, samples))
    require_output(page, "the page", others=(source, target, samples, certificate))
    inputs, verification = _inputs(samples, sizes_of(dim or ())), None
    if verify:
        verification = Verification(
            samples=inputs,
            budget=budget,
            adversarial=adversarial,
            accumulators=accumulators,
            search=search,
            limits=SearchLimits(max_runs=max_runs, max_minutes=max_minutes),
            notes=(NOTE,) if samples is None else (),
        )
    try:
        with progress_on(stderr) as progress:
            done = convert_verified(
                source,
                place,
                options=options,
                verification=verification,
                progress=progress,
                beside=verdict_files(certificate, page),
            )
    except BudgetExceeded as error:
        explain(stderr, error)
        raise
    except ExportError as error:
        if samples is None and (help_ := way_out(error)):
            raise ExportError(f"{error}; {help_}") from error
        raise
    if as_json:
        typer.echo(json.dumps(as_plain(done)))
    else:
        print_conversion(done, in_full=placement)


def _target(
    source: Path,
    target: Path | None,
    repository: Path | None,
    name: str | None,
    version: int | None,
    max_batch_size: int | None,
    *,
    fp32_twin: bool,
    overwrite: bool,
) -> Target:
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
        repository=repository or Path(),
        name=source.stem if name is None else name,
        version=version,
        max_batch_size=MAX_BATCH_SIZE if max_batch_size is None else max_batch_size,
        fp32_twin=fp32_twin,
        default_name=name is None,
    )


def _require_verify(*, verify: bool, samples: Path | None, certificate: Path | None, repository: Path | None) -> None:
    needing = [
        option for option, value in (("samples", samples), ("certificate", certificate), ("repository", repository)) if value
    ]
    if not verify and needing:
        raise UsageError(f"--{needing[0]} needs verification; leave --no-verify out")


def _inputs(samples: Path | None, sizes: dict[str, int]) -> Callable[[ModelFile], Sequence[Array]]:
    def made_up(model: ModelFile) -> Sequence[Array]:
        from export.verification.generated_samples import synthesize  # noqa: PLC0415  (slow to import, and needed only here)

        return synthesize(model, dims=sizes)

    return made_up if samples is None else lambda model: load_samples(samples, model)
