"""A checkpoint's way to a model repository, step by step."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amp_core.checkpoint import load_checkpoint
from amp_core.policy import Policy
from export.errors import ExportError
from export.halving.to_half import to_half
from export.repository.model_version_writer import write_model_version
from export.samples import Samples, take_samples
from export.to_onnx.export_onnx import export_onnx, serialize
from export.verification.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from amp_core.checkpoint import Checkpoint
    from export.certificate.certificate import Certificate
    from export.verification.budget import Budget

GENERIC_MODULES = frozenset({"main", "model", "models", "net", "nets", "network", "networks"})
EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A version that was written.

    Attributes:
        path: Its folder.
        certificate: Its certificate.
    """

    path: Path
    certificate: Certificate


def export_checkpoint(
    path: Path,
    repository: Path,
    *,
    budget: Budget,
    name: str | None = None,
    version: int | None = None,
    max_batch_size: int = 32,
    keep_fp32: Sequence[str] = (),
    samples: int = 1024,
    progress: Callable[[str], None],
) -> Exported:
    """Convert a checkpoint's model to fp16, verify it on held-out samples, and write it to a repository if it passes.

    Args:
        path: The checkpoint.
        repository: The model repository.
        budget: How much the fp16 model may differ.
        name: The model's name; by default from the checkpoint's factory (see `model_name`).
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form.
        keep_fp32: Names to keep in float32 (see `export.halving.to_half.to_half`).
        samples: How many held-out samples to verify on, at most.
        progress: Is told each step before it begins.

    Raises:
        BudgetExceeded: The fp16 model differs too much; nothing was written.
        ExportError: Any other reason for which it cannot be done; nothing was written.
        CheckpointError: The checkpoint cannot be read.
    """
    progress("reading the checkpoint")
    checkpoint = load_checkpoint(path)
    model, held_out, policy = _rebuilt(checkpoint, samples)
    name = name or model_name(checkpoint.model)
    examples = tuple(tensor[:EXAMPLES] for tensor in held_out.inputs)
    progress("converting to float16")
    half = to_half(model, policy=policy, keep_fp32=keep_fp32)
    metadata = {"halfserve.model": checkpoint.model}
    progress("exporting to ONNX")
    exported = export_onnx(half.module, [_halved(tensor) for tensor in examples], metadata=metadata)
    reference_bytes = len(serialize(export_onnx(model, examples, metadata=metadata)))
    progress(f"verifying on {len(held_out.inputs[0])} held-out samples")
    certificate = verify(
        model,
        exported,
        held_out.inputs,
        budget=budget,
        labels=held_out.labels,
        name=name,
        reference_bytes=reference_bytes,
        conversion=half.report,
    )
    progress("writing the version")
    written = write_model_version(repository, name, exported, certificate, version=version, max_batch_size=max_batch_size)
    return Exported(path=written, certificate=certificate)


def model_name(factory: str) -> str:
    """The name of a model made by `MODULE:FACTORY`: the last part of the module's name that says something.

    `examples.digits.model:model` is `digits`. Where no part does, it is the factory's name.
    """
    module, _, function = factory.partition(":")
    telling = [part for part in module.split(".") if part not in GENERIC_MODULES and not part.startswith("_")]
    return re.sub(r"[^A-Za-z0-9._-]", "_", telling[-1] if telling else function)


def _rebuilt(checkpoint: Checkpoint, samples: int) -> tuple[nn.Module, Samples, Policy]:
    # Factories are the user's code: amp_core raises ValueErrors of several kinds, each with one clear line.
    try:
        model = checkpoint.build_model()
        held_out = checkpoint.build_data()[1]
        policy = Policy.parse(checkpoint.policy)
    except ValueError as error:
        raise ExportError(str(error)) from error
    return model, take_samples(held_out, samples), policy


def _halved(tensor: Tensor) -> Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor
