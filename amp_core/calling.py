"""How a model is called, in training and in export: its arguments, and the implementation of its attention layers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# torch has another implementation of these in evaluation mode.
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def arguments_of(model: nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of a model's call on the input of an item or batch.

    A tuple or list gives forward's parameters in order, a dict gives them by name. Where forward does not accept that, or the
    input is of another type, the input is the only argument.
    """
    if isinstance(inputs, Mapping) and all(isinstance(name, str) for name in inputs) and _takes(model, (), inputs):
        return (), dict(inputs)
    if isinstance(inputs, tuple | list) and _takes(model, tuple(inputs), {}):
        return tuple(inputs), {}
    return (inputs,), {}


def call(model: nn.Module, inputs: Any, *, through: nn.Module | None = None) -> Any:
    """Call a model on the input of a batch, see `arguments_of`, or `through` a wrapper that forwards all arguments to it."""
    args, named = arguments_of(model, inputs)
    return (through or model)(*args, **named)


def described_call(model: nn.Module, inputs: Any) -> str:
    """Return the parameters of forward and the arguments that an input becomes, for an error message; "" for a
    single tensor.
    """
    if not isinstance(inputs, Mapping | tuple | list):
        return ""
    args, named = arguments_of(model, inputs)
    if named:
        given = f"by name, {', '.join(named)}"
    elif len(args) == 1 and args[0] is inputs:
        given = f"all in one, a {_kind(inputs)}"
    else:
        given = f"in order, {len(args)} of them"
    return f"; forward takes ({', '.join(_parameters(model))}) and got the inputs {given}"


def has_fast_path(model: nn.Module) -> bool:
    """Return whether a part of a model may compute other values in evaluation mode, see `without_fast_path`."""
    return any(isinstance(part, _ATTENTION) for part in model.modules())


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Disable torch's fast path, so that attention layers compute in evaluation mode what they compute in training.

    torch.export captures the slow path, too. Under the fast path `nn.TransformerEncoder` packs its input by
    `src_key_padding_mask` and outputs 0 at masked places. In autocast on the CPU the fast path fails, because it looks for
    CUDA's autocast only.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _kind(inputs: Any) -> str:
    return (
        f"dict of {', '.join(map(str, inputs))}" if isinstance(inputs, Mapping) else f"{type(inputs).__name__} of {len(inputs)}"
    )


def _parameters(model: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return ["..."]


def _takes(model: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **named)
    except (TypeError, ValueError):  # the latter where a compiled forward has no signature
        return False
    return True
