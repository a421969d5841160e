"""The arguments that a model is called with: which of them are tensors, and what those are called."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.errors import ExportError

CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a model, taken apart into its tensors and the rest.

    Attributes:
        names: One name per tensor: the parameter's, or `parameter.key` for a tensor inside a dict, list or tuple.
        tensors: The example tensors, in the order given.
        leaves: All leaves of (args, kwargs), with None in the places of the tensors.
        places: For each tensor, its index among the leaves.
        spec: How the leaves were nested.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: pytree.TreeSpec

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with these tensors in the places of the examples."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def call_of(module: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> Call:
    """Take the arguments of a call apart.

    Args:
        module: The model.
        inputs: A tensor, a sequence of positional arguments, or a mapping of keyword arguments.
        kwargs: More keyword arguments.

    Raises:
        ExportError: `forward` does not take them, none is a tensor, or one is neither a tensor nor a plain constant.
    """
    args, named = _arguments(inputs, kwargs or {})
    parameters = _parameters(module, args, named)
    paths, spec = pytree.tree_flatten_with_path((args, named))
    leaves, names, tensors, places = [], [], [], []
    for place, (path, leaf) in enumerate(paths):
        name = _name(path, parameters)
        leaves.append(None if isinstance(leaf, Tensor) else leaf)
        if isinstance(leaf, Tensor):
            names.append(name)
            tensors.append(leaf)
            places.append(place)
        elif leaf is not None and not isinstance(leaf, CONSTANTS):
            raise ExportError(_unfit(name, leaf))
    if not tensors:
        raise ExportError("inputs: expected an example tensor for each parameter of forward")
    return Call(names=tuple(names), tensors=tuple(tensors), leaves=tuple(leaves), places=tuple(places), spec=spec)


def _arguments(inputs: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), dict(kwargs)
    if isinstance(inputs, Mapping):
        return (), {**inputs, **kwargs}
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return tuple(inputs), dict(kwargs)
    raise ExportError(
        f"inputs is a {type(inputs).__name__}; expected a tensor, a sequence of arguments, or a dict of them by name"
    )


def _parameters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Names of the parameters that the positional arguments go to."""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        taken = ", ".join(signature.parameters)
        raise ExportError(f"{type(module).__name__}.forward({taken}) does not take these inputs: {error}") from error
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(len(args) - len(names))]
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names


def _name(path: pytree.KeyPath, parameters: Sequence[str]) -> str:
    group, first, *rest = [_step(step) for step in path]
    head = parameters[int(first)] if group == "0" else first
    return ".".join([head, *rest])


def _step(step: Any) -> str:
    return str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step))))


def _unfit(name: str, leaf: Any) -> str:
    kind = type(leaf).__name__
    if "Cache" in kind:
        return (
            f"input {name!r} is a {kind}; an ONNX model takes tensors only: wrap the model so that it takes the cache's tensors"
        )
    return f"input {name!r} is a {kind}; expected a tensor, or a plain number, text or None that becomes part of the model"
