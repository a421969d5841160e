"""From a float32 ONNX file to a float16 one, of any size, without holding either in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from export.errors import ExportError
from export.files.model_file import ModelFile, open_model
from export.files.model_writer import ExternalData, StagedModel, staged_model
from export.onnx_fp16.convert import Conversion, convert_upgraded

_OF_CERTIFICATES = "halfserve.certificate"


@dataclass(frozen=True, kw_only=True)
class StagedConversion:
    """A conversion that is written, but not yet in its place.

    Attributes:
        source: The model that was converted.
        conversion: The converted model and what was done.
        staged: Its files; `staged.publish()` puts them into place.
    """

    source: ModelFile
    conversion: Conversion
    staged: StagedModel


def convert_file(
    source: Path | str,
    target: Path | str,
    *,
    keep_io_types: bool | Collection[str] = True,
    op_block_list: Collection[str] = (),
    node_block_list: Collection[str] = (),
    repair: bool = True,
    upgrade_opset: bool = False,
    external_data: ExternalData = "auto",
    overwrite: bool = False,
) -> Conversion:
    """Convert an ONNX file to float16 and write it, whole or not at all.

    Weights are read, rounded and written one by one, so that memory holds the graph and about one tensor, whether they lie in
    the model's file or in data files. A model with several data files gets as many. The source is only read.

    Args:
        source: The float32 model; its data files lie beside it.
        target: The file to write; its data files go beside it.
        keep_io_types: See `export.onnx_fp16.convert.convert`, as for the next three.
        op_block_list: Operators that stay float32.
        node_block_list: Nodes that stay float32.
        repair: Whether to rewrite what float16 could not hold.
        upgrade_opset: Whether to raise a model from before opset 17 to it, see `export.onnx_fp16.upgrade_opset`.
        external_data: See `export.files.model_writer.staged_model`.
        overwrite: Whether a model that is there already, the source itself included, may be replaced.

    Returns:
        The converted model, whose tensors are still read from the source when they are asked for, and the report.

    Raises:
        ExportError: The source cannot be read or converted, or the target exists or cannot be written; nothing was written.
    """
    with staged_conversion(
        source,
        target,
        keep_io_types=keep_io_types,
        op_block_list=op_block_list,
        node_block_list=node_block_list,
        repair=repair,
        upgrade_opset=upgrade_opset,
        external_data=external_data,
        overwrite=overwrite,
    ) as done:
        done.staged.publish()
        return done.conversion


@contextmanager
def staged_conversion(
    source: Path | str | ModelFile,
    target: Path | str,
    *,
    keep_io_types: bool | Collection[str] = True,
    op_block_list: Collection[str] = (),
    node_block_list: Collection[str] = (),
    repair: bool = True,
    upgrade_opset: bool = False,
    external_data: ExternalData = "auto",
    overwrite: bool = False,
) -> Iterator[StagedConversion]:
    """As `convert_file`, but the result waits in a hidden folder, to be looked at before it is published or dropped.

    Raises:
        ExportError: As `convert_file`.
    """
    opened = source if isinstance(source, ModelFile) else open_model(Path(source))
    require_free(target, opened, overwrite=overwrite)
    conversion = convert_upgraded(
        opened.to_ir(),
        keep_io_types=keep_io_types,
        op_block_list=op_block_list,
        node_block_list=node_block_list,
        repair=repair,
        upgrade_opset=upgrade_opset,
    )
    for key in [key for key in conversion.model.metadata_props if key.startswith(_OF_CERTIFICATES)]:
        del conversion.model.metadata_props[key]  # what the source was certified for is not this model
    with staged_model(conversion.model, target, external_data=external_data, shards=opened.shards) as staged:
        yield StagedConversion(source=opened, conversion=conversion, staged=staged)


def require_free(target: Path | str, source: ModelFile, *, overwrite: bool) -> None:
    """Check that a model may be written to `target`, before any work is done for it.

    Raises:
        ExportError: It is a folder or in none, is one of the source's data files, or is there and not to be replaced.
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
