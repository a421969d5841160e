"""A checkpoint of `halfserve train`: its model, its held-out samples, and what the training says about precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from halfserve.amp_core.calling import arguments_of
from halfserve.amp_core.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.export.export_errors import ExportError
from halfserve.export.module_pipeline import EXAMPLES
from halfserve.export.repository.version_writer import FACTORY
from halfserve.export.samples import Samples, take_samples
from halfserve.export.sources.source import Source, factory_name
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.to_onnx.capture import run
from halfserve.export.to_onnx.forward_call import call_of


def open_checkpoint(path: Path, options: SourceOptions) -> Source:
    """The trained model of a checkpoint of `halfserve train`, with held-out samples, training policy and training record.

    Raises:
        ExportError: The checkpoint cannot be read, or its factories are gone or do not fit it.
    """
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    model, held_out = _rebuilt(checkpoint, options.max_samples)
    policy, record = _training(checkpoint)
    return Source(
        module=model,
        samples=held_out,
        name=factory_name(checkpoint.model),
        policy=policy,
        record=record,
        metadata={FACTORY: checkpoint.model},
    )


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
