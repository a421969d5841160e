"""A checkpoint's way to a model repository, step by step."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.calling import arguments_of
from amp_core.checkpoint import load_checkpoint
from amp_core.policy import Policy
from amp_core.recorder import Record
from export.conversion_targets import RepositoryTarget
from export.errors import ExportError
from export.file_conversion import Accumulators, Converted, Options, Verification, convert_verified
from export.float32_parts import float32_parts, mark_float32
from export.samples import Samples, take_samples
from export.to_onnx.call import Call, call_of
from export.to_onnx.capture import FlatModel
from export.to_onnx.dimensions import BATCH
from export.to_onnx.traced import traced_model
from export.to_onnx.write_onnx import write_onnx

if TYPE_CHECKING:
    from torch import nn

    from amp_core.checkpoint import Checkpoint
    from export.verification.budget import Budget

GENERIC_MODULES = frozenset({"main", "model", "models", "net", "nets", "network", "networks"})
EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user wants of an export, beside where it goes.

    Attributes:
        budget: How much the float16 model may differ.
        keep_fp32: Names of tensors or submodules to keep in float32, as shell patterns.
        dynamic: Names of the sizes, beside the batch's, that may vary, by input and axis.
        samples: How many held-out samples to verify on, at most.
        search: Whether to look for the smallest set of nodes to keep in float32 when the model is over budget.
        adversarial: Whether to try samples at the edge of the given ones too.
        accumulators: In which type the target runtime sums.
    """

    budget: Budget
    keep_fp32: Sequence[str] = ()
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    samples: int = 1024
    search: bool = True
    adversarial: bool = True
    accumulators: Accumulators = "float32"


def export_checkpoint(
    path: Path,
    repository: Path,
    *,
    wishes: Wishes,
    name: str | None = None,
    version: int | None = None,
    max_batch_size: int = 32,
    fp32_twin: bool = False,
    progress: Callable[[str], None],
) -> Converted:
    """Convert a checkpoint's model to fp16, verify it on held-out samples, and write it to a repository if it passes.

    What the training policy added to float32, and what the training record shows over float16's range, stays float32.

    Args:
        path: The checkpoint.
        repository: The model repository.
        wishes: What is wanted.
        name: The model's name; by default from the checkpoint's factory (see `model_name`).
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form.
        fp32_twin: Whether the float32 model goes along, for a server that answers from it where float16 fails.
        progress: Is told each step before it begins.

    Raises:
        BudgetExceeded: The fp16 model differs too much; nothing was written.
        ExportError: Any other reason for which it cannot be done; nothing was written.
        CheckpointError: The checkpoint cannot be read.
    """
    progress("reading the checkpoint")
    checkpoint = load_checkpoint(path)
    model, held_out = _rebuilt(checkpoint, wishes.samples)
    args, named = arguments_of(model, held_out.inputs)
    call = call_of(model, args, kwargs=named)
    sizes = _sizes(call, wishes.dynamic)
    policy, record = _training(checkpoint)
    target = RepositoryTarget(
        repository=repository,
        name=name or model_name(checkpoint.model),
        version=version,
        max_batch_size=max_batch_size,
        fp32_twin=fp32_twin,
    )
    with tempfile.TemporaryDirectory(prefix="halfserve-export-") as folder:
        progress("exporting to ONNX")
        source = Path(folder) / "model.onnx"
        kept = float32_parts(model, keep_fp32=wishes.keep_fp32, policy=policy, record=record)
        args, named = call.arguments([tensor[:EXAMPLES] for tensor in call.tensors])
        made_by = {"halfserve.model": checkpoint.model}
        traced = traced_model(model, args, kwargs=named, dynamic_shapes=sizes, metadata=made_by, policy=policy)
        mark_float32(traced, kept)
        write_onnx(traced, source)
        verification = Verification(
            samples=lambda _: [tensor.numpy() for tensor in call.tensors],
            budget=wishes.budget,
            adversarial=wishes.adversarial,
            accumulators=wishes.accumulators,
            search=wishes.search,
            reference=FlatModel(model, call).eval(),
            labels=None if held_out.labels is None else held_out.labels.numpy(),
            record=record,
        )
        return convert_verified(
            source, target, options=Options(keep_io_types=False), verification=verification, progress=progress
        )


def model_name(factory: str) -> str:
    """The name of a model made by `MODULE:FACTORY`: the last part of the module's name that says something.

    `examples.digits.model:model` is `digits`. Where no part does, it is the factory's name.
    """
    module, _, function = factory.partition(":")
    telling = [part for part in module.split(".") if part not in GENERIC_MODULES and not part.startswith("_")]
    return re.sub(r"[^A-Za-z0-9._-]", "_", telling[-1] if telling else function)


def _rebuilt(checkpoint: Checkpoint, samples: int) -> tuple[nn.Module, Samples]:
    # Factories are the user's code: amp_core raises ValueErrors of several kinds, each with one clear line.
    try:
        model = checkpoint.build_model()
        held_out = checkpoint.build_data()[1]
    except ValueError as error:
        raise ExportError(str(error)) from error
    return model, take_samples(held_out, samples)


def _training(checkpoint: Checkpoint) -> tuple[Policy, Record | None]:
    try:
        return Policy.parse(checkpoint.policy), Record.from_dict(checkpoint.record) if checkpoint.record else None
    except ValueError as error:
        raise ExportError(str(error)) from error


def _sizes(call: Call, dynamic: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]] | None:
    """What may vary, for `traced_model`: None is the batch alone."""
    if not dynamic:
        return None
    dimensions = dict(zip(call.names, (tensor.dim() for tensor in call.tensors), strict=True))
    for name, axes in dynamic.items():
        if name not in dimensions:
            raise ExportError(f"there is no input {name!r} whose size could vary; the model takes {', '.join(dimensions)}")
        if (last := max(axes)) >= dimensions[name]:
            raise ExportError(f"input {name!r} has no axis {last}; with the batch it has {dimensions[name]}, counted from 0")
    return {name: {0: BATCH, **dynamic.get(name, {})} for name, count in dimensions.items() if count}
