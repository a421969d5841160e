"""Converts a torch module, verifies it, and writes it to a model repository."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import onnx_ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfserve.amp_core.calling import arguments_of, described_call
from halfserve.amp_core.policy import Policy
from halfserve.amp_core.recorder import Record
from halfserve.export.certificate.budget import Budget, usual_budgets
from halfserve.export.certificate.certificate import signing_key
from halfserve.export.conversion_results import Certified
from halfserve.export.conversion_settings import ModuleKeywords, ModuleSettings
from halfserve.export.export_errors import ExportError
from halfserve.export.file_conversion import Beside, convert_verified, nothing_beside
from halfserve.export.half_module.fp32_modules import overflowing_modules, pinned_modules
from halfserve.export.half_module.module_tensors import detached_copy
from halfserve.export.half_types import HalfName
from halfserve.export.onnx_fp16.graph import all_nodes
from halfserve.export.onnx_fp16.planning.plan import KEEP_FP32
from halfserve.export.onnx_fp16.pool_windows import bound_to_kernel
from halfserve.export.placement.cuda_kernels import lost_on_cuda
from halfserve.export.repository.repository_target import RepositoryTarget
from halfserve.export.samples import Samples
from halfserve.export.to_onnx.capture import FlatModel, run
from halfserve.export.to_onnx.dimensions import BATCH
from halfserve.export.to_onnx.export_onnx import OLDEST, traced_model, write_onnx
from halfserve.export.to_onnx.forward_call import ForwardCall, as_tensors, call_of, require_python
from halfserve.export.to_onnx.layer_translations import ATTENTION_OPSET
from halfserve.export.to_onnx.provenance import MODULE
from halfserve.export.verification.criteria import Verification
from halfserve.export.verification.samples import SampleSet
from halfserve.export.verification.torch_reference import require_batch_invariance

if TYPE_CHECKING:
    from halfserve.amp_core.recorder import Record
    from halfserve.protos.certificate_signature import SigningKey


EXAMPLES = 2
HALVES = (torch.float16, torch.bfloat16)


def export_module(
    module: nn.Module,
    samples: Any,
    repository: Path | str,
    name: str,
    *,
    labels: Tensor | NDArray[Any] | None = None,
    budget: Budget | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    policy: Policy | str | None = None,
    record: Record | None = None,
    version: int | None = None,
    max_batch_size: int = 32,
    fp32_twin: bool = False,
    certificate_key: Path | str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **options: Unpack[ModuleKeywords],
) -> Certified:
    """Convert a module to float16 or bfloat16, verify it on samples, and add it to a model repository if it passes.

    This is what `halfserve export` does with a checkpoint's model. Over budget, the fewest nodes that have to stay float32 are
    searched for. What a training policy added to float32, and what a training record shows over float16's range, stays float32.

    Args:
        module: The module, in evaluation mode and on the CPU; it stays as it is. One that holds half-precision weights is
            compared with a copy in float32, which keeps every weight's value.
        samples: Inputs, samples first: a tensor; a tuple (forward's parameters in order) or a dict (by name) of tensors. Numpy
            arrays do too; float64, numpy's own type, becomes the float32 of a module that has no float64 itself.
        repository: The model repository's folder, made if missing; or its URL in object storage.
        name: The model's name.
        labels: The samples' true classes, for the accuracy: whole numbers, shape (samples,).
        budget: How much the converted model may differ; the usual budget of its type by default.
        dynamic: Names of other sizes that may vary, by input and axis: `{"tokens": {1: "length"}}`; `"4*height"` where the
            model takes multiples of 4 alone.
        policy: The autocast policy of the training run.
        record: The record of the training run.
        version: The version; the next free one by default.
        max_batch_size: Largest batch that the server may form.
        fp32_twin: Whether the float32 model is written too, for a server that answers from it where half precision fails.
        certificate_key: PEM file of an Ed25519 private key, which signs the certificate.
        progress: Called with each step before it begins.
        options: The fields of `ModuleSettings`.

    Returns:
        Where it was written (`path`), the `certificate`, and what the conversion and the search did.

    Raises:
        BudgetExceeded: The converted model is over budget; nothing was written.
        ExportError: The export fails for another reason; nothing was written.
        PolicyError: The policy cannot be read.
    """
    target = RepositoryTarget(
        repository=repository, name=name, version=version, max_batch_size=max_batch_size, fp32_twin=fp32_twin
    )
    given = Samples(inputs=as_tensors(samples), labels=as_tensors(labels)).fitting(module)
    return export_verified(
        module,
        given,
        target,
        ModuleSettings.of_call("export_module", **options),
        budget=budget,
        dynamic=dynamic,
        policy=Policy.parse(policy) if isinstance(policy, str) else policy or Policy(),
        record=record,
        key=signing_key(certificate_key),
        progress=progress,
    )


def export_verified(
    module: nn.Module,
    samples: Samples,
    target: RepositoryTarget,
    settings: ModuleSettings,
    *,
    budget: Budget | Mapping[HalfName, Budget] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    policy: Policy,
    record: Record | None = None,
    metadata: Mapping[str, str] | None = None,
    key: SigningKey | None = None,
    progress: Callable[[str], None] = lambda _: None,
    beside: Beside = nothing_beside,
) -> Certified:
    """Export a module to a repository target; see `export_module`.

    A copy in float32 takes the place of a module that holds half-precision weights. `metadata` are more entries for the
    model's, `beside` makes more files of the certificate.

    Raises:
        BudgetExceeded: The converted model is over budget; nothing was written.
        ExportError: The export fails for another reason; nothing was written.
    """
    require_python(module)
    _require_on_cpu(module)
    inputs = samples.inputs
    if any(parameter.dtype in HALVES for parameter in module.parameters()):
        module = detached_copy(module).float()
        inputs = pytree.tree_map_only(Tensor, _widened, inputs)
    args, named = arguments_of(module, inputs)
    call = call_of(module, args, kwargs=named)
    _require_numpy(call)
    _require_run(module, inputs, call)
    with tempfile.TemporaryDirectory(prefix="halfserve-export-") as folder:
        progress("exporting to ONNX")
        source = Path(folder) / "model.onnx"
        traced = _traced(module, call, _sizes(call, dynamic or {}), settings, metadata=metadata, policy=policy)
        mark_float32(traced, float32_parts(module, settings, policy=policy, record=record))
        write_onnx(traced, source)
        reference = FlatModel(module, call).eval()
        if target.max_batch_size > 1:
            require_batch_invariance(reference, call.names, call.tensors)
        verification = Verification(
            samples=lambda _: SampleSet(
                inputs=[tensor.numpy(force=True) for tensor in call.tensors], note=samples.note, traffic=samples.traffic
            ),
            budget=budget or usual_budgets(),
            reference=reference,
            labels=None if samples.labels is None else samples.labels.numpy(force=True),
            record=record,
            task=None if target.task is None else target.task.judge,
            key=key,
        )
        return Certified(**vars(convert_verified(source, target, settings, verification, progress=progress, beside=beside)))


def _traced(
    module: nn.Module,
    call: ForwardCall,
    sizes: dict[str, dict[int, str]] | None,
    settings: ModuleSettings,
    *,
    metadata: Mapping[str, str] | None,
    policy: Policy,
) -> onnx_ir.Model:
    args, named = call.arguments([tensor[:EXAMPLES] for tensor in call.tensors])

    def traced_at(opset_version: int | None) -> onnx_ir.Model:
        given: dict[str, Any] = {"kwargs": named, "dynamic_shapes": sizes, "metadata": metadata, "policy": policy}
        return traced_model(module, args, opset_version=opset_version, **given)

    return _with_whole_attention(traced_at) if settings.target_device == "cuda" else traced_at(None)


def _with_whole_attention(traced_at: Callable[[int | None], onnx_ir.Model]) -> onnx_ir.Model:
    """Return the model with Attention in one node, where each has a kernel on CUDA, and no other operator loses its own.

    A mask must be boolean: the repairs for numbers that hide know Softmax alone.
    """
    with suppress(ExportError):  # a model that this opset cannot express, or an error that the other opset raises again
        whole = traced_at(ATTENTION_OPSET)
        masks = [node.inputs[3:4] for node in all_nodes(whole) if node.op_type == "Attention" and not node.domain]
        boolean = all(value is None or value.dtype == onnx_ir.DataType.BOOL for mask in masks for value in mask)
        used = bound_to_kernel(all_nodes(whole), repair=True)
        if masks and boolean and not lost_on_cuda(used, OLDEST, ATTENTION_OPSET):
            return whole
    return traced_at(None)


def _require_on_cpu(module: nn.Module) -> None:
    elsewhere = next((t.device for t in (*module.parameters(), *module.buffers()) if t.device != torch.device("cpu")), None)
    if elsewhere is not None:
        raise ExportError(f"the model is on {elsewhere}; call .cpu() first")


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def _require_numpy(call: ForwardCall) -> None:
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
            raise ExportError(f"the samples of input {name!r} are bfloat16; expected float32")


def _require_run(module: nn.Module, inputs: Any, call: ForwardCall) -> None:
    """Run two samples; an error names the parameters of forward and the inputs."""
    try:
        run(module, call, tuple(tensor[:EXAMPLES] for tensor in call.tensors))
    except ExportError as error:
        raise ExportError(f"{error}{described_call(module, inputs)}") from error


def _sizes(call: ForwardCall, dynamic: Mapping[str, Mapping[int, str]]) -> dict[str, dict[int, str]] | None:
    """Return the dynamic sizes for `traced_model`; None makes the batch alone dynamic."""
    if not dynamic:
        return None
    dimensions = dict(zip(call.names, (tensor.dim() for tensor in call.tensors), strict=True))
    for name, axes in dynamic.items():
        if name not in dimensions:
            raise ExportError(f"there is no input {name!r} whose size could vary; the model takes {', '.join(dimensions)}")
        if (last := max(axes)) >= dimensions[name]:
            raise ExportError(f"input {name!r} has no axis {last}; with the batch it has {dimensions[name]}, counted from 0")
    return {name: {0: BATCH, **dynamic.get(name, {})} for name, count in dimensions.items() if count}


def float32_parts(
    module: nn.Module, settings: ModuleSettings, *, policy: Policy | None = None, record: Record | None = None
) -> dict[str, str]:
    """Return the submodules and tensors that the user, the policy or the training record keeps in float32: reasons by dotted
    name.

    A submodule includes its parts. See `export_module` for the arguments; a type of float32's range holds the outputs that left
    float16's range in training.

    Raises:
        ExportError: A pattern matches nothing, or the record is of another model.
    """
    parts = pinned_modules(module, policy)
    if settings.dtype == "auto" or not settings.half.has_float32_range:
        parts |= overflowing_modules(module, record)[0]
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers(), *module.named_modules()) if name]
    for pattern in settings.keep_fp32:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ExportError(f"keep_fp32 {pattern!r} matches no parameter, buffer or submodule; names look like {names[:3]}")
        parts |= dict.fromkeys(matching, f"keep_fp32 {pattern!r}")
    return parts


def mark_float32(model: onnx_ir.Model, parts: Mapping[str, str]) -> None:
    """Mark the nodes of these submodules, and the nodes that read these tensors, for the converter.

    Raises:
        ExportError: No node belongs to a part that `keep_fp32` names: it was folded into its neighbours, or does not run.
    """
    found: set[str] = set()
    for node in model.graph.all_nodes():
        for name in _names(node):
            part = next((part for part in _itself_and_parents(name) if part in parts), None)
            if part is not None:
                found.add(part)
                node.metadata_props[KEEP_FP32] = parts[part]
    lost = next((part for part in parts if part not in found and parts[part].startswith("keep_fp32")), None)
    if lost is not None:
        raise ExportError(f"{lost!r} is to stay float32, and nothing in the graph comes from it; name the module around it")


def _names(node: onnx_ir.Node) -> Iterator[str]:
    module = node.metadata_props.get(MODULE)
    if module is not None:
        yield module
    for value in node.inputs:
        if value is not None and value.is_initializer() and value.name is not None:
            yield value.name


def _itself_and_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
