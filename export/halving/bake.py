"""Weights that are computed from others at every call, computed once, before rounding: one rounding instead of three."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from export.errors import ExportError
from export.halving.report import Repair

_SLOTS = ("__dict__", "__weakref__")


def bake(module: nn.Module) -> list[Repair]:
    """Replace parametrized and normalised weights by their values, and apply the `max_norm` of embeddings; in place.

    Raises:
        ExportError: A parametrization fails.
    """
    found = []
    for name, part in list(module.named_modules()):
        if parametrize.is_parametrized(part):
            found.append(_parametrized(name, part))
        found += _normalised(name, part)
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            found.append(_embedding(name, part))
    return found


def _parametrized(name: str, part: Any) -> Repair:
    kinds = sorted({type(step).__name__.strip("_") for steps in part.parametrizations.values() for step in steps})
    # Copies of a module share the class that parametrizing made, and removing changes that class.
    kind = type(part)
    part.__class__ = type(kind.__name__, kind.__bases__, {k: v for k, v in vars(kind).items() if k not in _SLOTS})
    try:
        with torch.no_grad():
            for tensor in list(part.parametrizations):
                parametrize.remove_parametrizations(part, tensor, leave_parametrized=True)
                if tensor not in part._parameters:  # noqa: SLF001  (torch has no public way; it leaves a plain attribute)
                    value = getattr(part, tensor)
                    delattr(part, tensor)
                    part.register_parameter(tensor, nn.Parameter(value.detach()))
    except Exception as error:
        raise ExportError(f"the parametrization of {name!r} cannot be computed: {error}") from error
    text = f"{', '.join(kinds)} computed once, in float32"
    return Repair(pass_name="bake_parametrization", nodes=(name,), text=text)  # noqa: S106  (a pass of the converter)


def _normalised(name: str, part: nn.Module) -> list[Repair]:
    """The hooks that weight_norm and spectral_norm were before parametrizations."""
    found = []
    for hook in list(part._forward_pre_hooks.values()):  # noqa: SLF001  (torch has no public way)
        if isinstance(hook, WeightNorm | SpectralNorm):
            remove = nn.utils.remove_weight_norm if isinstance(hook, WeightNorm) else nn.utils.remove_spectral_norm
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # the old functions say that they are old
                remove(part, hook.name)
            text = f"{type(hook).__name__} computed once, in float32"
            found.append(Repair(pass_name="bake_parametrization", nodes=(name,), text=text))  # noqa: S106  (see above)
    return found


def _embedding(name: str, part: nn.Embedding | nn.EmbeddingBag) -> Repair:
    limit, norm_type = float(part.max_norm or 0), part.norm_type
    with torch.no_grad():
        rows = torch.arange(part.num_embeddings, device=part.weight.device)
        torch.embedding_renorm_(part.weight, rows, limit, norm_type)
    part.max_norm = None
    text = f"rows scaled down to max_norm {limit:g} once, instead of at each look-up"
    return Repair(pass_name="renormalise_embedding", nodes=(name,), text=text)  # noqa: S106  (see above)
