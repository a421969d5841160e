"""A torch module as an ONNX model: checked, named, with a batch of any size and its provenance inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor, nn

from amp_core.policy import Policy
from export.onnx_files.model_file import PROTOBUF_LIMIT_BYTES, serialize
from export.onnx_files.model_writer import ExternalData
from export.to_onnx.traced import traced_model
from export.to_onnx.write_onnx import write_onnx

__all__ = ["export_onnx", "serialize"]


def export_onnx(
    module: nn.Module,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    path: Path | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    metadata: Mapping[str, str] | None = None,
    opset_version: int | None = None,
    policy: Policy | str | None = None,
    external_data: ExternalData = "auto",
    limit_bytes: int = PROTOBUF_LIMIT_BYTES,
) -> onnx.ModelProto:
    """Convert a module with `torch.export`, and prove that ONNX's full checker accepts the result.

    The same module and inputs give the same bytes. The graph's element types are the module's: export a float32 module and
    convert the result for an fp16 model, or export what `to_half` returns, with floating inputs in float16.

    Args:
        module: A module in evaluation mode. It may return a tensor, or tensors in tuples, lists, dicts, named tuples,
            dataclasses and key-value caches, nested.
        inputs: Example inputs: one for each positional parameter of `forward`, or a dict by name. Tensors (their values do not
            matter), containers of tensors, None for what is left out, and plain constants, which become part of the model.
        path: Where to write the model too (whole or not at all); its folder must exist.
        kwargs: More inputs by name, beside positional ones.
        dynamic_shapes: Which sizes vary: one entry per input, or a dict by input. An entry is `{axis: name}`, `{axis:
            torch.export.Dim(name, min=..., max=...)}` or None; a name stands for one size wherever it occurs, and "4*name"
            for one that must be a multiple of 4. By default the
            first dimension of every input is "batch". `()` fixes every size to the example's.
        input_names: By default the names of `forward`'s parameters.
        output_names: By default `output`, or the names in what the module returns (see `export.to_onnx.results`).
        metadata: More entries for the model's metadata, beside `halfserve.*`.
        opset_version: ONNX's default domain, 18 to 25; None is what torch recommends.
        policy: The autocast policy of the training run, for the metadata.
        external_data: Whether the weights go into a data file beside `path`: "auto" does so for a model over `limit_bytes`.
        limit_bytes: The most that one file holds; ONNX's format allows 2 GiB.

    Returns:
        The model. Where its weights went into a data file, it refers to that file instead of holding them.

    Raises:
        ExportError: The module is in training mode, fails on the inputs, fixes a size that should vary, uses what ONNX does
            not have, is over 2 GiB and has no `path`, or cannot be written.
    """
    model = traced_model(
        module,
        inputs,
        kwargs=kwargs,
        dynamic_shapes=dynamic_shapes,
        input_names=input_names,
        output_names=output_names,
        metadata=metadata,
        opset_version=opset_version,
        policy=policy,
    )
    return write_onnx(model, path, external_data=external_data, limit_bytes=limit_bytes)
