"""Every tensor that a module holds, registered or not, by its dotted name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from export.errors import ExportError

Kind = Literal["parameter", "buffer", "attribute"]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldTensor:
    """A tensor in a module.

    Attributes:
        name: Its dotted name; `block.tables.0` for the first tensor of the list that `block.tables` is.
        owner: Dotted name of the submodule that holds it.
        kind: A parameter, a buffer, or a plain attribute: one that was only assigned, which `.half()` passes over.
        tensor: The tensor.
    """

    name: str
    owner: str
    kind: Kind
    tensor: Tensor


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """All tensors of a module, those that several names lead to once for each name; plain attributes come last.

    Raises:
        ExportError: A lazy module has not seen an input yet, so that its tensors have no sizes.
    """
    found: list[HeldTensor] = []
    for owner, part in module.named_modules(remove_duplicate=False):
        found += [_registered(owner, name, p, "parameter") for name, p in part._parameters.items() if p is not None]  # noqa: SLF001  (named_parameters walks the whole tree each time)
        found += [_registered(owner, name, b, "buffer") for name, b in part._buffers.items() if b is not None]  # noqa: SLF001  (see above)
    known = {id(held.tensor) for held in found}
    for owner, part in module.named_modules(remove_duplicate=False):
        for name, tensor in _plain(part):
            if id(tensor) not in known:
                found.append(HeldTensor(name=_joined(owner, name), owner=owner, kind="attribute", tensor=tensor))
    return found


def unregistered(module: nn.Module) -> list[Tensor]:
    """The plain attributes of a module and its submodules that are tensors."""
    return [tensor for part in module.modules() for _, tensor in _plain(part)]


def _registered(owner: str, name: str, tensor: Tensor, kind: Kind) -> HeldTensor:
    if is_lazy(tensor):
        raise ExportError(f"{_joined(owner, name)!r} has no size yet (a lazy module); run the model once on an example first")
    return HeldTensor(name=_joined(owner, name), owner=owner, kind=kind, tensor=tensor)


def _plain(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(part).items():
        if name not in ("_parameters", "_buffers", "_modules"):
            yield from _in_value(name, value)


def _in_value(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _in_value(f"{name}.{index}", item)
    elif type(value) is dict:
        for key, item in value.items():
            yield from _in_value(f"{name}.{key}", item)


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name
