"""Conversion of an ONNX file to half precision: convert, verify, search for nodes that must stay float32, and publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Unpack

import numpy as np
import onnx_ir

from halfserve.export.certificate.certificate import BudgetExceeded, Certificate, signing_key
from halfserve.export.certificate.verdicts import OutputVerdict, anything_compared
from halfserve.export.conversion_results import Certified, Converted, SearchFailed
from halfserve.export.conversion_settings import PipelineKeywords, PipelineSettings
from halfserve.export.conversion_targets import ConversionTarget, FileTarget
from halfserve.export.export_errors import ExportError, NothingConvertedError, UsageError
from halfserve.export.half_types import FP16, HALF_TYPES, HalfName
from halfserve.export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile, growth, open_model
from halfserve.export.onnx_files.model_writer import waiting_file
from halfserve.export.onnx_fp16.convert import StagedConversion, staged_conversion
from halfserve.export.placement.audit import Placement, audit_placement
from halfserve.export.placement.cuda_kernels import predict_cuda
from halfserve.export.verification.criteria import Verification

if TYPE_CHECKING:
    from halfserve.export.certificate.budget import Budget
    from halfserve.export.onnx_fp16.conversion_report import ConversionReport
    from halfserve.export.search.result import SearchResult
    from halfserve.export.verification.generated.lengths import LongerSizes
    from halfserve.export.verification.samples import Array, SampleSet


# ONNX Runtime's CPU provider cannot open a bfloat16 model, so its placement is only measured where a device computes bfloat16.
NO_PLACEMENT = "not asked for: where no device computes bfloat16, the server computes the model in float32"
BFLOAT16_WEIGHTS = "the weights are bfloat16 numbers, so bfloat16 was tried first"
_MOST = 0.9  # fraction of the elements; folded constants may be others
_CHUNK_ELEMENTS = 1 << 19
_EXAMPLES = 3  # nodes that an error names
_LOW_BITS = np.uint32(0xFFFF)  # mask of the bits of a float32 number that are 0 in every bfloat16 number
Beside: TypeAlias = Callable[["Certificate"], Sequence[tuple[Path, bytes]]]


def nothing_beside(certificate: Certificate) -> Sequence[tuple[Path, bytes]]:  # noqa: ARG001  (see Beside)
    return ()


def convert(
    source: Path | str,
    target: Path | str,
    *,
    samples: Mapping[str, Array] | Path | str | None = None,
    budget: Budget | None = None,
    labels: Array | None = None,
    overwrite: bool = False,
    certificate_key: Path | str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **options: Unpack[PipelineKeywords],
) -> Certified:
    """Convert a float32 ONNX file to float16 or bfloat16, verify it, and write it if it is within the budget.

    `halfserve convert SOURCE TARGET` does the same. Over budget, it searches for the fewest nodes that must stay float32.

    Args:
        source: The float32 model.
        target: The file to write.
        samples: Arrays by input name, samples first, a file that `numpy.savez` wrote, or a folder of captured requests; by
            default random inputs.
        budget: How much the converted model may differ; the usual budget of its type by default.
        labels: The samples' true classes, for the accuracy: whole numbers, shape (samples,).
        overwrite: Whether an existing model at `target` may be replaced.
        certificate_key: PEM file of an Ed25519 private key, which signs the certificate.
        progress: Called with each step before it begins.
        options: The fields of `PipelineSettings`.

    Returns:
        The path, the certificate, the report of the conversion and the result of the search.

    Raises:
        BudgetExceeded: The converted model is over budget; nothing was written.
        ExportError: The conversion fails for another reason; nothing was written.
    """
    from halfserve.export.captured_samples import given_samples  # noqa: PLC0415  (slow to import)
    from halfserve.export.certificate.budget import usual_budgets  # noqa: PLC0415  (slow to import)
    from halfserve.export.verification.generated.synthetic import synthetic_samples  # noqa: PLC0415  (slow to import)

    given = Path(samples) if isinstance(samples, str) else samples
    verification = Verification(
        samples=synthetic_samples if given is None else lambda model: given_samples(given, model),
        budget=budget or usual_budgets(),
        labels=labels,
        key=signing_key(certificate_key),
    )
    place, settings = FileTarget(path=Path(target), overwrite=overwrite), PipelineSettings.of_call("convert", **options)
    return Certified(**vars(convert_verified(Path(source), place, settings, verification, progress=progress)))


def convert_verified(
    source: Path,
    target: ConversionTarget,
    settings: PipelineSettings,
    verification: Verification | None,
    *,
    progress: Callable[[str], None] = lambda _: None,
    beside: Beside = nothing_beside,
) -> Converted:
    """Convert a file, verify the staged result, and publish it if it passes; without `verification`, publish it in any case.

    `progress` is called with each step before it begins. `beside` makes more files of the certificate, as (path, content),
    which are written together with the model or not at all.

    Raises:
        BudgetExceeded: The converted model is over budget; nothing was written.
        ExportError: The conversion fails for another reason; nothing was written.
    """
    progress("reading the model")
    opened = open_model(source)
    target.check(opened)

    if settings.dtype != "auto":
        return _converted(opened, target, settings, verification, progress, beside)
    if verification is None:
        raise UsageError("dtype 'auto' chooses by the verdict; verify the model, or name float16 or bfloat16")
    return _converted_to_either(opened, target, settings, verification, progress, beside)


def _converted_to_either(
    opened: ModelFile,
    target: ConversionTarget,
    settings: PipelineSettings,
    verification: Verification,
    progress: Callable[[str], None],
    beside: Beside,
) -> Converted:
    """Convert to the first type that passes, else search in the type that is nearer to its budget; notes give the reasons."""
    samples = verification.samples(opened)
    lengths = _lengths(opened, samples, settings, verification)
    verification = replace(verification, samples=lambda _: samples, lengths=lengths)  # once
    types: tuple[HalfName, ...] = ("float16", "bfloat16")
    notes = verification.notes
    if _holds_bfloat16_weights(opened):
        types, notes = types[::-1], (*notes, BFLOAT16_WEIGHTS)
    over: dict[HalfName, BudgetExceeded | NothingConvertedError] = {}
    for dtype in types:
        noted = replace(verification, notes=(*notes, *_notes_on_rejected(over)))
        try:
            return _converted(opened, target, replace(settings, dtype=dtype, search=False), noted, progress, beside)
        except (BudgetExceeded, NothingConvertedError) as error:
            over[dtype] = error
    nearest = _nearest_to_budget(over)
    if not settings.search or isinstance(over[nearest], NothingConvertedError):
        raise over[nearest]
    noted = replace(verification, notes=(*notes, *_notes_on_rejected(over)))
    return _converted(opened, target, replace(settings, dtype=nearest), noted, progress, beside)


def _holds_bfloat16_weights(model: ModelFile) -> bool:
    """Return whether rounding a float32 model's matrices to bfloat16 changes hardly any: they were stored or trained in
    bfloat16.
    """
    exact = total = 0
    for tensor in _matrices(model):
        total += tensor.size
        exact += tensor.size if _is_exact(tensor) else 0
    return total > 0 and exact >= _MOST * total


def _nearest_to_budget(over: Mapping[HalfName, BudgetExceeded | NothingConvertedError]) -> HalfName:
    """Return the type whose outputs exceed their limits by the smallest factor; NaN and infinities count as infinite. A type in
    which no node can compute comes last.
    """
    return min(over, key=lambda dtype: (isinstance(over[dtype], NothingConvertedError), _excess(over[dtype])))


def _notes_on_rejected(over: Mapping[HalfName, BudgetExceeded | NothingConvertedError]) -> Iterator[str]:
    """Return a note on each type that was tried before."""
    for dtype, error in over.items():
        if isinstance(error, BudgetExceeded):
            yield f"{dtype} alone is over budget: {error.violation}"
        else:
            yield f"{dtype} is the type of no node: {error}"


def _matrices(model: ModelFile) -> Iterator[onnx_ir.TensorProtocol]:
    for value in model.to_ir().graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == onnx_ir.DataType.FLOAT and len(tensor.shape.numpy()) > 1:
            yield tensor


def _is_exact(tensor: onnx_ir.TensorProtocol) -> bool:
    bits = np.ravel(tensor.numpy()).view(np.uint32)
    starts = range(0, bits.size, _CHUNK_ELEMENTS)
    return not any((bits[start : start + _CHUNK_ELEMENTS] & _LOW_BITS).any() for start in starts)


def _excess(error: BudgetExceeded | NothingConvertedError) -> float:
    if isinstance(error, NothingConvertedError):
        return math.inf
    certificate = error.certificate
    return max((_share(verdict, certificate.budget.max_scaled_error) for verdict in certificate.outputs), default=math.inf)


def _share(verdict: OutputVerdict, limit: float) -> float:
    figures = verdict.figures
    if figures.non_finite or not math.isfinite(figures.max_scaled_error):
        return math.inf
    return figures.max_scaled_error / limit if limit else math.inf


def _converted(
    opened: ModelFile,
    target: ConversionTarget,
    settings: PipelineSettings,
    verification: Verification | None,
    progress: Callable[[str], None],
    beside: Beside,
) -> Converted:
    samples = None if verification is None else verification.samples(opened)
    with target.file() as file, ExitStack() as stack:
        attempt = _attempt(stack, opened, file, settings, progress)
        certificate, found, recorded = None, None, b""
        if verification is not None and samples is not None:
            verification = replace(verification, lengths=_lengths(opened, samples, settings, verification))
            try:
                certificate, recorded = _verified(attempt, samples, settings, verification, target, progress)
            except BudgetExceeded as error:
                stack.close()
                comparable = anything_compared(error.certificate.outputs)
                if not comparable or not settings.search or opened.size_bytes > PROTOBUF_LIMIT_BYTES:
                    raise
                found = _searched(opened, samples, settings, verification, error, progress)
                keeping = replace(settings, keep_fp32_nodes=[*settings.keep_fp32_nodes, *found.keep_fp32_nodes])
                try:
                    attempt = _attempt(stack, opened, file, keeping, progress)
                    certificate, recorded = _verified(attempt, samples, settings, verification, target, progress)
                except NothingConvertedError as nothing:
                    raise SearchFailed(error, found, nothing_left=str(nothing)) from nothing
                except BudgetExceeded as still:
                    raise SearchFailed(still, found) from still
        with ExitStack() as waiting:
            files = () if certificate is None else beside(certificate)
            writes = [waiting.enter_context(waiting_file(path, content)) for path, content in files]
            converted = _publish(target, attempt, certificate, found, recorded)
            for write in writes:
                write()
        return converted


def _lengths(
    opened: ModelFile, samples: SampleSet, settings: PipelineSettings, verification: Verification
) -> LongerSizes | None:
    """Return the sizes to verify on beside the samples', for the search and both verifications alike."""
    from halfserve.export.verification.generated.lengths import longer_sizes  # noqa: PLC0415  (slow to import)

    if not settings.adversarial or verification.lengths is not None:
        return verification.lengths
    return longer_sizes(opened, samples.inputs)


