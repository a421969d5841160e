"""Chooses the reader for a source: a factory, a folder, or a file, whose kind its first bytes show. Reads checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from halfserve.amp_core.calling import arguments_of
from halfserve.amp_core.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.amp_core.weights.file_kinds import FileKind, WeightsError, kind_of
from halfserve.amp_core.weights.state_dicts import described_weights, is_checkpoint, is_state_dict, weight_files
from halfserve.export.export_errors import ExportError, UsageError
from halfserve.export.module_pipeline import EXAMPLES
from halfserve.export.repository.version_writer import FACTORY
from halfserve.export.samples import Samples, take_samples
from halfserve.export.sources.hub import open_hub_model
from halfserve.export.sources.image_libraries import LIBRARIES, open_named_model
from halfserve.export.sources.python_modules import open_exported_program, open_factory, open_pickled_module
from halfserve.export.sources.sample_files import array_samples
from halfserve.export.sources.source import Source, factory_name
from halfserve.export.sources.source_options import SourceOptions
from halfserve.export.to_onnx.capture import run
from halfserve.export.to_onnx.forward_call import call_of
from halfserve.files.model_hub import model_name
from halfserve.protos.captured_requests import is_capture

# Windows paths have one letter before the colon.
FACTORY_NAME = re.compile(r"\w[\w.]+:\w[\w.]*")
# A missing path that ends so is a file with a typing error, and no model of the hub.
MODEL_SUFFIXES = (".bin", ".onnx", ".pkl", ".pt", ".pt2", ".pth", ".safetensors")


def open_source(argument: str, options: SourceOptions, progress: Callable[[str], None] = lambda _: None) -> Source:
    """Return the model that a command's argument names.

    Args:
        argument: `MODULE:FACTORY`, `timm:NAME`, `torchvision:NAME`, a Hugging Face folder, `ORG/NAME[@REVISION]` of the Hugging
            Face Hub where no folder has that name, a checkpoint of `halfserve train`, a `.pt2`, or with `trust_pickle` a
            pickled module.
        options: The user's options for the source.
        progress: Called with each step before it begins.

    Raises:
        ExportError: It cannot be read, is something else, or lacks samples; the text says what would work.
        UsageError: An option is given that this kind of source does not take.
    """
    try:
        return _opened(argument, options, progress)
    except WeightsError as error:
        raise ExportError(str(error)) from error


def _opened(argument: str, options: SourceOptions, progress: Callable[[str], None]) -> Source:
    path = Path(argument)
    if not path.exists() and FACTORY_NAME.fullmatch(argument):
        _require_no(argument, task=options.task)
        is_named = argument.partition(":")[0] in LIBRARIES
        return open_named_model(argument, options) if is_named else open_factory(argument, options)
    if not path.exists():
        if path.suffix not in MODEL_SUFFIXES and (named := model_name(argument)) is not None:
            _require_no(argument, weights=options.weights)
            return open_hub_model(argument, *named, options, progress)
        raise ExportError(
            f"there is no file or folder {argument}, and it is no MODULE:FACTORY; expected one of these, such as "
            "checkpoint.pt, my_package.model:build, a Hugging Face folder or ORG/NAME of the Hugging Face Hub"
        )
    _require_no(argument, weights=options.weights)
    if path.is_dir():
        return _open_folder(path, options)
    _require_no(argument, task=options.task)
    return _open_file(path, options)


def _require_no(what: str, *, weights: object = None, task: object = None) -> None:
    if weights is not None:
        raise UsageError(f"--weights belongs to MODULE:FACTORY, the function that makes the module; {what} has its own")
    if task is not None:
        raise UsageError(f"--task belongs to a Hugging Face folder, and {what} is none")


def _open_folder(folder: Path, options: SourceOptions) -> Source:
    if (folder / "config.json").is_file():
        from halfserve.export.sources.hugging_face import open_hugging_face  # noqa: PLC0415  (transformers, an extra)

        return open_hugging_face(folder, options)
    if (folder / "checkpoint.pt").is_file():
        raise ExportError(f"{folder} is a folder; expected the checkpoint in it: halfserve export {folder / 'checkpoint.pt'}")
    if weight_files(folder):
        raise ExportError(f"{folder} holds weights and no config.json; {_needs_factory(folder)}")
    raise ExportError(
        f"{folder} holds no model: no config.json, checkpoint.pt or .safetensors; expected a Hugging Face folder or a file"
    )


def _open_file(path: Path, options: SourceOptions) -> Source:
    kind = kind_of(path)
    if kind is FileKind.TORCH_ARCHIVE or kind is FileKind.PICKLE:
        if is_checkpoint(path):
            if options.samples is not None and not is_capture(options.samples):
                raise UsageError(f"--samples does not belong to a checkpoint: {path} names its held-out set, which is used")
            return _open_checkpoint(path, options)
        if is_state_dict(path):
            raise ExportError(f"{path} holds {described_weights(path)}, and no module; {_needs_factory(path)}")
        return open_pickled_module(path, options)
    if kind is FileKind.EXPORTED_PROGRAM:
        return open_exported_program(path, options)
    if kind is FileKind.SAFETENSORS:
        raise ExportError(f"{path} holds {described_weights(path)}, and no module; {_needs_factory(path)}")
    advice = ADVICE.get(kind)
    raise ExportError(f"{path} is {kind.value}; {advice(path) if advice else EXPECTED}")


def _open_checkpoint(path: Path, options: SourceOptions) -> Source:
    """Return the trained model of a checkpoint of `halfserve train`, with held-out samples or captured requests, and the policy
    and the record of its training.

    Raises:
        ExportError: The checkpoint cannot be read, or its factories are gone or do not fit it.
    """
    try:
        checkpoint = load_checkpoint(path)
    except CheckpointError as error:
        raise ExportError(str(error)) from error
    model, samples = _rebuilt(checkpoint, options.max_samples)
    if options.samples is not None:  # captured requests
        samples = array_samples(options.samples, options.max_samples).fitting(model)
    policy, record = _training(checkpoint)
    return Source(
        module=model,
        samples=samples,
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
    """Return the samples, without labels where these are not classes of the model's first output (counts, for example)."""
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


