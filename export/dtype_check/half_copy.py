"""The half-precision copy of a model that the dtype check runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfserve.export.dtype_check.findings import FindingLog
from halfserve.export.dtype_check.source_lines import SourceLine, assigned_at
from halfserve.export.dtype_check.watched_run import wide_beside
from halfserve.export.dtype_check.wide_tensors import WideTensorTracker, described
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.half_report import TensorDecision
from halfserve.export.half_module.module_tensors import HeldTensor, detached_copy, held_tensors
from halfserve.export.half_module.to_half import to_half
from halfserve.export.half_types import FP16, HalfType

OUTERMOST = re.compile(r"'(?P<name>\w+)' must stay float32 \((?P<reason>.*)\) and belongs to the outermost module")
PULLED_ALONG = ("part of ", "tied to ")


@dataclass(frozen=True, kw_only=True)
class TensorAttribute:
    """A wide tensor that is an attribute, in a list, tuple or dict that is one, or an attribute of the class.

    Attributes:
        module: Dotted name of the module that holds it.
        name: The attribute, from the module: "scale", "tables.0".
        tensor: The tensor.
        place: The place where the attribute is assigned.
    """

    module: str
    name: str
    tensor: Tensor
    place: SourceLine | None


def half_copy(module: nn.Module, log: FindingLog, half: HalfType) -> nn.Module:
    """A half-precision copy of a model in evaluation mode; tensors that have to stay float32 are logged.

    Raises:
        ExportError: A parameter is not finite, or has no size yet.
    """
    try:
        copied = to_half(module, dtype=half.name)
    except ExportError as error:
        found = OUTERMOST.match(str(error))
        if found is None:
            raise
        text = (
            f"the outermost module holds {found['name']!r}, which must stay float32 ({found['reason']}), and its code with it"
        )
        log.add("outermost_table", "warning", assigned_at(type(module), found["name"]), "", text, "submodule")
        plain = detached_copy(module).eval()
        return plain.half() if half is FP16 else plain.bfloat16()
    # Undo what to_half does for attributes: .half() and .to() do not do it.
    originals = {held.name: held.tensor for held in _unregistered_wide(module, half)}
    for held in held_tensors(copied.module):
        if held.kind == "attribute" and held.name in originals:
            held.tensor.data = originals[held.name].detach().clone()
    for decision in copied.report.tensors:
        if decision.action == "kept" and decision.kind != "attribute" and not decision.reason.startswith(PULLED_ALONG):
            _log_kept(module, decision, log)
    return copied.module


def declare_wide_tensors(model: nn.Module, tracker: WideTensorTracker, half: HalfType) -> None:
    """Declare the tensors of a half-precision model that are wider to the tracker."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype in wide_beside(half):
            owner = name.rpartition(".")[0]
            what = (
                f"{name!r} stays {described(tensor)} because {half.name} cannot hold it, and is read past its module's forward"
            )
            tracker.declare(tensor, "kept", what, None, owner)
    for held in tensor_attributes(model, half):
        what = f"the attribute {held.name!r} is {described(held.tensor)}: .half() and .to() skip what is not registered"
        tracker.declare(held.tensor, "attribute", what, held.place, held.module)


def tensor_attributes(model: nn.Module, half: HalfType) -> Iterator[TensorAttribute]:
    """The wide tensors that the modules of a model hold unregistered, except for torch's own modules."""
    for held in _unregistered_wide(model, half):
        name = held.name.removeprefix(f"{held.owner}.")
        yield _attribute(held.owner, type(model.get_submodule(held.owner)), name, held.tensor)
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if not _is_torchs(cls):
                for name, value in vars(cls).items():
                    if isinstance(value, Tensor) and value.dtype in wide_beside(half):
                        yield _attribute(path, cls, name, value)


def cast_inputs(value: object, dtype: torch.dtype) -> object:
    """A copy of nested inputs with every floating tensor in another dtype."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()

    return pytree.tree_map_only(Tensor, cast, value)


def _unregistered_wide(model: nn.Module, half: HalfType) -> list[HeldTensor]:
    return [
        held
        for held in held_tensors(model)
        if held.kind == "attribute"
        and held.tensor.dtype in wide_beside(half)
        and not _is_torchs(type(model.get_submodule(held.owner)))
    ]


def _attribute(path: str, cls: type, name: str, tensor: Tensor) -> TensorAttribute:
    return TensorAttribute(module=path, name=name, tensor=tensor, place=assigned_at(cls, name.partition(".")[0]))


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")


def _log_kept(module: nn.Module, decision: TensorDecision, log: FindingLog) -> None:
    owner, name = decision.owner, decision.name.removeprefix(f"{decision.owner}.")
    place = assigned_at(type(module.get_submodule(owner)), name)
    if "complex" in decision.reason:
        text = f"{name!r} is complex: .half() leaves it complex64, its module computes in float32, and ONNX has no such numbers"
        log.add("complex", "warning", place, owner, text, "view_as_real")
    else:
        text = f"{name!r} stays float32 with its module under to_half ({decision.reason}); .half() would round it"
        log.add("kept_float32", "note", place, owner, text, "to_half")
