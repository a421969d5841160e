"""Conversion of an ONNX file to half precision: convert, verify, search for nodes that must stay float32, and publish."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir

from halfserve.export.certificate.certificate import BudgetExceeded, Certificate, anything_compared, signing_key
from halfserve.export.conversion_options import ConversionOptions, SearchLimits, SearchOptions, VerificationOptions
from halfserve.export.conversion_targets import ConversionTarget, FileTarget
from halfserve.export.dtype_choice import BFLOAT16_WEIGHTS, holds_bfloat16_weights, nearest_to_budget, notes_on_rejected
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.half_types import FP16, HALF_TYPES, Accumulators, DtypeChoice, HalfName, TargetDevice, half_named
from halfserve.export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, ModelFile, ModelSource, growth, open_model
from halfserve.export.onnx_files.model_writer import waiting_file
from halfserve.export.onnx_fp16.convert import StagedConversion, staged_conversion
from halfserve.export.onnx_fp16.opset_upgrade import upgrade_opset
from halfserve.export.placement.audit import Placement, audit_placement
from halfserve.export.placement.cuda_kernels import CudaWarning, predict_cuda

if TYPE_CHECKING:
    from torch import nn

    from halfserve.amp_core.recorder.record import Record
    from halfserve.export.certificate.budget import Budget
    from halfserve.export.onnx_fp16.conversion_report import ConversionReport
    from halfserve.export.search.result import SearchResult
    from halfserve.export.verification.generated.lengths import LongerSizes
    from halfserve.export.verification.judging import Judge
    from halfserve.export.verification.samples import Array, SampleSet
    from halfserve.protos.certificate_signature import SigningKey


# ONNX Runtime's CPU provider cannot open a bfloat16 model, so its placement is only measured where a device computes bfloat16.
NO_PLACEMENT = "not asked for: where no device computes bfloat16, the server computes the model in float32"
Beside: TypeAlias = Callable[["Certificate"], Sequence[tuple[Path, bytes]]]


def nothing_beside(certificate: Certificate) -> Sequence[tuple[Path, bytes]]:  # noqa: ARG001  (see Beside)
    return ()


@dataclass(frozen=True, kw_only=True)
class Verification(VerificationOptions, SearchOptions):
    """Samples and budget of a verification beside its options; see `halfserve.verify`.

    Attributes:
        samples: Makes or loads the samples for a model, with a note on them.
        budget: How much the converted model may differ: one budget for every type, or one by type.
        reference: The float32 torch module or ONNX model to compare with; by default the file that is converted.
        labels: The true classes of the samples.
        record: The training record, whose modules the search tries first.
        notes: Remarks for the certificate, beside the samples' own.
        task: Judges the first output in the terms of the model's task; by default its rows' argmax counts.
        key: Signs the certificate; None leaves it unsigned.
        target_device: Where the model shall run. For "cuda" and "any", bfloat16 nodes for which ONNX Runtime has no CUDA kernel
            stay float32, as it refuses a model with such a node. "cuda" spells out SiLU, whose fused kernel rounds inside.
        precisions: Types to judge the converted model in besides its own; see `halfserve.verify`.
        lengths: Sizes to try beside the samples', where `adversarial`; found with the float32 model by default.
    """

    samples: Callable[[ModelFile], SampleSet]
    budget: Budget | Mapping[HalfName, Budget]
    reference: nn.Module | ModelSource | ModelFile | None = None
    labels: Array | None = None
    record: Record | None = None
    notes: tuple[str, ...] = ()
    task: Judge | None = None
    key: SigningKey | None = None
    precisions: Collection[HalfName] = ()
    lengths: LongerSizes | None = None

    def budget_of(self, dtype: HalfName) -> Budget:
        """The limits for a model of this type."""
        return self.budget[dtype] if isinstance(self.budget, Mapping) else self.budget


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A model that was written.

    Attributes:
        path: The model's file, or its version's folder in a repository; relative to the URL for one in object storage.
        source_bytes: Size of the float32 model, data files included.
        size_bytes: Size of the converted model, data files included.
        report: The report of the conversion.
        certificate: The verdict; None without verification.
        placement: The placement of the nodes by ONNX Runtime, or the reason why it is unknown.
        search: The nodes that need float32; None without a search.
        superseded: Data files beside it that only the model before it used.
        cuda: The nodes that CUDA would not compute as they are; empty for a model for CPUs alone.
        growth: The reason why it is larger than the float32 model; None if it is not.
        url: The URL of its version in object storage, without credentials; "" for files on this machine.
    """

    path: Path
    source_bytes: int
    size_bytes: int
    report: ConversionReport
    certificate: Certificate | None
    placement: Placement | str
    search: SearchResult | None
    superseded: tuple[str, ...]
    cuda: tuple[CudaWarning, ...] = ()
    growth: str | None = None
    url: str = ""

    @property
    def place(self) -> str:
        """Where it was written, for people: a path or a URL."""
        return self.url or str(self.path)


@dataclass(frozen=True, kw_only=True)
class Certified(Converted):
    """A model that was verified and written; see `Converted`."""

    certificate: Certificate


class SearchFailed(BudgetExceeded):
    """The converted model is over budget, and the search found no set of float32 nodes that brings it within.

    Attributes:
        search: The result of the search. If it passed, its set was within the budget in the search but over it in the
            verification.
    """

    def __init__(self, error: BudgetExceeded, search: SearchResult) -> None:
        if search.passed:
            found = (
                f"with {len(search.keep_fp32_nodes)} nodes in float32 it was within the budget when the search tried it, and "
                "verified again it is not: one of the two models gives different outputs for the same input"
            )
        else:
            why = f": {search.explanation}" if search.explanation else ""
            found = f"the search for nodes to keep in float32 found no set that is enough{why}"
        cause = "; ".join(part for part in (error.cause, found) if part)
        super().__init__(error.violation, error.certificate, cause=cause)
        self.search = search


def convert(
    source: Path | str,
    target: Path | str,
    *,
    samples: Mapping[str, Array] | Path | str | None = None,
    budget: Budget | None = None,
    labels: Array | None = None,
    keep_io_types: bool | Collection[str] = True,
    keep_fp32_nodes: Collection[str] = (),
    keep_fp32_ops: Collection[str] = (),
    upgrade_opset: bool = False,
    dtype: DtypeChoice = "float16",
    target_device: TargetDevice = "any",
    precisions: Collection[HalfName] = (),
    search: bool = True,
    limits: SearchLimits | None = None,
    adversarial: bool = True,
    accumulators: Accumulators = "float32",
    overwrite: bool = False,
    certificate_key: Path | str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Certified:
    """Convert a float32 ONNX file to float16 or bfloat16, verify it, and write it if it is within the budget.

    `halfserve convert SOURCE TARGET` does the same. Over budget, it searches for the fewest nodes that must stay float32.

    Args:
        source: The float32 model.
        target: The file to write.
        samples: Arrays by input name, samples first, or a file that `numpy.savez` wrote; by default random inputs.
        budget: How much the converted model may differ; the usual budget of its type by default.
        labels: The samples' true classes, for the accuracy: whole numbers, shape (samples,).
        keep_io_types: True: inputs and outputs stay float32; False: they become `dtype`; or the names of inputs and outputs to
            keep.
        keep_fp32_nodes: Nodes that stay float32, by name or shell pattern.
        keep_fp32_ops: Operators that stay float32, by name or shell pattern.
        upgrade_opset: Whether to raise the model's opset first, as far as that lets more nodes compute in `dtype`.
        dtype: The type to convert to, "float16" or "bfloat16"; "auto" takes float16 where it passes, else bfloat16 where that
            does, else searches in the one that is nearer to its budget. bfloat16 comes first where the weights are
            such numbers.
        target_device: Where the model shall run. For "cuda" and "any", bfloat16 nodes for which ONNX Runtime has no CUDA kernel
            stay float32, as it refuses a model with such a node. "cuda" spells out SiLU, whose fused kernel rounds inside.
        precisions: Types to judge the file in beside its own. A server may compute it in each that passed; one that did not
            is recorded in the certificate (`not_proved`), and the file is written all the same.
        search: Whether to search for nodes that must stay float32.
        limits: When the search ends although a smaller set may be found.
        adversarial: Whether to also verify on samples at the edge of the given ones.
        accumulators: The type in which the target runtime sums.
        overwrite: Whether an existing model at `target` may be replaced.
        certificate_key: PEM file of an Ed25519 private key, which signs the certificate.
        progress: Called with each step before it begins.

    Returns:
        The path, the certificate, the report of the conversion and the result of the search.

    Raises:
        BudgetExceeded: The converted model is over budget; nothing was written.
        ExportError: The conversion fails for another reason; nothing was written.
    """
    from halfserve.export.certificate.budget import usual_budgets  # noqa: PLC0415  (slow to import)
    from halfserve.export.verification.generated.synthetic import synthetic_samples  # noqa: PLC0415  (slow to import)
    from halfserve.export.verification.samples import SampleSet, load_samples  # noqa: PLC0415  (slow to import)

    given = Path(samples) if isinstance(samples, str) else samples
    verification = Verification(
        samples=synthetic_samples if given is None else lambda model: SampleSet(inputs=load_samples(given, model)),
        budget=budget or usual_budgets(),
        labels=labels,
        adversarial=adversarial,
        accumulators=accumulators,
        search=search,
        limits=limits or SearchLimits(),
        key=signing_key(certificate_key),
        precisions=precisions,
    )
    options = ConversionOptions(
        keep_io_types=keep_io_types,
        keep_fp32_nodes=keep_fp32_nodes,
        keep_fp32_ops=keep_fp32_ops,
        upgrade_opset=upgrade_opset,
        dtype=dtype,
        target_device=target_device,
    )
    place = FileTarget(path=Path(target), overwrite=overwrite)
    return Certified(
        **vars(convert_verified(Path(source), place, options=options, verification=verification, progress=progress))
    )


def convert_verified(
    source: Path,
    target: ConversionTarget,
    *,
    options: ConversionOptions,
    verification: Verification | None,
    progress: Callable[[str], None],
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

    def convert_to(dtype: DtypeChoice, verification: Verification | None) -> Converted:
        return _converted(opened, target, replace(options, dtype=dtype), verification, progress, beside)

    if options.dtype == "auto":
        return _converted_to_either(opened, verification, convert_to)
    return convert_to(options.dtype, verification)


def _converted_to_either(
    opened: ModelFile, verification: Verification | None, convert_to: Callable[[HalfName, Verification], Converted]
) -> Converted:
    """Convert to the first type that passes, else search in the type that is nearer to its budget; notes give the reasons."""
    if verification is None:
        raise UsageError("dtype 'auto' chooses by the verdict; verify the model, or name float16 or bfloat16")
    samples = verification.samples(opened)
    verification = replace(verification, samples=lambda _: samples, lengths=_lengths(opened, samples, verification))  # once
    types: tuple[HalfName, ...] = ("float16", "bfloat16")
    notes = verification.notes
    if holds_bfloat16_weights(opened):
        types, notes = types[::-1], (*notes, BFLOAT16_WEIGHTS)
    over: dict[HalfName, BudgetExceeded] = {}
    for dtype in types:
        attempt = replace(verification, search=False, notes=(*notes, *notes_on_rejected(over)))
        try:
            return convert_to(dtype, attempt)
        except BudgetExceeded as error:
            over[dtype] = error
    nearest = nearest_to_budget(over)
    if not verification.search:
        raise over[nearest]
    return convert_to(nearest, replace(verification, notes=(*notes, *notes_on_rejected(over))))


def _converted(
    opened: ModelFile,
    target: ConversionTarget,
    options: ConversionOptions,
    verification: Verification | None,
    progress: Callable[[str], None],
    beside: Beside,
) -> Converted:
    samples = None if verification is None else verification.samples(opened)
    with target.file() as file, ExitStack() as stack:
        attempt = _attempt(stack, opened, file, options, progress)
        certificate, found, recorded = None, None, b""
        if verification is not None and samples is not None:
            verification = replace(verification, lengths=_lengths(opened, samples, verification))
            try:
                certificate, recorded = _verified(attempt, samples, verification, target, progress)
            except BudgetExceeded as error:
                stack.close()
                comparable = anything_compared(error.certificate.outputs)
                if not comparable or not verification.search or opened.size_bytes > PROTOBUF_LIMIT_BYTES:
                    raise
                found = _searched(opened, options, samples, verification, error, progress)
                keeping = replace(options, keep_fp32_nodes=[*options.keep_fp32_nodes, *found.keep_fp32_nodes])
                attempt = _attempt(stack, opened, file, keeping, progress)
                try:
                    certificate, recorded = _verified(attempt, samples, verification, target, progress)
                except BudgetExceeded as still:
                    raise SearchFailed(still, found) from still
        with ExitStack() as waiting:
            files = () if certificate is None else beside(certificate)
            writes = [waiting.enter_context(waiting_file(path, content)) for path, content in files]
            converted = _publish(target, attempt, certificate, found, recorded)
            for write in writes:
                write()
        return converted


def _lengths(opened: ModelFile, samples: SampleSet, verification: Verification) -> LongerSizes | None:
    """The sizes to verify on beside the samples', for the search and both verifications alike."""
    from halfserve.export.verification.generated.lengths import longer_sizes  # noqa: PLC0415  (slow to import)

    if not verification.adversarial or verification.lengths is not None:
        return verification.lengths
    return longer_sizes(opened, samples.inputs)


_Attempt: TypeAlias = tuple[StagedConversion, Placement | str]


def _attempt(
    stack: ExitStack, source: ModelFile, file: Path, options: ConversionOptions, progress: Callable[[str], None]
) -> _Attempt:
    half = half_named(options.dtype)
    progress(f"converting to {half.name}")
    done = stack.enter_context(
        staged_conversion(source, file, **vars(options), overwrite=True)  # the target was checked first
    )
    if half is not FP16:
        return done, NO_PLACEMENT
    progress("asking ONNX Runtime for the placement")
    return done, _placement(done)


def _verified(
    attempt: _Attempt,
    samples: SampleSet,
    verification: Verification,
    target: ConversionTarget,
    progress: Callable[[str], None],
) -> tuple[Certificate, bytes]:
    """The certificate, and the samples that travel with the model."""
    from halfserve.export.certificate.embed import embed_in_file  # noqa: PLC0415  (slow to import)
    from halfserve.export.verification.verify import verify  # noqa: PLC0415  (slow to import)

    progress("verifying")
    done, placement = attempt
    certificate = verify(
        done.source if verification.reference is None else verification.reference,
        done.staged.path,
        samples.inputs,
        budget={name: samples.budget(verification.budget_of(name)) for name in HALF_TYPES},
        precisions=(done.conversion.report.dtype, *verification.precisions),
        labels=verification.labels,
        name=target.model_name,
        reference_bytes=done.source.size_bytes,
        conversion=done.conversion.report,
        adversarial=verification.adversarial,
        source=done.source,
        accumulators=verification.accumulators,
        target_device=done.conversion.report.target_device,
        placement=None if isinstance(placement, str) else placement.to_json(),
        notes=(*samples.notes, *verification.notes),
        task=verification.task,
        lengths=verification.lengths,
    )
    recorded = target.recorded(done.source, samples.inputs)
    certificate = target.bound(certificate, done.source, open_model(done.staged.path), recorded)
    is_inside = not target.has_certificate_file
    return embed_in_file(done.staged.path, certificate, key=verification.key, is_inside=is_inside), recorded


def _searched(
    source: ModelFile,
    options: ConversionOptions,
    samples: SampleSet,
    verification: Verification,
    error: BudgetExceeded,
    progress: Callable[[str], None],
) -> SearchResult:
    from halfserve.export.search.smallest_fp32_set import find_fp32_nodes  # noqa: PLC0415  (needed only where float16 fails)

    progress("searching for what must stay float32; Ctrl-C ends the search and keeps the best set found")
    half, model = half_named(options.dtype), onnx_ir.from_proto(source.proto)
    if options.upgrade_opset:
        upgrade_opset(model, half, options.target_device, repair=options.repair)
    found = find_fp32_nodes(
        model,
        samples.inputs,
        budget=samples.budget(verification.budget_of(half.name)),
        reference=verification.reference,
        keep_io_types=options.keep_io_types,
        keep_fp32_ops=options.keep_fp32_ops,
        keep_fp32_nodes=options.keep_fp32_nodes,
        repair=options.repair,
        dtype=half.name,
        target_device=options.target_device,
        record=verification.record,
        adversarial=verification.adversarial,
        accumulators=verification.accumulators,
        max_runs=verification.limits.max_runs,
        max_minutes=verification.limits.max_minutes,
        progress=progress,
        task=verification.task,
        lengths=verification.lengths,
    )
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
