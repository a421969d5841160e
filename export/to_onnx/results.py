"""What a model returned, as a flat row of named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from export.errors import ExportError


def named_tensors(result: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a model's result with their names, in the result's own order.

    A lone tensor is `output`; members of tuples and lists are `output_0`, `output_1`, ...; those of dicts, named tuples and
    dataclasses have their own names; nested ones are joined by a dot. None is left out. The layers of a key-value cache, as
    transformers returns it, are `past_key_values.0.key`, `past_key_values.0.value`, `past_key_values.1.key`, ...

    Raises:
        ExportError: The result holds no tensor, or something else than tensors.
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
    """The named parts of a container; None if it is no container."""
    if isinstance(value, Mapping):
        return [(str(key), member) for key, member in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return [(str(index), member) for index, member in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return _cache_members(value)


def _cache_members(value: Any) -> list[tuple[str, Any]] | None:
    """The layers of one of transformers' caches, known by their attributes: that library is none of our dependencies."""
    if hasattr(value, "self_attention_cache") and hasattr(value, "cross_attention_cache"):
        pairs = (("decoder", value.self_attention_cache), ("encoder", value.cross_attention_cache))
        members = [(kind, _cache_members(cache) or []) for kind, cache in pairs]
        return [(index, {kind: layer}) for kind, layers in members for index, layer in layers]
    layers = getattr(value, "layers", None)
    if isinstance(layers, list) and all(hasattr(layer, "keys") and hasattr(layer, "values") for layer in layers):
        return [(str(index), {"key": layer.keys, "value": layer.values}) for index, layer in enumerate(layers)]
    return None
