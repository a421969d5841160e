"""Changes of the float32 module, equal in exact arithmetic, after which float16 holds it better."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.half_report import ModuleRepair
from halfserve.export.half_types import FP16, HalfType

_SLOTS = ("__dict__", "__weakref__")

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def bake(module: nn.Module) -> list[ModuleRepair]:
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


def _parametrized(name: str, part: Any) -> ModuleRepair:
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
    return ModuleRepair(pass_name="bake_parametrization", nodes=(name,), text=text)  # noqa: S106  (no password)


def _normalised(name: str, part: nn.Module) -> list[ModuleRepair]:
    """Compute the forward hooks of the old weight_norm and spectral_norm."""
    found = []
    for hook in list(part._forward_pre_hooks.values()):  # noqa: SLF001  (torch has no public way)
        if isinstance(hook, WeightNorm | SpectralNorm):
            remove = nn.utils.remove_weight_norm if isinstance(hook, WeightNorm) else nn.utils.remove_spectral_norm
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # these functions warn that they are deprecated
                remove(part, hook.name)
            text = f"{type(hook).__name__} computed once, in float32"
            found.append(ModuleRepair(pass_name="bake_parametrization", nodes=(name,), text=text))  # noqa: S106  (no password)
    return found


def _embedding(name: str, part: nn.Embedding | nn.EmbeddingBag) -> ModuleRepair:
    limit, norm_type = float(part.max_norm or 0), part.norm_type
    with torch.no_grad():
        rows = torch.arange(part.num_embeddings, device=part.weight.device)
        torch.embedding_renorm_(part.weight, rows, limit, norm_type)
    part.max_norm = None
    text = f"rows scaled down to max_norm {limit:g} once, instead of at each look-up"
    return ModuleRepair(pass_name="renormalise_embedding", nodes=(name,), text=text)  # noqa: S106  (no password)


def fold_batch_norm(module: nn.Module, may_fold: Callable[[str], bool], half: HalfType = FP16) -> list[ModuleRepair]:
    """Fold each BatchNorm that only ever follows one convolution into it, in place; it becomes an Identity.

    The order of calls is read from a symbolic trace of the module, or of the submodules that can be traced. Folding skips
    modules with hooks, modules used or tied elsewhere, modules whose name `may_fold` denies, and folds whose result is over the
    half type's range.
    """
    if not any(isinstance(part, _BatchNorm) for part in module.modules()):
        return []
    uses = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    ties = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    found = []
    for first, second in _pairs(module, ""):
        layer, norm = module.get_submodule(first), module.get_submodule(second)
        alone = all(uses[id(part)] == 1 and _is_plain(part) and _is_untied(part, ties) for part in (layer, norm))
        if alone and may_fold(first) and may_fold(second) and _folded(layer, norm, half):
            parent, _, name = second.rpartition(".")
            setattr(module.get_submodule(parent), name, nn.Identity().eval())
            text = f"{second} folded into {first}, in float64"
            found.append(ModuleRepair(pass_name="fold_batch_norm", nodes=(first, second), text=text))  # noqa: S106  (no password)
    return found


def _pairs(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield names of each layer whose result a BatchNorm alone reads, and of that BatchNorm."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # noqa: BLE001  (the user's forward branches on values; its parts may be traceable)
        for name, child in module.named_children():
            if any(isinstance(part, _BatchNorm) for part in child.modules()):
                yield from _pairs(child, f"{prefix}{name}.")
        return
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(module.get_submodule(str(node.target)), _BatchNorm):
            before = node.args[0] if len(node.args) == 1 and not node.kwargs else None
            if (
                isinstance(before, fx.Node)
                and before.op == "call_module"
                and len(before.users) == 1
                and calls[before.target] == calls[node.target] == 1
            ):
                yield f"{prefix}{before.target}", f"{prefix}{node.target}"


def _is_plain(part: nn.Module) -> bool:
    hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks)  # noqa: SLF001  (torch has no public way)
    return type(part).__module__.startswith("torch.nn.modules.") and not any(hooks)


def _is_untied(part: nn.Module, ties: Counter[int]) -> bool:
    return all(ties[id(parameter)] == 1 for parameter in part.parameters(recurse=False))


def _folded(layer: Any, norm: Any, half: HalfType) -> bool:
    """Fold if the layer is a convolution and the half type holds the result; whether it did."""
    # Not a Linear: on (batch, length, features) it gives features last, and BatchNorm1d takes the length for the channels.
    if not isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) or norm.num_features != layer.out_channels:
        return False
    if norm.running_mean is None or norm.running_var is None:
        return False
    with torch.no_grad():
        weight, bias = _folded_values(layer, norm)
        if not all(bool(values.isfinite().all() and (values.abs() <= half.largest).all()) for values in (weight, bias)):
            return False
        layer.weight.data = weight.to(layer.weight.dtype)
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
    return True


def _folded_values(layer: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the weight is weight * g / sqrt(var + eps), the bias (bias - mean) * g / sqrt(var + eps) + b, in float64."""
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight.double()
    shift = 0.0 if norm.bias is None else norm.bias.double()
    bias = 0.0 if layer.bias is None else layer.bias.double()
    weight = layer.weight.double()
    if isinstance(layer, TRANSPOSED):  # (inputs, outputs per group, ...): the groups lie one after the other along the inputs
        inputs, per_group, *kernel = weight.shape
        grouped = weight.reshape(layer.groups, inputs // layer.groups, per_group, *kernel)
        weight = (grouped * scale.reshape(layer.groups, 1, per_group, *[1] * len(kernel))).reshape(weight.shape)
    else:
        weight = weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    return weight, (bias - norm.running_mean.double()) * scale + shift
