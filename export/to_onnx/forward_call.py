"""A call of a torch module's forward: its arguments and its results as named tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfserve.export.export_errors import ExportError

CONSTANTS = (bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """A call of a model's forward, separated into tensors and constants.

    Attributes:
        names: The name of each tensor: the parameter's, or `parameter.key` for a tensor inside a dict, list or tuple.
        tensors: The example tensors, in the order given.
        leaves: All leaves of (args, kwargs), with None for the tensors.
        places: The index of each tensor among the leaves.
        spec: The nesting of the leaves.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    spec: pytree.TreeSpec

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with these tensors instead of the examples."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def call_of(module: nn.Module, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> ForwardCall:
    """Separate the arguments of a call into tensors and constants.

    `inputs` is a tensor or numpy array, a sequence of positional arguments, or a mapping of keyword arguments.

    Raises:
        ExportError: `forward` does not take them, none is a tensor, or one is neither a tensor nor a plain constant.
    """
    args, named = as_tensors(_arguments(inputs, kwargs or {}))
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
    return ForwardCall(names=tuple(names), tensors=tuple(tensors), leaves=tuple(leaves), places=tuple(places), spec=spec)


def as_tensors(inputs: Any) -> Any:
    """Return the inputs with a tensor in the place of each numpy array, of the same dtype; arrays that may be written are
    shared.

    Raises:
        ExportError: An array's dtype is none of torch's, such as a text's.
    """
    return pytree.tree_map_only(np.ndarray, _as_tensor, inputs)


def _as_tensor(array: NDArray[Any]) -> Tensor:
    try:
        # torch shares the memory, and knows neither arrays that are read-only nor those with steps backwards.
        return torch.from_numpy(np.require(array, requirements=("C", "W")))
    except TypeError as error:
        raise ExportError(f"an input is an array of {array.dtype}; expected numbers or booleans that torch knows") from error


def _arguments(inputs: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor | np.ndarray):
        return (inputs,), dict(kwargs)
    if isinstance(inputs, Mapping):
        return (), {**inputs, **kwargs}
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes):
        return tuple(inputs), dict(kwargs)
    raise ExportError(
        f"inputs is a {type(inputs).__name__}; expected a tensor, a sequence of arguments, or a dict of them by name"
    )


def _parameters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return names of the parameters that take the positional arguments."""
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


def named_tensors(result: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a model's result with their names, in order.

    A lone tensor is `output`; members of tuples and lists are `output_0`, `output_1`, ...; those of dicts, named tuples and
    dataclasses have their own names; nested ones are joined by a dot. None is left out. The layers of a key-value cache, as
    transformers returns it, are `past_key_values.0.key`, `past_key_values.0.value`, `past_key_values.1.key`, ...

    Raises:
        ExportError: The result holds no tensor, or another type.
    """
    if isinstance(result, Tensor):
        return [("output", result)]
    found = [(".".join(path), leaf) for path, leaf in _leaves(result, ())]
    strange = next((f"{name or 'it'} is a {type(leaf).__name__}" for name, leaf in found if not isinstance(leaf, Tensor)), None)
    if strange or not found:
        raise ExportError(
            f"the model must return tensors, in a tuple, list or dict if there are several; {strange or 'none here'}"
        )
    return [(f"output_{name}" if name[0].isdigit() else name, leaf) for name, leaf in found]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if value is None:
        return
    members = None if isinstance(value, Tensor) else _members(value)
    if members is None:
        yield path, value
        return
    for name, member in members:
        yield from _leaves(member, (*path, name))


def _members(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container; None if it is no container."""
    if isinstance(value, Mapping):
        return [(str(key), member) for key, member in value.items()]
    names = getattr(value, "_fields", None)
    if isinstance(value, tuple) and names is not None:
        return list(zip(names, value, strict=True))
    if isinstance(value, tuple | list):
        return [(str(index), member) for index, member in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return _cache_members(value)


def _cache_members(value: Any) -> list[tuple[str, Any]] | None:
    """Return the layers of a transformers cache, recognised by attributes: transformers is not a dependency."""
    if hasattr(value, "self_attention_cache") and hasattr(value, "cross_attention_cache"):
        pairs = (("decoder", value.self_attention_cache), ("encoder", value.cross_attention_cache))
        members = [(kind, _cache_members(cache) or []) for kind, cache in pairs]
        return [(index, {kind: layer}) for kind, layers in members for index, layer in layers]
    layers = getattr(value, "layers", None)
    if isinstance(layers, list) and all(hasattr(layer, "keys") and hasattr(layer, "values") for layer in layers):
        return [(str(index), {"key": layer.keys, "value": layer.values}) for index, layer in enumerate(layers)]
    return None


def require_python(module: nn.Module) -> None:
    """Check that a module, and each of its parts, runs as Python code.

    Raises:
        ExportError: One is a TorchScript module (scripted, traced or loaded).
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ExportError(
                f"{f'the part {name!r}' if name else 'the model'} is a TorchScript module, which has no Python code; pass the "
                "module that torch.jit.script or torch.jit.trace was given. If only the archive is left, build that module "
                "and load its weights: module.load_state_dict(torch.jit.load(path).state_dict())"
            )
