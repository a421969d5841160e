"""A module's way to a model repository, step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amp_core.calling import arguments_of, described_call
from amp_core.policy import Policy
from export.certificate.budget import Budget
from export.conversion_targets import RepositoryTarget
from export.errors import ExportError
from export.file_conversion import (
    Accumulators,
    Beside,
    Certified,
    Options,
    Verification,
    convert_verified,
    nothing_beside,
)
from export.float32_parts import float32_parts, mark_float32
from export.samples import Samples
from export.scripted import require_python
from export.search.narrowing import MAX_RUNS, SearchLimits
from export.to_onnx.call import Call, call_of
from export.to_onnx.capture import FlatModel, run
from export.to_onnx.dimensions import BATCH
from export.to_onnx.traced import traced_model
from export.to_onnx.write_onnx import write_onnx
from export.verification.torch_reference import require_batch_invariance

if TYPE_CHECKING:
    from amp_core.recorder import Record

EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user wants of an export, beside where it goes.

    Attributes:
        budget: How much the float16 model may differ.
        keep_fp32: Names of tensors or submodules to keep in float32, as shell patterns.
        keep_io_types: Whether inputs and outputs stay float32, or the names and shell patterns of those that do.
        dynamic: Names of the sizes, beside the batch's, that may vary, by input and axis.
        search: Whether to look for the smallest set of nodes to keep in float32 when the model is over budget.
        limits: When that search ends although a smaller set may be found.
        adversarial: Whether to try samples at the edge of the given ones too.
        accumulators: In which type the target runtime sums.
        beside: More files that the verdict is written to.
    """

    budget: Budget = field(default_factory=Budget)
    keep_fp32: Sequence[str] = ()
    keep_io_types: bool | Collection[str] = False
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    search: bool = True
    limits: SearchLimits = field(default_factory=SearchLimits)
    adversarial: bool = True
    accumulators: Accumulators = "float32"
    beside: Beside = nothing_beside


