"""Convert float32 models to float16 or bfloat16: an `onnx_ir.Model` in place, an ONNX message, or a file of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import onnx
import onnx_ir

from halfserve.export.conversion_settings import ConversionKeywords, ConversionSettings, PipelineSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.half_types import BF16, FP16, HalfType
from halfserve.export.onnx_files.model_file import ModelFile, densify, format_opset, open_model
from halfserve.export.onnx_files.model_writer import ExternalData, StagedModel, staged_model
from halfserve.export.onnx_fp16.casting import Caster, drop_idle_casts
from halfserve.export.onnx_fp16.conversion_mark import is_marked, mark
from halfserve.export.onnx_fp16.conversion_report import (
    ConversionReport,
    Repair,
    count_casts,
    float_nodes,
    holds_half,
    report_of,
    report_unchanged,
)
from halfserve.export.onnx_fp16.element_types import declared_values, forget_inferred
from halfserve.export.onnx_fp16.float64 import FIRST_OPSET_WITH_CASTS, STAYING
from halfserve.export.onnx_fp16.graph import MOVERS, all_nodes, bodies
from halfserve.export.onnx_fp16.named_nodes import ModelNames, require_known
from halfserve.export.onnx_fp16.opset_upgrade import upgrade_opset
from halfserve.export.onnx_fp16.planning.decisions import close_islands, keep_nodes, settle_containers
from halfserve.export.onnx_fp16.planning.plan import CastingPlan, blank_plan
from halfserve.export.onnx_fp16.planning.weights import WeightRange
from halfserve.export.onnx_fp16.prepare import prepare, repair_model

_COMPUTE_NOTHING = MOVERS | {"Cast", "CastLike", "Constant"}
_CERTIFICATE_KEYS = "halfserve.certificate"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A converted model, the object that was given, and its report."""

    model: onnx_ir.Model
    report: ConversionReport


def convert(model: onnx_ir.Model, settings: ConversionSettings) -> Conversion:
    """Convert a float32 model to float16 or bfloat16, in place.

    Every node whose operator takes that type at the model's opset computes in it, except where it would break the model; each
    exception is in the report with its reason. float64 nodes are converted through float32, and the report names them; inputs
    and outputs that keep their types stay float64. Casts stand where two types meet. Weights in files are rounded when they are
    read, others at once. Names, metadata and opsets stay, unless `upgrade_opset` raises the opset first; values without a type
    in the original have none in the result. A model that this function converted before, with the same settings, is not
    changed.

    Raises:
        ExportError: A list names something that the model does not have, functions cannot be inlined, a node computes in the
            other half-precision type, nothing can be converted because of nodes that take only float64, a repair failed, or
            casts are needed in a model from before opset 6.
        UsageError: `dtype` is another type.
    """
    half = settings.half
    raised = upgrade_opset(model, settings) if settings.upgrade_opset else ()
    if is_marked(model, settings):
        report = report_unchanged(model, settings)
        return Conversion(model=model, report=replace(report, repairs=(*raised, *report.repairs)))
    known, casts, declared = ModelNames(model), count_casts(model), declared_values(model)
    repairs = repair_model(model, settings) if settings.repair else prepare(model, settings)
    _refuse_other_half(model, half)
    known.add(model)
    require_known(known, settings)
    counted = float_nodes(model)
    plan = blank_plan(model, settings)
    ranges = _decide(plan)
    caster = Caster(plan, ranges)
    caster.apply()
    _require_casts(model, caster)
    drop_idle_casts(model, plan.half_dtype)
    _import_opset(model)
    if holds_half(model, half):
        mark(model, settings)
    else:
        _refuse_float64(repairs, half)
    report = report_of(plan, counted, (*raised, *repairs), ranges, caster.halved, casts_before=casts)
    forget_inferred(model, declared)
    return Conversion(model=model, report=report)


def _decide(plan: CastingPlan) -> WeightRange:
    keep_nodes(plan)
    settle_containers(plan)
    ranges = WeightRange(plan)
    ranges.apply()
    settle_containers(plan)  # again: a kept node may hold a sequence
    close_islands(plan)
    return ranges


def _refuse_other_half(model: onnx_ir.Model, half: HalfType) -> None:
    """Refuse nodes of the other half type: they would stay as they are, in a model that users take for float16 or bfloat16."""
    other = onnx_ir.DataType((FP16 if half is BF16 else BF16).elem_type)
    for node in all_nodes(model):
        if node.op_type in _COMPUTE_NOTHING or any(bodies(node)):
            continue
        if any(value is not None and value.dtype == other for value in (*node.inputs, *node.outputs)):
            raise ExportError(
                f"{node.op_type} {node.name!r} computes in {other.name.lower()}; expected a float32 model: export it "
                "again from the module after .float(), which keeps every weight's value, and convert that"
            )


def _refuse_float64(repairs: tuple[Repair, ...], half: HalfType) -> None:
    """Refuse a model whose nodes all stay in float64: it would be written unchanged, and users would take it for converted."""
    staying = next((repair for repair in repairs if repair.pass_name == STAYING), None)
    if staying is not None:
        raise ExportError(
            f"nothing in the model can become {half.name}: {staying.nodes[0]!r} {staying.text}; export the model in float32, "
            "from the module after .float(), and convert that"
        )