_Attempt: TypeAlias = tuple[StagedConversion, Placement | str]


def _attempt(
    stack: ExitStack, source: ModelFile, file: Path, settings: PipelineSettings, progress: Callable[[str], None]
) -> _Attempt:
    progress(f"converting to {settings.half.name}")
    done = stack.enter_context(staged_conversion(source, file, settings, overwrite=True))  # the target was checked first
    _require_half(done.conversion.report)
    if settings.half is not FP16:
        return done, NO_PLACEMENT
    progress("asking ONNX Runtime for the placement")
    return done, _placement(done)


def _require_half(report: ConversionReport) -> None:
    """Refuse a model of which no node computes in the half type: users would take it for converted."""
    if report.fp16_nodes or not report.kept:
        return
    names = [f"{node.name or 'a node'} ({node.op_type}: {node.reason})" for node in report.kept[:_EXAMPLES]]
    more = f" and {len(report.kept) - _EXAMPLES} more" if len(report.kept) > _EXAMPLES else ""
    ways = ["--upgrade-opset"] if report.unsupported_nodes else []
    ways.append("--dtype bfloat16, whose range is float32's" if report.dtype == "float16" else "--dtype float16")
    raise NothingConvertedError(
        f"nothing can become {report.dtype}, as every node that computes on floats stays float32: {', '.join(names)}{more}; "
        f"nothing was written: try {', or '.join(ways)}, or serve the float32 model as it is"
    )