def export_module(
    module: nn.Module,
    samples: Any,
    repository: Path | str,
    name: str,
    *,
    labels: Tensor | None = None,
    budget: Budget | None = None,
    keep_fp32: Sequence[str] = (),
    keep_io_types: bool | Collection[str] = False,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    policy: Policy | str | None = None,
    record: Record | None = None,
    search: bool = True,
    max_runs: int = MAX_RUNS,
    max_minutes: float | None = None,
    adversarial: bool = True,
    accumulators: Accumulators = "float32",
    version: int | None = None,
    max_batch_size: int = 32,
    fp32_twin: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Certified:
    """Convert a module to float16, verify it on samples, and add it to a model repository if it passes.

    This is what `halfserve export` does with a checkpoint's model. Over budget, the fewest nodes that have to stay float32 are
    searched for. What a training policy added to float32, and what a training record shows over float16's range, stays float32.

    Args:
        module: The float32 module, in evaluation mode and on the CPU; it stays as it is.
        samples: What it is given, samples first: a tensor; a tuple (forward's parameters in order) or a dict (by name) of
            tensors. The number of rows varies.
        repository: The model repository's folder; made if missing.
        name: The model's.
        labels: The samples' true classes, for the accuracy: whole numbers, shape (samples,).
        budget: How much the float16 model may differ; `Budget()` by default.
        keep_fp32: Names of tensors or submodules to keep in float32, as shell patterns.
        keep_io_types: False: inputs and outputs become float16; True: they stay float32; or names and shell patterns of those
            that stay, such as an output over 65504.
        dynamic: Names of other sizes that may vary, by input and axis: `{"tokens": {1: "length"}}`; `"4*height"` where the
            model takes multiples of 4 alone.
        policy: The autocast policy that it was trained under.
        record: What was recorded while it was trained.
        search: Whether to search for nodes to keep in float32.
        max_runs: How many sets of such nodes may be tried at most; at least 2.
        max_minutes: After how many minutes no further set is tried; no limit by default.
        adversarial: Whether to try samples at the edge of the given ones too.
        accumulators: In which type the target runtime sums.
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form.
        fp32_twin: Whether the float32 model goes along, for a server that answers from it where float16 fails.
        progress: Is told each step before it begins.

    Returns:
        Where it was written (`path`), the `certificate`, and what the conversion and the search did.

    Raises:
        BudgetExceeded: The float16 model differs too much; nothing was written.
        ExportError: Any other reason for which it cannot be done; nothing was written.
        PolicyError: The policy cannot be read.
    """
    target = RepositoryTarget(
        repository=Path(repository), name=name, version=version, max_batch_size=max_batch_size, fp32_twin=fp32_twin
    )
    wishes = Wishes(
        budget=budget or Budget(),
        keep_fp32=keep_fp32,
        keep_io_types=keep_io_types,
        dynamic=dynamic or {},
        search=search,
        limits=SearchLimits(max_runs=max_runs, max_minutes=max_minutes),
        adversarial=adversarial,
        accumulators=accumulators,
    )
    chosen = Policy.parse(policy) if isinstance(policy, str) else policy or Policy()
    return export_verified(
        module, Samples(inputs=samples, labels=labels), target, wishes, policy=chosen, record=record, progress=progress
    )


def export_verified(
    module: nn.Module,
    samples: Samples,
    target: RepositoryTarget,
    wishes: Wishes,
    *,
    policy: Policy,
    record: Record | None,
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[str], None],
) -> Certified:
    """The same with the samples and wishes of whoever calls it.

    Args:
        module: See `export_module`.
        samples: To verify it on.
        target: Where it goes.
        wishes: What is wanted.
        policy: That it was trained under.
        record: Of its training.
        metadata: More entries for the model's.
        progress: Is told each step before it begins.

    Raises:
        BudgetExceeded: The float16 model differs too much; nothing was written.
        ExportError: Any other reason for which it cannot be done; nothing was written.
    """
    require_python(module)
    _require_on_cpu(module)
    args, named = arguments_of(module, samples.inputs)
    call = call_of(module, args, kwargs=named)
    _require_float32(module, call)
    _require_run(module, samples.inputs, call)
    sizes = _sizes(call, wishes.dynamic)
    with tempfile.TemporaryDirectory(prefix="halfserve-export-") as folder:
        progress("exporting to ONNX")
        source = Path(folder) / "model.onnx"
        kept = float32_parts(module, keep_fp32=wishes.keep_fp32, policy=policy, record=record)
        args, named = call.arguments([tensor[:EXAMPLES] for tensor in call.tensors])
        traced = traced_model(module, args, kwargs=named, dynamic_shapes=sizes, metadata=metadata, policy=policy)
        mark_float32(traced, kept)
        write_onnx(traced, source)
        reference = FlatModel(module, call).eval()
        if target.max_batch_size > 1:
            require_batch_invariance(reference, call.names, call.tensors)
        verification = Verification(
            samples=lambda _: [tensor.numpy(force=True) for tensor in call.tensors],
            budget=wishes.budget,
            adversarial=wishes.adversarial,
            accumulators=wishes.accumulators,
            search=wishes.search,
            limits=wishes.limits,
            reference=reference,
            labels=None if samples.labels is None else samples.labels.numpy(force=True),
            record=record,
            notes=(samples.note,) if samples.note else (),
        )
        done = convert_verified(
            source,
            target,
            options=Options(keep_io_types=wishes.keep_io_types),
            verification=verification,
            progress=progress,
            beside=wishes.beside,
        )
        return Certified(**vars(done))  # it was verified


def _require_on_cpu(module: nn.Module) -> None:
    elsewhere = next((t.device for t in (*module.parameters(), *module.buffers()) if t.device != torch.device("cpu")), None)
    if elsewhere is not None:
        raise ExportError(f"the model is on {elsewhere}; call .cpu() first")


def _require_float32(module: nn.Module, call: Call) -> None:
    small = (torch.float16, torch.bfloat16)
    weights = next((parameter.dtype for parameter in module.parameters() if parameter.dtype in small), None)
    if weights is not None:
        raise ExportError(f"the model holds {str(weights)[6:]} weights; expected float32, to compare with: call .float() first")
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.dtype == torch.bfloat16:  # which numpy does not have
            raise ExportError(f"the samples of input {name!r} are bfloat16; expected float32")


def _require_run(module: nn.Module, inputs: Any, call: Call) -> None:
    """Run two samples; where that fails, the error says what forward takes, and what it got of several inputs."""
    try:
        run(module, call, tuple(tensor[:EXAMPLES] for tensor in call.tensors))
    except ExportError as error:
        raise ExportError(f"{error}{described_call(module, inputs)}") from error


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
