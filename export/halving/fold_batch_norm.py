"""BatchNorm folded into the layer before it, in float64: float16 cannot hold its variance, and rounding twice costs digits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from export.halving.report import Repair
from export.weight_ledger import FP16_MAX

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def fold_batch_norm(module: nn.Module, may_fold: Callable[[str], bool]) -> list[Repair]:
    """Fold each BatchNorm that only ever follows one convolution into it, in place.

    Which follows which is read from a symbolic trace of the module, or of those submodules that can be traced. The BatchNorm
    becomes an Identity. Left alone are modules with hooks, modules that are used or tied elsewhere, and what float16 could not
    hold any more after folding.

    Args:
        module: The model in evaluation mode.
        may_fold: Whether a submodule, by its dotted name, may be changed.
    """
    if not any(isinstance(part, _BatchNorm) for part in module.modules()):
        return []
    uses = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    ties = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    found = []
    for first, second in _pairs(module, ""):
        layer, norm = module.get_submodule(first), module.get_submodule(second)
        alone = all(uses[id(part)] == 1 and _is_plain(part) and _is_untied(part, ties) for part in (layer, norm))
        if alone and may_fold(first) and may_fold(second) and _folded(layer, norm):
            parent, _, name = second.rpartition(".")
            setattr(module.get_submodule(parent), name, nn.Identity().eval())
            text = f"{second} folded into {first}, in float64"
            found.append(Repair(pass_name="fold_batch_norm", nodes=(first, second), text=text))  # noqa: S106  (a pass of the converter)
    return found


def _pairs(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Names of a layer and the BatchNorm that is the only reader of its result."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # noqa: BLE001  (the user's forward decides on values; perhaps its parts can be traced)
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


def _folded(layer: Any, norm: Any) -> bool:
    """Fold, if the layer is of a kind that can take it up and float16 holds the result."""
    # Not a Linear: on (batch, length, features) it gives features last, and BatchNorm1d takes the length for the channels.
    if not isinstance(layer, (*CONVOLUTIONS, *TRANSPOSED)) or norm.num_features != layer.out_channels:
        return False
    if norm.running_mean is None or norm.running_var is None:
        return False
    with torch.no_grad():
        weight, bias = _folded_values(layer, norm)
        if not all(bool(values.isfinite().all() and (values.abs() <= FP16_MAX).all()) for values in (weight, bias)):
            return False
        layer.weight.data = weight.to(layer.weight.dtype)
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
    return True


def _folded_values(layer: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """The weight is weight * g / sqrt(var + eps), the bias (bias - mean) * g / sqrt(var + eps) + b, in float64."""
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
