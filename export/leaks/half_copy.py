"""The model in float16, as `to_half` makes it, and what could not be rounded."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.errors import ExportError
from export.halving.report import TensorDecision
from export.halving.to_half import to_half
from export.leaks.attributes import detached_copy, restore_attributes, tensor_attributes
from export.leaks.log import Log
from export.leaks.operation import WIDE
from export.leaks.provenance import Provenance, described
from export.leaks.regions import assigned_at

OUTERMOST = re.compile(r"'(?P<name>\w+)' must stay float32 \((?P<reason>.*)\) and belongs to the outermost module")
PULLED_ALONG = ("part of ", "tied to ")


def half_copy(module: nn.Module, log: Log) -> nn.Module:
    """A float16 copy of a model in evaluation mode; what has to stay float32 is logged.

    Raises:
        ExportError: A parameter is not finite, or has no size yet.
    """
    try:
        half = to_half(module)
    except ExportError as error:
        found = OUTERMOST.match(str(error))
        if found is None:
            raise
        text = (
            f"the outermost module holds {found['name']!r}, which must stay float32 ({found['reason']}), and its code with it"
        )
        log.add("outermost_table", "warning", assigned_at(type(module), found["name"]), "", text, "submodule")
        return detached_copy(module).eval().half()
    restore_attributes(module, half.module)
    for decision in half.report.tensors:
        if decision.action == "kept" and decision.kind != "attribute" and not decision.reason.startswith(PULLED_ALONG):
            _tell_kept(module, decision, log)
    return half.module


def declare_what_stays(half: nn.Module, provenance: Provenance) -> None:
    """Tell provenance about the tensors of a float16 model that are not float16."""
    for name, tensor in [*half.named_parameters(), *half.named_buffers()]:
        if tensor.dtype in WIDE:
            owner = name.rpartition(".")[0]
            what = f"{name!r} stays {described(tensor)} because float16 cannot hold it, and is read past its module's forward"
            provenance.declare(tensor, "kept", what, None, owner)
    for held in tensor_attributes(half):
        what = f"the attribute {held.name!r} is {described(held.tensor)}: .half() and .to() pass over what is not registered"
        provenance.declare(held.tensor, "attribute", what, held.place, held.module)


def halved(value: object) -> object:
    """Inputs with every floating tensor in float16."""
    return pytree.tree_map_only(Tensor, _as_half, value)


def widened(value: object) -> object:
    """Inputs with every floating tensor in float32."""
    return pytree.tree_map_only(Tensor, _as_float32, value)


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor.clone()


def _as_half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16, copy=True) if tensor.is_floating_point() else tensor.clone()


def _tell_kept(module: nn.Module, decision: TensorDecision, log: Log) -> None:
    owner, name = decision.owner, decision.name.removeprefix(f"{decision.owner}.")
    place = assigned_at(type(module.get_submodule(owner)), name)
    if "complex" in decision.reason:
        text = f"{name!r} is complex: .half() leaves it complex64, its module computes in float32, and ONNX has no such numbers"
        log.add("complex", "warning", place, owner, text, "view_as_real")
        return
    text = f"{name!r} stays float32 with its module under to_half ({decision.reason}); .half() would round it"
    log.add("kept_float32", "note", place, owner, text, "to_half")