def _require_casts(model: onnx_ir.Model, caster: Caster) -> None:
    opset = model.opset_imports.get("", FIRST_OPSET_WITH_CASTS)
    if caster.added and opset < FIRST_OPSET_WITH_CASTS:
        raise ExportError(
            f"the model has opset {opset}, whose Cast names types by text; expected {FIRST_OPSET_WITH_CASTS} or later: "
            "raise it with onnx.version_converter, or let inputs and outputs become half precision where that needs no cast"
        )


def _import_opset(model: onnx_ir.Model) -> None:
    """Import ONNX's own operators into a model that used none of them before it got casts."""
    if "" in model.opset_imports or not any(node.domain == "" for node in all_nodes(model)):
        return
    model.opset_imports[""] = format_opset(model.ir_version or onnx.IR_VERSION)


def convert_float_to_float16(
    model: onnx.ModelProto | Path | str | bytes, **options: Unpack[ConversionKeywords]
) -> onnx.ModelProto:
    """Convert a float32 ONNX model to float16, or to bfloat16; the model that is given stays as it is.

    Args:
        model: A message, the bytes of one, or the path of a file, whose external data is taken in.
        options: The fields of `ConversionSettings`.

    Returns:
        A new model. For models over 2 GiB use `halfserve.export.onnx_fp16.convert.convert_file`.

    Raises:
        ExportError: The model cannot be read or converted, or is over 2 GiB.
    """
    if not isinstance(model, onnx.ModelProto | bytes | Path | str):
        raise ExportError(f"expected an onnx.ModelProto, the bytes of one or a path, not {type(model).__name__}")
    opened = open_model(model)
    source = onnx.ModelProto()
    source.CopyFrom(opened.proto)
    densify(source)
    conversion = convert(onnx_ir.from_proto(source), ConversionSettings.of_call("convert_float_to_float16", **options))
    converted = onnx_ir.to_proto(conversion.model)
    converted.training_info.extend(opened.proto.training_info)  # onnx_ir does not preserve it
    return converted


@dataclass(frozen=True, kw_only=True)
class StagedConversion:
    """A conversion that is written, but not yet published: `staged.publish()` puts its files into place."""

    source: ModelFile
    conversion: Conversion
    staged: StagedModel


def convert_file(
    source: Path | str,
    target: Path | str,
    *,
    external_data: ExternalData = "auto",
    overwrite: bool = False,
    **options: Unpack[ConversionKeywords],
) -> Conversion:
    """Convert an ONNX file to float16 or bfloat16 and write it, whole or not at all.

    Weights are read, rounded and written one by one, so that memory holds the graph and about one tensor, whether they lie in
    the model's file or in data files. A model with several data files gets as many. The source is only read.

    Args:
        source: The float32 model; its data files lie beside it.
        target: The file to write; its data files go beside it.
        external_data: See `halfserve.export.onnx_files.model_writer.staged_model`.
        overwrite: Whether a model that is there already, the source itself included, may be replaced.
        options: The fields of `ConversionSettings`.

    Returns:
        The converted model, whose tensors are read lazily from the source, and the report.

    Raises:
        ExportError: The source cannot be read or converted, or the target exists or cannot be written; nothing was written.
    """
    settings = PipelineSettings.of_call("convert_file", external_data=external_data, **options)
    with staged_conversion(source, target, settings, overwrite=overwrite) as done:
        done.staged.publish()
        return done.conversion


@contextmanager
def staged_conversion(
    source: Path | str | ModelFile, target: Path | str, settings: PipelineSettings, *, overwrite: bool = False
) -> Iterator[StagedConversion]:
    """Convert an ONNX file into a hidden folder, where it can be verified before it is published; see `convert_file`.

    Raises:
        ExportError: See `convert_file`.
    """
    opened = source if isinstance(source, ModelFile) else open_model(Path(source))
    require_free(target, opened, overwrite=overwrite)
    conversion = convert(opened.to_ir(), settings)
    for key in [key for key in conversion.model.metadata_props if key.startswith(_CERTIFICATE_KEYS)]:
        del conversion.model.metadata_props[key]  # the source's certificate does not hold for this model
    with staged_model(conversion.model, target, external_data=settings.external_data, shards=opened.shards) as staged:
        yield StagedConversion(source=opened, conversion=conversion, staged=staged)


def require_free(target: Path | str, source: ModelFile, *, overwrite: bool) -> None:
    """Check that a model may be written to `target`, before it is converted.

    Raises:
        ExportError: `target` is a folder or has none, is one of the source's data files, or exists and must not be replaced.
    """
    try:
        place = Path(target).resolve()
        if place.is_dir():
            raise ExportError(f"{target} is a folder; give the file to write, such as {Path(target) / 'model.onnx'}")
        if not place.parent.is_dir():
            raise ExportError(f"cannot write {target}: there is no folder {place.parent}")
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        raise ExportError(f"cannot write {target}: {getattr(error, 'strerror', None) or error}") from error
    if any(place == file.resolve() for file in source.data_files):
        raise ExportError(f"{target} holds weights of {source.name}; choose another name")
    if overwrite or not place.exists():
        return
    if source.path is not None and place == source.path.resolve():
        raise ExportError(f"{target} is the model to convert itself; give another name, or --overwrite to replace it")
    raise ExportError(f"{target} exists; give another name, or --overwrite to replace it")
