"""Submodules that compute in float32 inside a float16 model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from halfserve.amp_core.policy import Policy, Rule
from halfserve.amp_core.recorder import Record, RecordEntry
from halfserve.amp_core.recorder.module_spans import OUTSIDE, ROOT
from halfserve.export.export_errors import ExportError
from halfserve.export.half_module.module_tensors import torch_dtype
from halfserve.export.half_types import FP16, FP16_MAX, HalfType

# The aten operation of each module class.
MODULE_OPS: dict[type[nn.Module], str] = {
    nn.BatchNorm1d: "batch_norm", nn.BatchNorm2d: "batch_norm", nn.BatchNorm3d: "batch_norm", nn.Bilinear: "bilinear",
    nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d", nn.ConvTranspose1d: "conv_transpose1d",
    nn.ConvTranspose2d: "conv_transpose2d", nn.ConvTranspose3d: "conv_transpose3d", nn.Embedding: "embedding",
    nn.GELU: "gelu", nn.GroupNorm: "group_norm", nn.LayerNorm: "layer_norm", nn.Linear: "linear",
    nn.LogSoftmax: "log_softmax", nn.PReLU: "prelu", nn.RMSNorm: "rms_norm", nn.Softmax: "softmax",
    nn.Softplus: "softplus",
}  # fmt: skip
QUANTIZED = ("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")

# An infinity in the result of another operation is more often a mask than overflow.
_COMPUTES = ("mm", "conv", "linear", "norm", "sum", "mean", "pow", "square", "exp", "matmul", "einsum")


def pinned_modules(module: nn.Module, policy: Policy | None = None) -> dict[str, str]:
    """Return the submodules that compute in float32 for their own sake, not for a tensor in them: the reasons by dotted name.

    The policy pins modules whose operation its own changes run in float32. A preset's lists do not count: they serve autocast,
    where a cast is cheap; a user's addition is a measured need. `torch.nn.functional` calls inside a `forward` are not seen. A
    transformers model names modules in `_keep_in_fp32_modules`. Quantized modules take float32.
    """
    quantized = {
        name: "quantized: it takes float32"
        for name, part in module.named_modules(remove_duplicate=False)
        if f"{type(part).__module__}.".startswith(QUANTIZED)
    }
    return {**_by_policy(module, policy), **_by_model(module), **quantized}


def _by_policy(module: nn.Module, policy: Policy | None) -> dict[str, str]:
    if policy is None:
        return {}
    rules = Policy(changes=policy.changes).rules()
    return {
        name: f"the policy runs {MODULE_OPS[type(part)]} in float32"
        for name, part in module.named_modules(remove_duplicate=False)
        if type(part) in MODULE_OPS and rules.get(f"aten::{MODULE_OPS[type(part)]}") is Rule.FP32
    }


def _by_model(module: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for root, part in module.named_modules():
        wanted = {
            *(getattr(part, "_keep_in_fp32_modules", None) or ()),
            *(getattr(part, "_keep_in_fp32_modules_strict", None) or ()),
        }
        if not wanted:
            continue
        pattern = re.compile(rf"(^|\.)({'|'.join(sorted(wanted))})$")
        for name, _ in part.named_modules():
            if name and pattern.search(name):
                found[f"{root}.{name}" if root else name] = "the model's own _keep_in_fp32_modules"
    return found


def overflowing_modules(module: nn.Module, record: Record | None) -> tuple[dict[str, str], list[str]]:
    """Return the submodules whose outputs in forward left float16's range during training: the reasons by dotted name.

    A module without submodules (a Linear) passes its large outputs on, so the module around it stays float32 instead. Warnings
    about the outermost module, which cannot stay float32, come second.

    Raises:
        ExportError: The record is of another model: it names none of this model's modules.
    """
    if record is None:
        return {}, []
    names = {name for name, _ in module.named_modules(remove_duplicate=False)}
    paths = {entry.module for entry in record.entries} - {ROOT, OUTSIDE}
    if paths and not paths & names:
        raise ExportError(f"the record is of another model: it names {min(paths)!r}, which this model does not have")
    found: dict[str, str] = {}
    warnings: list[str] = []
    for entry in _overflowing(record.entries):
        path = "" if entry.module == ROOT else entry.module
        around = path.rpartition(".")[0]
        if path and path in names:
            leaf = next(module.get_submodule(path).children(), None) is None
            found.setdefault(around if leaf and around else path, _reason(entry))
        if path in names and not around and (not path or next(module.get_submodule(path).children(), None) is None):
            warnings.append(f"{_reason(entry)} in {path or 'the outermost module itself'}: float16 follows it; rescale there")
    return found, list(dict.fromkeys(warnings))


def _overflowing(entries: Iterable[RecordEntry]) -> Iterable[RecordEntry]:
    for entry in entries:
        lost = entry.magnitudes.overflow or (entry.magnitudes.largest or 0) > FP16_MAX
        infinite = entry.magnitudes.non_finite and any(part in entry.op for part in _COMPUTES)
        if entry.direction == "forward" and entry.module != OUTSIDE and (lost or infinite):
            yield entry


def _reason(entry: RecordEntry) -> str:
    op = entry.op.removeprefix("aten.").removesuffix(".default")
    largest = entry.magnitudes.largest
    reached = f"{largest:.3g}" if largest is not None and largest > FP16_MAX else "infinity"
    return f"{op} reached {reached} in training (largest float16 is 65504)"


def make_island(module: nn.Module, half: HalfType = FP16) -> None:
    """Cast float16 and bfloat16 arguments of `module` to float32, and float32 results to the half type.

    Forward hooks make the casts: parameter names, types and attributes stay, and `torch.export` traces the casts. A parent that
    reads the weights without calling the module (`nn.MultiheadAttention` reads `out_proj.weight`) must be the island instead.
    """
    module.register_forward_pre_hook(_raise_arguments, with_kwargs=True)
    module.register_forward_hook(partial(_round_results, torch_dtype(half)))


def _raise_arguments(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    raised: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, _raised, (args, kwargs))
    return raised


def _round_results(dtype: torch.dtype, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    return pytree.tree_map_only(Tensor, partial(_halved, dtype=dtype), output)


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _halved(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype == torch.float32 else tensor