def _needs_factory(path: Path) -> str:
    return (
        f"name a function that returns the module: halfserve export MODULE:FACTORY --weights {path} --samples FILE.npz "
        "--repository FOLDER"
    )


EXPECTED = (
    "expected MODULE:FACTORY, timm:NAME, torchvision:NAME, a Hugging Face folder, a checkpoint of `halfserve train`, or a .pt2 "
    "that torch.export.save wrote"
)
ADVICE: dict[FileKind, Callable[[Path], str]] = {
    FileKind.ONNX: lambda path: f"convert it: halfserve convert {path} --repository FOLDER",
    FileKind.LFS_POINTER: lambda path: f"fetch the file itself: git lfs pull --include {path.name}",
    FileKind.HTML: lambda _: "the download ended at a web page, often a log-in; download the file itself",
    FileKind.TORCHSCRIPT: lambda path: (
        "whose module torch.export does not take; save the state_dict of the original module, and give it as "
        f"halfserve export MODULE:FACTORY --weights FILE, not {path.name}"
    ),
    FileKind.ARCHIVE: lambda _: "unpack it and give the file or folder in it",
    FileKind.GGUF: lambda _: "whose quantised weights are not converted; take the original safetensors",
    FileKind.HDF5: lambda path: (
        "write it as ONNX with tf2onnx or keras' model.export(format='onnx'), then: halfserve convert "
        f"{path.stem}.onnx --repository FOLDER"
    ),
    FileKind.NUMPY: lambda path: f"which --samples takes: halfserve export MODULE:FACTORY --samples {path} --repository FOLDER",
    FileKind.EMPTY: lambda _: "write or download it again",
    FileKind.TRUNCATED: lambda _: "the end is missing; copy or download it again",
}
