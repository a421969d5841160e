"""Export of a checkpoint: rebuild its model and held-out samples, and export them as a module."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from halfserve.amp_core.calling import arguments_of
from halfserve.amp_core.checkpoint import Checkpoint, load_checkpoint
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.export.conversion_targets import RepositoryTarget
from halfserve.export.errors import ExportError
from halfserve.export.file_conversion import Certified
from halfserve.export.module_pipeline import EXAMPLES, ExportOptions, export_verified
from halfserve.export.repository.version_writer import FACTORY
from halfserve.export.samples import Samples, take_samples
from halfserve.export.to_onnx.capture import run
from halfserve.export.to_onnx.forward_call import call_of

GENERIC_MODULES = frozenset({"main", "model", "models", "net", "nets", "network", "networks"})


def export_checkpoint(
    path: Path,
    repository: Path,
    *,
    options: ExportOptions,
    samples: int = 1024,
    name: str | None = None,
    version: int | None = None,
    max_batch_size: int = 32,
    fp32_twin: bool = False,
    progress: Callable[[str], None],
) -> Certified:
    """Convert a checkpoint's model to fp16, verify it on held-out samples, and write it to a repository if it passes.

    What the training policy added to float32, and what the training record shows over float16's range, stays float32.

    Args:
        path: The checkpoint.
        repository: The model repository.
        options: How to convert and verify.
        samples: The most held-out samples to verify on.
        name: The model's name; by default from the checkpoint's factory (see `model_name`).
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form.
        fp32_twin: Whether the float32 model is written too, for a server that answers from it where float16 fails.
        progress: Called with each step before it begins.

    Raises:
        BudgetExceeded: The fp16 model is over budget; nothing was written.
        ExportError: The export fails for another reason, such as another network of the default name in the repository;
            nothing was written.
        CheckpointError: The checkpoint cannot be read.
    """
    progress("reading the checkpoint")
    checkpoint = load_checkpoint(path)
    model, held_out = _rebuilt(checkpoint, samples)
    policy, record = _training(checkpoint)
    target = RepositoryTarget(
        repository=repository,
        name=model_name(checkpoint.model) if name is None else name,
        version=version,
        max_batch_size=max_batch_size,
        fp32_twin=fp32_twin,
        default_name=name is None,
    )
    return export_verified(
        model,
        held_out,
        target,
        options,
        policy=policy,
        record=record,
        metadata={FACTORY: checkpoint.model},
        progress=progress,
    )


def model_name(factory: str) -> str:
    """The default name of a model made by `MODULE:FACTORY`: the last part of the module's name that is not generic.

    `halfserve.examples.digits.model:model` is `digits`. Where every part is generic, it is the factory's name.
    """
    module, _, function = factory.partition(":")
    specific = [part for part in module.split(".") if part not in GENERIC_MODULES and not part.startswith("_")]
    return re.sub(r"[^A-Za-z0-9._-]", "_", specific[-1] if specific else function)


def _rebuilt(checkpoint: Checkpoint, samples: int) -> tuple[nn.Module, Samples]:
    try:
        model = checkpoint.build_model()
        held_out = checkpoint.build_data()[1]
    except ValueError as error:
        raise ExportError(str(error)) from error
    return model, _with_classes_only(model, take_samples(held_out, samples))


def _with_classes_only(model: nn.Module, samples: Samples) -> Samples:
    """The samples, without labels where these are not classes of the model's first output (counts, for example)."""
    if samples.labels is None:
        return samples
    args, named = arguments_of(model, samples.inputs)
    call = call_of(model, args, kwargs=named)
    few = samples.labels[:EXAMPLES]
    try:
        (name, first), *_ = run(model, call, tuple(tensor[:EXAMPLES] for tensor in call.tensors))
    except ExportError:  # the export itself reports it
        return samples
    sizes = list(first.shape)
    classes = sizes.pop(1 if len(sizes) > 3 else -1) if len(sizes) > 1 else 0
    if sizes == list(few.shape) and classes > 1 and int(samples.labels.min()) >= 0 and int(samples.labels.max()) < classes:
        return samples
    return replace(
        samples, labels=None, note=f"the held-out targets are no classes of output {name!r}, so there is no accuracy"
    )


def _training(checkpoint: Checkpoint) -> tuple[Policy, Record | None]:
    try:
        return Policy.parse(checkpoint.policy), Record.from_dict(checkpoint.record) if checkpoint.record else None
    except ValueError as error:
        raise ExportError(str(error)) from error