def _verified(
    attempt: _Attempt,
    samples: SampleSet,
    settings: PipelineSettings,
    verification: Verification,
    target: ConversionTarget,
    progress: Callable[[str], None],
) -> tuple[Certificate, bytes]:
    """Return the certificate, and the samples that travel with the model."""
    from halfserve.export.certificate.embed import embed_in_file  # noqa: PLC0415  (slow to import)
    from halfserve.export.verification.verify import CertificateDetails, certified  # noqa: PLC0415  (slow to import)

    progress("verifying")
    done, placement = attempt
    report = done.conversion.report
    details = CertificateDetails(
        name=target.model_name,
        source=done.source,
        reference_bytes=done.source.size_bytes,
        conversion=report,
        placement=None if isinstance(placement, str) else placement.to_json(),
        notes=(*samples.notes, *verification.notes),
        traffic=samples.traffic,
        origin=verification.origin,
    )
    certificate = certified(
        open_model(done.staged.path),
        samples.inputs,
        replace(settings, precisions=(report.dtype, *settings.precisions)),
        _on(samples, verification),
        details,
    )
    recorded = target.recorded(done.source, samples.inputs)
    certificate = target.bound(certificate, done.source, open_model(done.staged.path), recorded)
    is_inside = not target.has_certificate_file
    return embed_in_file(done.staged.path, certificate, key=verification.key, is_inside=is_inside), recorded


def _on(samples: SampleSet, verification: Verification) -> Verification:
    """Return the verification with the budget of its samples, which knows their kind."""
    return replace(verification, budget={name: samples.budget(verification.budget_of(name)) for name in HALF_TYPES})


def _searched(
    source: ModelFile,
    samples: SampleSet,
    settings: PipelineSettings,
    verification: Verification,
    error: BudgetExceeded,
    progress: Callable[[str], None],
) -> SearchResult:
    from halfserve.export.search.smallest_fp32_set import search_fp32_nodes  # noqa: PLC0415  (needed only where float16 fails)

    progress("searching for what must stay float32; Ctrl-C ends the search and keeps the best set found")
    found = search_fp32_nodes(source.proto, samples.inputs, settings, _on(samples, verification), progress)
    if not found.passed:
        raise SearchFailed(error, found) from error
    return found


def _publish(
    target: ConversionTarget,
    attempt: _Attempt,
    certificate: Certificate | None,
    found: SearchResult | None,
    recorded: bytes,
) -> Converted:
    done, placement = attempt
    source, staged = done.source, done.staged
    written = open_model(staged.path)
    size_bytes, why = written.size_bytes, growth(source, written)
    warnings = () if done.conversion.report.target_device == "cpu" else predict_cuda(written)
    published = target.publish(source, staged, certificate, recorded)
    return Converted(
        path=published.path,
        source_bytes=source.size_bytes,
        size_bytes=size_bytes,
        report=done.conversion.report,
        certificate=certificate,
        placement=placement,
        search=found,
        superseded=published.superseded,
        cuda=warnings,
        growth=why,
        url=published.url,
    )


def _placement(done: StagedConversion) -> Placement | str:
    try:
        return audit_placement(done.staged.path, reasons={node.name: node.reason for node in done.conversion.report.kept})
    except ExportError as error:
        return str(error)  # another runtime may take the model
