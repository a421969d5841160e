"""What a model's inputs and outputs are called, and which of their sizes may vary."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from export.errors import ExportError

BATCH = "batch"


def input_names(module: nn.Module, count: int) -> list[str]:
    """The names of the first `count` parameters of the module's `forward`; `*args` gives `args_0`, `args_1`, ...

    Raises:
        ExportError: `forward` takes fewer.
    """
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{index}" for index in range(count - len(names))]
        elif parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            names.append(parameter.name)
    if len(names) < count:
        raise ExportError(f"{type(module).__name__}.forward takes {len(names)} inputs ({', '.join(names)}), {count} were given")
    return names[:count]


def output_names(result: Any) -> list[str]:
    """Names for the tensors of a model's result, in the order in which `torch.export` flattens them.

    A lone tensor is `output`; members of tuples and lists are `output_0`, `output_1`, ...; those of dicts, named tuples and
    dataclasses have their own names; nested ones are joined by a dot.

    Raises:
        ExportError: The result holds no tensor, or something else than tensors.
    """
    if isinstance(result, Tensor):
        return ["output"]
    named = [(_path(path), leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if leaf is not None]
    strange = next((f"{name} is a {type(leaf).__name__}" for name, leaf in named if not isinstance(leaf, Tensor)), None)
    if strange or not named:
        raise ExportError(
            f"the model must return tensors, in a tuple, list or dict if there are several; {strange or 'none here'}"
        )
    return [f"output_{name}" if name[0].isdigit() else name for name, _ in named]


def dynamic_batch(inputs: Sequence[Tensor]) -> tuple[dict[int, str] | None, ...]:
    """The default for `dynamic_shapes`: the first dimension of every input that has one is the batch."""
    return tuple({0: BATCH} if tensor.dim() else None for tensor in inputs)


def as_dims(dynamic_shapes: Any) -> Any:
    """Replace names by `torch.export.Dim`s: one name is one size, wherever it stands."""
    dims: dict[str, Any] = {}

    def dim(name: str) -> Any:
        return dims.setdefault(name, torch.export.Dim(name, min=1))

    return pytree.tree_map_only(str, dim, dynamic_shapes)


def at_least_two(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Repeat a batch of one: `torch.export` takes a size of 1 for a constant.

    Raises:
        ExportError: The inputs disagree on the batch size, or have an empty batch.
    """
    sizes = {tensor.shape[0] for tensor in inputs if tensor.dim()}
    if len(sizes) > 1 or 0 in sizes:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        raise ExportError(f"the first dimension of every input must be the same batch, at least 1; got shapes {shapes}")
    if sizes != {1}:
        return tuple(inputs)
    return tuple(torch.cat([tensor, tensor]) if tensor.dim() else tensor for tensor in inputs)


def _path(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step)))) for step in path)
