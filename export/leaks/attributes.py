"""Tensors that a module holds without having registered them: `.half()`, `.to(device)` and `state_dict` pass them over."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from export.halving.tensors import HeldTensor, held_tensors, unregistered
from export.leaks.operation import WIDE
from export.leaks.places import Place
from export.leaks.regions import assigned_at


@dataclass(frozen=True, kw_only=True)
class TensorAttribute:
    """A tensor that is an attribute, or in a list, tuple or dict that is one, or an attribute of the class.

    Attributes:
        module: Dotted name of the module that holds it.
        name: The attribute, from the module: "scale", "tables.0".
        tensor: It.
        place: Where the attribute is assigned.
    """

    module: str
    name: str
    tensor: Tensor
    place: Place | None


def tensor_attributes(model: nn.Module) -> Iterator[TensorAttribute]:
    """The wide tensors that the modules of a model hold and have not registered, torch's own modules left out."""
    for held in _plain(model):
        name = held.name.removeprefix(f"{held.owner}.")
        yield _attribute(held.owner, type(model.get_submodule(held.owner)), name, held.tensor)
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if not _is_torchs(cls):
                tensors = (
                    (name, value) for name, value in vars(cls).items() if isinstance(value, Tensor) and value.dtype in WIDE
                )
                yield from (_attribute(path, cls, name, tensor) for name, tensor in tensors)


def detached_copy(model: nn.Module) -> nn.Module:
    """A copy of a model; tensors that it keeps from earlier computations lose their history, which cannot be copied."""
    memo: dict[int, Any] = {id(t): t.detach().clone() for t in unregistered(model) if t.grad_fn is not None}
    return copy.deepcopy(model, memo)


def restore_attributes(model: nn.Module, half: nn.Module) -> None:
    """Undo what `to_half` does for attributes: whoever calls `.half()` or `.to()` does not get that."""
    originals = {held.name: held.tensor for held in _plain(model)}
    for held in held_tensors(half):
        if held.kind == "attribute" and held.name in originals:
            held.tensor.data = originals[held.name].detach().clone()


def _plain(model: nn.Module) -> list[HeldTensor]:
    return [
        held
        for held in held_tensors(model)
        if held.kind == "attribute" and held.tensor.dtype in WIDE and not _is_torchs(type(model.get_submodule(held.owner)))
    ]


def _attribute(path: str, cls: type, name: str, tensor: Tensor) -> TensorAttribute:
    return TensorAttribute(module=path, name=name, tensor=tensor, place=assigned_at(cls, name.partition(".")[0]))


def _is_torchs(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")
